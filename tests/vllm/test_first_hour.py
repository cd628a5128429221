"""docs/first_hour.md: its server of vLLM starts, and answers its request with the tokens of transformers."""

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

from tests.docs.walkthrough import ROOT, blocks
from tests.ports import free_port
from tests.vllm.checkpoints import write
from tests.vllm.http import post, said_by_transformers, served, write_tokenizer

PROMPT = "w17 w33 w9"


def shown(word: str) -> list[str]:
    """The words of the page's command that has this one."""
    text = "".join(block.text for block in blocks(ROOT / "docs" / "first_hour.md") if block.language == "console")
    (line,) = [line for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE) if word in shlex.split(line)]
    return shlex.split(line)


def test_the_page_s_server_answers_its_request(tmp_path: Path) -> None:
    """On a model with heads as small as the page's; started in a folder that holds one called `lamina`."""
    folder, port = write(tmp_path / "model", "small-heads"), free_port()
    tokenizer = write_tokenizer(folder)
    (tmp_path / "lamina").mkdir()
    setting, _, *words, background = shown("vllm.entrypoints.openai.api_server")
    assert background == "&"
    options = dict(itertools.pairwise(words))
    name, request = options["--model"], shown("curl")
    assert request[2] == f"http://127.0.0.1:{options['--port']}/v1/completions"
    replaced = {name: str(folder), options["--port"]: str(port)}
    command = [sys.executable, *(replaced.get(word, word) for word in words), "--served-model-name", name]
    body = json.loads(request[-1]) | {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    assert body["model"] == name
    with served(command, port, tmp_path / "server.txt", dict([setting.split("=")])) as address:
        answer = json.loads(post(f"{address}/completions", body))
    expected = said_by_transformers(folder, tokenizer(PROMPT).input_ids, 8)
    special = {f"w{i}" for i in tokenizer.all_special_ids}  # which the server leaves out
    assert answer["choices"][0]["text"].split() == [word for word in expected if word not in special]
    assert answer["usage"]["completion_tokens"] == 8
