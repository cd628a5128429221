"""llama.cpp's server, as the package xllamacpp brings it, built. `tools/engines.sh llama-cpp` installs it."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not there: make test-llama-cpp installs it"
)


class LlamaCpp:
    """llama.cpp's server of a GGUF file, on one thread, over HTTP. It ends with this object."""

    def __init__(self, path: Path, length: int = 128) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.warmup, settings.verbosity = length, False, 0
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        self.server = xllamacpp.Server(settings)

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """Return the server's answer to a request."""
        request = urllib.request.Request(
            f"{self.server.listening_address}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def log_probabilities(self, ids: list[int], vocabulary: int) -> Tensor:
        """Return those of all tokens behind each token (T, V)."""
        rows = torch.empty(len(ids), vocabulary)
        for place in range(len(ids)):
            # The answer is a letter, as the server gives no probabilities for an end, nor for a part of a letter.
            asked = {"n_predict": 1, "n_probs": vocabulary, "logit_bias": [[self.tokens("a")[-1], 1000]]}
            (one,) = self.post("/completion", prompt=ids[: place + 1], **asked)["completion_probabilities"]
            for token in one["top_logprobs"]:
                rows[place, token["id"]] = token["logprob"]
        return rows

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text, with special tokens in it and those before it."""
        return [*self.post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]]

    def answer(self, text: str, new: int) -> str:
        """Return the most likely continuation of a text."""
        return str(self.post("/completion", prompt=text, n_predict=new, temperature=0)["content"])

    def chat(self, message: str, new: int) -> tuple[str, int]:
        """Return the most likely answer to a message by the file's chat template, and the number of prompt tokens."""
        messages = [{"role": "user", "content": message}]
        said = self.post("/v1/chat/completions", messages=messages, max_tokens=new, temperature=0)
        return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]
