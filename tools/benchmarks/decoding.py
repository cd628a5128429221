"""Measure how fast weights in stored formats are decoded on a CPU, in bytes of the decoded weight.

    python -m tools.benchmarks.decoding [--size 4096] [--repeats 5]

Decodes a square weight of random codes on one thread, and copies a bfloat16 one of the same shape beside it. Counts the
CPU seconds of the thread, the least of some repeats.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lamina.stored_lamina import StoredFormat
from tools.benchmarks.jobs import print_table

FORMATS = {
    "fp8, blocks of 128 x 128": StoredFormat("fp8", "bfloat16", "float8_e4m3fn", "float32", block=(128, 128)),
    "fp8, rows (compressed-tensors)": StoredFormat("float", "bfloat16", "float8_e4m3fn", "bfloat16", block=(1, 0)),
    "int8, rows (compressed-tensors)": StoredFormat("int", "bfloat16", "int8", "bfloat16", block=(1, 0)),
    "int4, groups of 32 (compressed-tensors)": StoredFormat("packed", "bfloat16", "int32", "bfloat16", 4, (1, 32)),
    "GPTQ, 4 bits, groups of 128": StoredFormat(
        "gptq", "float16", "int32", "float16", 4, (1, 128), 2, "int32", 1, ordered=True
    ),
    "AWQ, groups of 128": StoredFormat("awq", "float16", "int32", "float16", 4, (1, 128), 2, "int32"),
    "mxfp4": StoredFormat("mxfp4", "bfloat16", "uint8", "uint8", 4, (1, 32)),
}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.decoding", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.zeros(options.size, options.size, dtype=torch.bfloat16)
    rows = [("bfloat16, copied", f"{rate(weight.clone, options.repeats) / 1e9:.2f}", "2.00")]
    for name, form in FORMATS.items():
        parts = random_parts(form, options.size)
        stored = sum(part.nbytes for part in parts.values()) / options.size**2
        rows.append((name, f"{rate(lambda: form.decode(parts), options.repeats) / 1e9:.2f}", f"{stored:.2f}"))  # noqa: B023
    print_table(("format", "GB decoded in a CPU second", "stored bytes a number"), rows)
    return 0


def rate(decode: Callable[[], Tensor], repeats: int) -> float:
    """Return decoded bytes per CPU second."""
    seconds = []
    for _ in range(repeats):
        started = time.thread_time()
        weight = decode()
        seconds.append(time.thread_time() - started)
    return weight.nbytes / min(seconds)


def random_parts(form: StoredFormat, size: int) -> dict[str, Tensor]:
    """Return the parts of a weight with random codes."""
    generator = torch.Generator().manual_seed(0)

    def part(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        if name == "weight_shape":
            return torch.tensor([size, size])
        if name == "g_idx":
            return torch.arange(size, dtype=torch.int32) // form.block[1]
        if name == "weight_scales":  # powers of two
            return torch.full(shape, 120, dtype=torch.uint8)
        kind = getattr(torch, dtype)
        if "scale" in name and kind.is_floating_point:
            return torch.rand(shape, generator=generator).to(kind)
        if kind.is_floating_point:
            return torch.randn(shape, generator=generator).to(kind)
        low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
        return torch.randint(low, high, shape, generator=generator, dtype=kind)

    return {name: part(name, *of) for name, of in form.parts(size, size).items()}


if __name__ == "__main__":
    sys.exit(main())
