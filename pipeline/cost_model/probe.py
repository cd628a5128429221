"""Measure the rates of a worker: a layer's forward and backward pass, products of moments, float64 products, factors,
eigenproblems, elementwise kernels and copies.

Legend: T tokens, B samples, S sequence, D hidden, N intermediate, H heads, d head_dim.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from lamina.processor_lamina import product_dtype
from manifests.schema import Manifest
from pipeline.cost_model.rates import BACK, DIGEST_THREADS, GIGA, Rates
from pipeline.families.geometry import Geometry
from pipeline.kernels.attention import deterministic_attention
from pipeline.kernels.half_precision import linear
from pipeline.kernels.moments import batched_product
from pipeline.methods.products import summing

PROBE_SECONDS = 0.15
LARGEST_HIDDEN = {"cpu": 2048, "cuda": 8192}  # the widest measured layer; wider ones have the same rate
LONGEST = {"cpu": 1024, "cuda": 4096}  # the most tokens of a sample
SAMPLES = {"cpu": 1, "cuda": 4}
DOUBLE_SIZE = {"cpu": 1024, "cuda": 4096}
MOMENT_TOKENS = {"cpu": 1024, "cuda": 4096}
STEP_SECONDS = {"cpu": 6e-4, "cuda": 1e-4}
COLUMN_SECONDS = {"cpu": 1e-5, "cuda": 2e-5}
COPIED_BYTES = {"cpu": 2**27, "cuda": 2**30}  # larger than any cache
WIDENED_NUMBERS = {"cpu": 2**22, "cuda": 2**27}
DIGESTED_BYTES = 2**24
NETWORK, DISK, COMMIT_SECONDS = 1.25 * GIGA, 1.0 * GIGA, 15e-3  # assumed
HEAD_DIM = 64


@dataclass(frozen=True)
class ProbedShape:
    """The sizes of the measured layer. `features`: width of all query heads; `read_features`: of keys or values."""

    hidden: int = 1024
    intermediate: int = 2816
    sequence: int = 256
    features: int = 1024
    read_features: int = 1024

    @classmethod
    def of(cls, geometry: Geometry, manifest: Manifest) -> ProbedShape:
        """Return the sizes of a model's widest layer and of a job's samples."""
        widths = {layer.index: sum(block.width for block in layer.mlps) for layer in geometry.layers}
        widest = max(geometry.layers, key=lambda layer: widths[layer.index])
        calibration = manifest.calibration
        sequence = calibration.sequence_length if calibration else cls.sequence
        features = max(layer.query_features for layer in geometry.layers)
        read = widest.attention.key.outputs if widest.attentions else features
        return cls(geometry.hidden, widths[widest.index], sequence, features, read)

    def at_most(self, hidden: int, length: int) -> ProbedShape:
        """Return proportionally narrower sizes, in heads of 64, and shorter samples."""
        share = min(1.0, hidden / self.hidden)
        narrowed, read = (max(1, int(share * size) // HEAD_DIM) for size in (self.hidden, self.read_features))
        each = max(1, round(int(share * self.features) / HEAD_DIM / read))  # query heads per key head
        return ProbedShape(
            narrowed * HEAD_DIM,
            max(1, int(share * self.intermediate)),
            min(self.sequence, length),
            each * read * HEAD_DIM,
            read * HEAD_DIM,
        )


def measured_rates(
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    workers_per_node: int = 1,
    shape: ProbedShape | None = None,
) -> Rates:
    """Measure the rates of this process, each in a fraction of a second. Rates of network and disk are assumed.

    Products are measured in a layer of this shape, with norms, rotations and checks between them. On a CPU, the link is
    measured by copies in memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads if device.type == "cpu" else before)
    try:
        return _measured(device, dtype, workers_per_node, shape or ProbedShape())
    finally:
        torch.set_num_threads(before)


def mean_rates(measured: Sequence[Rates]) -> Rates:
    """Return the means of the rates of workers that were measured at the same time."""
    columns = {field.name: [getattr(rates, field.name) for rates in measured] for field in fields(Rates)}
    return Rates(**{name: type(values[0])(sum(values) / len(values)) for name, values in columns.items()})


def _measured(device: torch.device, dtype: torch.dtype, workers_per_node: int, shape: ProbedShape) -> Rates:
    kind = device.type
    narrowed = shape.at_most(LARGEST_HIDDEN[kind], LONGEST[kind])
    layer, single = _Layer(device, dtype, narrowed), _Layer(device, torch.float, narrowed)
    double, factors, eigen = _double_rates(device)
    numbers = torch.zeros(WIDENED_NUMBERS[kind], dtype=torch.float64, device=device)
    hashed, threads = bytes(DIGESTED_BYTES), min(DIGEST_THREADS, os.cpu_count() or 1)
    return Rates(
        products=layer.rate(layer.forward, 1),
        backward=layer.rate(layer.backward, BACK),
        moments=_moment_rate(device, dtype, narrowed),
        single=single.rate(single.forward, 1),
        double=double,
        factors=factors,
        eigen=eigen,
        memory=16 * numbers.numel() / _seconds(lambda: numbers * 2.0, device),
        link=_link_rate(device),
        network=NETWORK,
        disk=DISK,
        digest=threads * len(hashed) / _seconds(lambda: hashlib.sha256(hashed).digest(), torch.device("cpu")),
        step_s=STEP_SECONDS[kind],
        column_s=COLUMN_SECONDS[kind],
        commit_s=COMMIT_SECONDS,
        workers_per_node=workers_per_node,
    )


def _double_rates(device: torch.device) -> tuple[float, float, float]:
    """Measure operations per second in float64 of products, of factors and of eigenproblems."""
    size = DOUBLE_SIZE[device.type]
    width = size * 3 // 4
    square_nn = torch.randn(size, size, dtype=torch.float64, device=device)
    positive_nn = square_nn @ square_nn.T
    positive_nn.diagonal().add_(size)
    symmetric_mm = square_nn[:width, :width] + square_nn[:width, :width].T

    def factorize() -> Tensor:
        factor_nn = torch.linalg.cholesky(positive_nn)
        solved_nn: Tensor = torch.linalg.solve_triangular(factor_nn, square_nn, upper=False)
        return solved_nn

    products = 2 * size**3 / _seconds(lambda: square_nn @ square_nn, device)
    factors = (1 / 3 + 1) * size**3 / _seconds(factorize, device)
    return products, factors, 10 * width**3 / _seconds(lambda: torch.linalg.eigh(symmetric_mm)[0], device)


def _link_rate(device: torch.device) -> float:
    """Measure bytes per second of copies from pinned memory to a GPU, or within a CPU's memory."""
    target = torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    source = torch.zeros(target.numel(), dtype=torch.uint8)
    if device.type == "cuda":
        source = source.pin_memory()
    seconds = _seconds(lambda: target.copy_(source, non_blocking=True), device)
    return (1 if device.type == "cuda" else 2) * target.numel() / seconds


def _moment_rate(device: torch.device, dtype: torch.dtype, shape: ProbedShape) -> float:
    """Measure operations per second of Xᵀ X in float32, as the device sums half-precision numbers fastest."""
    tokens = MOMENT_TOKENS[device.type]
    exact = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    values_TF = torch.ones(1, tokens, shape.intermediate, dtype=dtype if exact else torch.float, device=device)

    def product() -> Tensor:
        with summing(dtype, device):
            return batched_product(values_TF.mT, values_TF, torch.float)

    seconds = _seconds(product, device)
    return 2 * tokens * shape.intermediate**2 / seconds


class _Layer:
    """A gated layer with norms, rotations and checks, on random numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: ProbedShape) -> None:
        self.device, self.dtype, self.shape, self.samples = device, dtype, shape, SAMPLES[device.type]
        hidden, inner, length = shape.hidden, shape.intermediate, shape.sequence
        self.query, self.out, self.activated, self.multiplied, self.writer = (
            self._weight(shape.features, hidden), self._weight(hidden, shape.features), self._weight(inner, hidden),
            self._weight(inner, hidden), self._weight(hidden, inner),
        )  # fmt: skip
        self.key, self.value = (self._weight(shape.read_features, hidden) for _ in range(2))
        self.inputs_BSD, self.weight_D = self._draw(self.samples, length, hidden), self._draw(hidden)
        self.angles_Sd = self._draw(length, HEAD_DIM)

    def rate(self, call: Callable[[], object], passes: int) -> float:
        """Measure operations per second of a call, which counts as `passes` forward passes in the plan's arithmetic."""
        seconds = _seconds(call, self.device)
        shape = self.shape
        numbers = 2 * (shape.features + shape.read_features) * shape.hidden + 3 * shape.hidden * shape.intermediate
        tokens = self.samples * shape.sequence
        return passes * tokens * (2 * numbers + 2 * shape.sequence * shape.features) / seconds

    @torch.inference_mode()
    def forward(self) -> Tensor:
        """Return the outputs (B, S, D)."""
        return self._checked(self._outputs(self.inputs_BSD))

    def backward(self) -> Tensor:
        """Return the gradient at the inputs (B, S, D), in float32 as the residual stream of a backward pass."""
        inputs_BSD = self.inputs_BSD.float().requires_grad_()
        with deterministic_attention(self.device):
            outputs_BSD = self._outputs(inputs_BSD)
        (gradient_BSD,) = torch.autograd.grad(outputs_BSD, inputs_BSD, torch.ones_like(outputs_BSD))
        return self._checked(gradient_BSD)

    def _draw(self, *sizes: int) -> Tensor:
        drawn = torch.randn(sizes[-1], device=self.device).div_(self.shape.hidden**0.5).to(self.dtype)
        return drawn.expand(sizes).contiguous()

    def _weight(self, outputs: int, inputs: int) -> Tensor:
        """Return a weight in the dtype in which a worker multiplies."""
        return self._draw(outputs, inputs).to(product_dtype(self.dtype, self.device))

    def _checked(self, values: Tensor) -> Tensor:
        torch.isfinite(torch.stack(torch.aminmax(values.detach()))).all()
        return values

    def _normed(self, values_BSD: Tensor) -> Tensor:
        wide_BSD = values_BSD.float()
        return (wide_BSD * torch.rsqrt(wide_BSD.square().mean(-1, keepdim=True) + 1.0)).to(self.dtype) * self.weight_D

    def _turned(self, values_BHSd: Tensor) -> Tensor:
        first, second = values_BHSd.chunk(2, -1)
        return values_BHSd * self.angles_Sd + torch.cat((-second, first), dim=-1) * self.angles_Sd

    def _heads(self, read_BSD: Tensor, weight: Tensor) -> Tensor:
        heads_BHSd: Tensor = linear(read_BSD, weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        return heads_BHSd

    def _outputs(self, inputs_BSD: Tensor) -> Tensor:
        read_BSD = self._normed(inputs_BSD)
        query, key, value = (self._heads(read_BSD, weight) for weight in (self.query, self.key, self.value))
        query, key = self._turned(self._checked(query)), self._turned(self._checked(key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        after_BSD = inputs_BSD + linear(mixed.transpose(1, 2).flatten(2), self.out)
        read_BSD = self._normed(after_BSD)
        channels = functional.silu(linear(read_BSD, self.activated)) * linear(read_BSD, self.multiplied)
        return after_BSD + linear(channels, self.writer)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, which other processes disturb least."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()  # the first call loads libraries
    finish()
    seconds: list[float] = []
    while sum(seconds) < PROBE_SECONDS:
        started = time.perf_counter()
        call()
        finish()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
