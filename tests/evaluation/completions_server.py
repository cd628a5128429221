"""Serves a model on loopback as a server of OpenAI's completions does that answers with log-probabilities of prompts.

Shapes: T tokens of a prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.ports import serving

NAME = "served"  # of the model, in the list of models


@contextmanager
def completions_server(model: Path) -> Iterator[str]:
    """Run a server of this checkpoint while the block runs; yield its URL, which ends in /v1."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": NAME, "max_model_len": whole.config.max_position_embeddings}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert max(map(len, asked["prompt"])) < whole.config.max_position_embeddings
            assert (self.path, asked["model"], asked["echo"]) == ("/v1/completions", NAME, True)
            choices = [{"index": index, "logprobs": _logprobs(whole, ids)} for index, ids in enumerate(asked["prompt"])]
            self._answer({"choices": choices})

        def _answer(self, document: dict[str, Any]) -> None:
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield f"http://{address}/v1"


@torch.inference_mode()
def _logprobs(whole: Any, ids: Sequence[int]) -> dict[str, Any]:
    """Return the log-probabilities of a prompt's tokens and of the greedy token behind it."""
    logs_TV = torch.log_softmax(whole(torch.tensor([ids])).logits[0], dim=-1)
    best_T = logs_TV.argmax(dim=-1)
    next_T = torch.tensor([*ids[1:], best_T[-1]])
    logs, best_logs = (logs_TV.gather(1, tokens_T[:, None])[:, 0].tolist() for tokens_T in (next_T, best_T))
    tops = [{str(token): log} for token, log in zip(best_T.tolist(), best_logs, strict=True)]
    return {"token_logprobs": [None, *logs], "top_logprobs": [None, *tops]}
