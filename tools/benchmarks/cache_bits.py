"""Bytes per token of a cache, rank × bits: checkpoints with transformers' caches of few bits, and their perplexity.

    python -m tools.benchmarks.cache_bits TEXT MODEL… [--windows 16] [--group 64]

Needs optimum-quanto and hqq. Each window of 256 tokens goes through in pieces of 32, every piece reading the cache of
those before it; bytes are of all tensors that the cache holds at the end of a window, scales and zero points, too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

import lamina  # noqa: F401 - registers the class
from tools.benchmarks.jobs import print_table

WINDOW, PIECE = 256, 32
CACHES: dict[str, tuple[str, int] | None] = {
    "as it is": None,
    "HQQ 8": ("hqq", 8),
    "HQQ 4": ("hqq", 4),
    "quanto 4": ("quanto", 4),
    "quanto 2": ("quanto", 2),
}


def new_cache(model: Any, kind: tuple[str, int] | None, group: int) -> Any:
    """Empty; everything but the newest piece is quantised."""
    if kind is None:
        return DynamicCache(config=model.config)
    backend, bits = kind
    return QuantizedCache(backend, model.config, nbits=bits, q_group_size=group, residual_length=1)


def tensors_of(held: Any) -> Iterator[Tensor]:
    """All that something holds, codes packed as they are."""
    if isinstance(held, Tensor) and hasattr(held, "_data"):  # quanto's
        inner = held._data
        yield from (getattr(inner, "_data", inner), getattr(held, "_scale"), getattr(held, "_shift"))  # noqa: B009
    elif isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        yield from (tensor for value in held.values() for tensor in tensors_of(value))
    elif isinstance(held, tuple | list):
        yield from (tensor for value in held for tensor in tensors_of(value))


def bytes_of(cache: Any, tokens: int) -> float:
    """Per token."""
    names = ("_quantized_keys", "_quantized_values", "keys", "values")
    held = [getattr(layer, name, None) for layer in cache.layers for name in names]
    return sum(tensor.nbytes for tensor in tensors_of(held)) / tokens


@torch.no_grad()
def scored(model: Any, ids_MS: Tensor, kind: tuple[str, int] | None, group: int) -> tuple[float, float]:
    """(bytes per token, perplexity)."""
    loss, size = 0.0, 0.0
    for ids_S in ids_MS:
        cache = new_cache(model, kind, group)
        pieces = [model(piece[None], past_key_values=cache).logits[0].float() for piece in ids_S.split(PIECE)]
        loss += float(torch.nn.functional.cross_entropy(torch.cat(pieces)[:-1], ids_S[1:], reduction="sum"))
        size = bytes_of(cache, len(ids_S))
    return size, math.exp(loss / (ids_MS.numel() - len(ids_MS)))


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("text", type=Path)
    options.add_argument("models", nargs="+")
    options.add_argument("--windows", type=int, default=16)
    options.add_argument("--group", type=int, default=64)
    arguments = options.parse_args(argv)
    rows = []
    for path in arguments.models:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        ids = AutoTokenizer.from_pretrained(path)(arguments.text.read_text()).input_ids
        ids_MS = torch.tensor(ids[: arguments.windows * WINDOW]).view(-1, WINDOW)
        for name, kind in CACHES.items():
            size, perplexity = scored(model, ids_MS, kind, arguments.group)
            rows.append([path, name, f"{size:.0f}", f"{perplexity:.2f}"])
            print(*rows[-1], flush=True)
    print_table(["model", "cache", "bytes per token", "perplexity"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
