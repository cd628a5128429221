"""What a worker does in a second, measured: a layer's forward pass, float64 products and eigenproblems, copies.

Legend: T tokens, B samples, S sequence, D hidden, N intermediate, H heads, d head_dim.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from manifests.schema import Manifest
from pipeline.families.family import Geometry
from pipeline.plan.rates import GIGA, Rates

PROBE_SECONDS = 0.2
LARGEST_HIDDEN = {"cpu": 1024, "cuda": 8192}  # of the layer that is measured; larger ones go at its rate
LONGEST = {"cpu": 512, "cuda": 4096}  # samples, in tokens
SAMPLES = {"cpu": 1, "cuda": 4}
DOUBLE_SIZE = {"cpu": 1024, "cuda": 4096}
STEP_SECONDS = {"cpu": 5e-5, "cuda": 1e-4}
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}  # more than any cache holds
DIGESTED_BYTES = 2**24
NETWORK, DISK = 1.25 * GIGA, 1.0 * GIGA  # assumed
HEAD_DIM = 64


@dataclass(frozen=True)
class LayerShape:
    """Of the layers that a job goes through."""

    hidden: int = 1024
    intermediate: int = 2816
    sequence: int = 256

    @classmethod
    def of(cls, geometry: Geometry, manifest: Manifest) -> LayerShape:
        """Of a model, with the samples of a job."""
        widest = max(layer.intermediate for layer in geometry.layers)
        calibration = manifest.calibration
        return cls(geometry.hidden, widest, calibration.sequence_length if calibration else cls.sequence)

    def at_most(self, hidden: int, length: int) -> LayerShape:
        """Narrowed as a whole, and on shorter samples."""
        share = min(1.0, hidden / self.hidden)
        narrowed = max(HEAD_DIM, int(share * self.hidden) // HEAD_DIM * HEAD_DIM)
        return LayerShape(narrowed, max(1, int(share * self.intermediate)), min(self.sequence, length))


def measured_rates(
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    workers_per_node: int = 1,
    shape: LayerShape | None = None,
) -> Rates:
    """Of this process, a fraction of a second for each rate. Network and disk are assumed.

    Products are those of a layer of this shape, with all that stands between them. On a CPU there is no link to cross:
    copies go at memory's rate.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads if device.type == "cpu" else before)
    try:
        return _measured(device, dtype, workers_per_node, shape or LayerShape())
    finally:
        torch.set_num_threads(before)


def mean_rates(found: Sequence[Rates]) -> Rates:
    """Of several workers that were measured at a time."""
    return Rates(**{
        field.name: type(getattr(found[0], field.name))(sum(getattr(rates, field.name) for rates in found) / len(found))
        for field in fields(Rates)
    })  # fmt: skip


def _measured(device: torch.device, dtype: torch.dtype, workers_per_node: int, shape: LayerShape) -> Rates:
    kind, size = device.type, DOUBLE_SIZE[device.type]
    narrowed = shape.at_most(LARGEST_HIDDEN[kind], LONGEST[kind])
    products, single = (_layer_rate(device, each, narrowed) for each in (dtype, torch.float))
    square = torch.randn(size, size, dtype=torch.float64, device=device)
    count, seconds = _repeated(lambda: square @ square, device)
    double = count * 2 * size**3 / seconds
    square = square[: size // 2, : size // 2]
    symmetric = square + square.T
    count, seconds = _repeated(lambda: torch.linalg.eigh(symmetric)[0], device)
    eigen = count * 10 * (size // 2) ** 3 / seconds
    source, target = (torch.zeros(COPIED_BYTES[kind], dtype=torch.uint8, device=device) for _ in range(2))
    copies, seconds = _repeated(lambda: target.copy_(source), device)
    memory = link = 2 * source.numel() * copies / seconds
    if kind == "cuda":
        pinned = torch.zeros(source.numel(), dtype=torch.uint8).pin_memory()
        copies, seconds = _repeated(lambda: source.copy_(pinned, non_blocking=True), device)
        link = source.numel() * copies / seconds
    hashed, threads = bytes(DIGESTED_BYTES), min(16, os.cpu_count() or 1)  # as `stores.digests` has them
    taken, seconds = _repeated(lambda: hashlib.sha256(hashed).digest(), torch.device("cpu"))
    digest = threads * len(hashed) * taken / seconds
    return Rates(
        products, single, double, eigen, memory, link, NETWORK, DISK, digest, STEP_SECONDS[kind], workers_per_node
    )


@torch.inference_mode()
def _layer_rate(device: torch.device, dtype: torch.dtype, shape: LayerShape) -> float:
    """Operations a second of a gated layer with norms, rotations and checks, counted as the plan counts them."""
    hidden, inner, length = shape.hidden, shape.intermediate, shape.sequence
    samples = SAMPLES[device.type]

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).div_(hidden**0.5).to(dtype)

    qkv, out, gate, up, down = (
        draw(3 * hidden, hidden), draw(hidden, hidden), draw(inner, hidden), draw(inner, hidden), draw(hidden, inner)
    )  # fmt: skip
    inputs_BSD, weight_D, angles_Sd = draw(samples, length, hidden), draw(hidden), draw(length, HEAD_DIM)

    def normed(values_BSD: Tensor) -> Tensor:
        wide_BSD = values_BSD.float()
        return (wide_BSD * torch.rsqrt(wide_BSD.square().mean(-1, keepdim=True) + 1.0)).to(dtype) * weight_D

    def turned(values_BHSd: Tensor) -> Tensor:
        first, second = values_BHSd.chunk(2, -1)
        return values_BHSd * angles_Sd + torch.cat((-second, first), dim=-1) * angles_Sd

    def checked(values: Tensor) -> Tensor:
        torch.isfinite(torch.stack(torch.aminmax(values))).all()
        return values

    def forward() -> Tensor:
        parts = functional.linear(normed(inputs_BSD), qkv).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in map(checked, parts))
        mixed = functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        after_BSD = inputs_BSD + functional.linear(mixed.transpose(1, 2).flatten(2), out)
        read_BSD = normed(after_BSD)
        channels = functional.silu(functional.linear(read_BSD, gate)) * functional.linear(read_BSD, up)
        return checked(after_BSD + functional.linear(channels, down))

    count, seconds = _repeated(forward, device)
    numbers = 4 * hidden**2 + 3 * hidden * inner
    return count * samples * length * (2 * numbers + 2 * length * hidden) / seconds


def _repeated(call: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """How often it ran, in how many seconds."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()  # the first one loads libraries
    finish()
    started, count = time.perf_counter(), 0
    while True:
        call()
        count += 1
        finish()
        if (seconds := time.perf_counter() - started) >= PROBE_SECONDS:
            return count, seconds
