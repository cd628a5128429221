"""`transformers serve` on a checkpoint: with the code that travels with it, and `python -m lamina serve` without.

These tests stand here because vLLM's environment has what a server needs.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina import MODELLING_FILES, modelling_source
from lamina.configuration_lamina import AUTO_MAP
from tests.ports import free_port
from tests.vllm.checkpoints import write
from tests.vllm.http import post, said_by_transformers, said_to_a_client, served, streamed, write_tokenizer

# `import lamina` fails in the first, installed or not.
WITHOUT = "import sys; sys.modules['lamina'] = None; from transformers.cli.transformers import main; main()"
WAYS = {"remote code": ["-c", WITHOUT, "serve", "--trust-remote-code"], "installed": ["-m", "lamina", "serve"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = write(tmp_path_factory.mktemp("served") / "model", "loss_aware")
    prompt = write_tokenizer(written).apply_chat_template([{"role": "user", "content": "w17"}], return_dict=False)
    assert prompt == [5, 17]
    for name in MODELLING_FILES:
        (written / name).write_bytes(modelling_source(name))
    config = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps({**config, "auto_map": AUTO_MAP}))
    return written


@pytest.fixture(scope="module", params=WAYS)
def url(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, logs = free_port(), tmp_path_factory.mktemp("log")
    command = [sys.executable, *WAYS[request.param], "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    options = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(logs / "modules")}
    with served(command, port, logs / "server.txt", options) as address:
        yield address


def test_chat(url: str, folder: Path) -> None:
    """Eight greedy tokens, all at once and streamed."""
    body = {
        "model": str(folder),
        "messages": [{"role": "user", "content": "w17 w33"}],
        "max_tokens": 8,
        "generation_config": json.dumps({"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}),
    }
    expected = said_by_transformers(folder, [5, 17, 33, 9], 8)
    whole = json.loads(post(f"{url}/chat/completions", body))
    assert whole["choices"][0]["message"]["content"].split() == expected, whole
    parts = streamed(post(f"{url}/chat/completions", {**body, "stream": True}))
    assert "".join(part["delta"].get("content") or "" for part in parts).split() == expected


def test_a_client_of_openai(url: str, folder: Path) -> None:
    greedy = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    said = said_to_a_client(url, str(folder), extra_body={"generation_config": json.dumps(greedy)})
    assert said == [said_by_transformers(folder, [5, 17, 33, 9], 8)] * 2
