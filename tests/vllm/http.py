"""Starts servers of a checkpoint, sends requests over HTTP, and computes the expected answers."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lamina import LaminaForCausalLM

TEMPLATE = "{% for m in messages %}w5 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer with a word for each of the 128 tokens: w3, w4, … after the special ones."""
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 128))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def served(command: list[str], port: int, log: Path, environment: dict[str, str]) -> Iterator[str]:
    """Yield the address of a server's API once it answers to /health, and stop it at the end."""
    with log.open("w") as out:
        server = subprocess.Popen(command, env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT)
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
    """Return the answer to a request, as text."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(answer.read().decode())


def streamed(answer: str) -> list[dict[str, Any]]:
    """Return the first choice of each part of a streamed answer."""
    parts = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return [part["choices"][0] for part in parts if part.get("choices")]


def said_to_a_client(url: str, model: str, **options: Any) -> list[list[str]]:
    """Return the words that OpenAI's client receives for a chat about w17 and w33, whole and streamed."""
    from openai import OpenAI

    chat = OpenAI(base_url=url, api_key="none", timeout=300).chat.completions
    message: Any = {"role": "user", "content": "w17 w33"}
    whole = chat.create(model=model, messages=[message], max_tokens=8, **options)
    parts = chat.create(model=model, messages=[message], max_tokens=8, stream=True, **options)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    return [(whole.choices[0].message.content or "").split(), streamed.split()]


def said_by_transformers(folder: Path, prompt: list[int], num_new: int) -> list[str]:
    """Return the words of greedy tokens."""
    model: Any = LaminaForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, eos_token_id=None)
    return [f"w{i}" for i in out[0, len(prompt) :].tolist()]
