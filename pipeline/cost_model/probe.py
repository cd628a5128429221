"""What a worker does in a second, measured: a layer's forward and backward pass, products of moments, float64 products,
factors and eigenproblems, elementwise work and copies.

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
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.processor_lamina import product_dtype
from manifests.schema import Manifest
from pipeline.cost_model.rates import GIGA, Rates
from pipeline.families.family import Geometry
from pipeline.kernels.half_precision import linear

PROBE_SECONDS = 0.15
LARGEST_HIDDEN = {"cpu": 2048, "cuda": 8192}  # of the layer that is measured; larger ones go at its rate
LONGEST = {"cpu": 512, "cuda": 4096}  # samples, in tokens
SAMPLES = {"cpu": 1, "cuda": 4}
DOUBLE_SIZE = {"cpu": 1024, "cuda": 4096}
MOMENT_TOKENS = {"cpu": 1024, "cuda": 4096}
STEP_SECONDS = {"cpu": 6e-4, "cuda": 1e-4}
COLUMN_SECONDS = {"cpu": 1e-5, "cuda": 2e-5}
COPIED_BYTES = {"cpu": 2**27, "cuda": 2**30}  # more than any cache holds
WIDENED_NUMBERS = {"cpu": 2**22, "cuda": 2**27}
DIGESTED_BYTES = 2**24
NETWORK, DISK, COMMIT_SECONDS = 1.25 * GIGA, 1.0 * GIGA, 15e-3  # assumed
HEAD_DIM = 64


@dataclass(frozen=True)
class ProbedShape:
    """The sizes of the layer that is measured. `features`: of all query heads; `read_features`: of keys or values."""

    hidden: int = 1024
    intermediate: int = 2816
    sequence: int = 256
    features: int = 1024
    read_features: int = 1024

    @classmethod
    def of(cls, geometry: Geometry, manifest: Manifest) -> ProbedShape:
        """Of a model, with the samples of a job."""
        widths = {layer.index: sum(block.width for block in layer.mlps) for layer in geometry.layers}
        widest = max(geometry.layers, key=lambda layer: widths[layer.index])
        calibration = manifest.calibration
        sequence = calibration.sequence_length if calibration else cls.sequence
        features, read = widest.attention.query.outputs, widest.attention.key.outputs
        return cls(geometry.hidden, widths[widest.index], sequence, features, read)

    def at_most(self, hidden: int, length: int) -> ProbedShape:
        """Narrowed as a whole, in heads of 64, and on shorter samples."""
        share = min(1.0, hidden / self.hidden)
        narrowed, read = (max(1, int(share * size) // HEAD_DIM) for size in (self.hidden, self.read_features))
        each = max(1, round(int(share * self.features) / HEAD_DIM / read))  # query heads of a key's
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
    """Of this process, a fraction of a second for each rate. Network and disk are assumed.

    Products are those of a layer of this shape, with all that stands between them. On a CPU there is no link to cross:
    copies go at memory's rate.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads if device.type == "cpu" else before)
    try:
        return _measured(device, dtype, workers_per_node, shape or ProbedShape())
    finally:
        torch.set_num_threads(before)


def mean_rates(found: Sequence[Rates]) -> Rates:
    """Of several workers that were measured at a time."""
    return Rates(**{
        field.name: type(getattr(found[0], field.name))(sum(getattr(rates, field.name) for rates in found) / len(found))
        for field in fields(Rates)
    })  # fmt: skip


def _measured(device: torch.device, dtype: torch.dtype, workers_per_node: int, shape: ProbedShape) -> Rates:
    kind, size = device.type, DOUBLE_SIZE[device.type]
    narrowed = shape.at_most(LARGEST_HIDDEN[kind], LONGEST[kind])
    layer = _Layer(device, dtype, narrowed)
    products, backward = layer.rate(layer.forward, 1), layer.rate(layer.backward, 3)
    layer = _Layer(device, torch.float, narrowed)
    single = layer.rate(layer.forward, 1)
    moments = _moment_rate(device, dtype, narrowed)
    square = torch.randn(size, size, dtype=torch.float64, device=device)
    seconds = _seconds(lambda: square @ square, device)
    double = 2 * size**3 / seconds
    positive = square @ square.T
    positive.diagonal().add_(size)
    wide, width = square, size * 3 // 4
    symmetric = square[:width, :width] + square[:width, :width].T
    seconds = _seconds(lambda: torch.linalg.eigh(symmetric)[0], device)
    eigen = 10 * width**3 / seconds
    seconds = _seconds(lambda: _solved(positive, wide), device)
    factors = (1 / 3 + 1) * size**3 / seconds
    numbers = torch.zeros(WIDENED_NUMBERS[kind], dtype=torch.float64, device=device)
    seconds = _seconds(lambda: numbers * 2.0, device)
    memory = 16 * numbers.numel() / seconds
    source, target = (torch.zeros(COPIED_BYTES[kind], dtype=torch.uint8, device=device) for _ in range(2))
    seconds = _seconds(lambda: target.copy_(source), device)
    link = 2 * source.numel() / seconds
    if kind == "cuda":
        pinned = torch.zeros(source.numel(), dtype=torch.uint8).pin_memory()
        seconds = _seconds(lambda: source.copy_(pinned, non_blocking=True), device)
        link = source.numel() / seconds
    hashed, threads = bytes(DIGESTED_BYTES), min(16, os.cpu_count() or 1)  # as `stores.threads` has them
    seconds = _seconds(lambda: hashlib.sha256(hashed).digest(), torch.device("cpu"))
    digest = threads * len(hashed) / seconds
    return Rates(
        products=products,
        backward=backward,
        moments=moments,
        single=single,
        double=double,
        factors=factors,
        eigen=eigen,
        memory=memory,
        link=link,
        network=NETWORK,
        disk=DISK,
        digest=digest,
        step_s=STEP_SECONDS[kind],
        column_s=COLUMN_SECONDS[kind],
        commit_s=COMMIT_SECONDS,
        workers_per_node=workers_per_node,
    )


def _solved(positive_nn: Tensor, right_nn: Tensor) -> Tensor:
    solved_nn: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(positive_nn), right_nn, upper=False)
    return solved_nn


def _moment_rate(device: torch.device, dtype: torch.dtype, shape: ProbedShape) -> float:
    """Operations a second of Xᵀ X in float32, of numbers of the checkpoint's dtype where a GPU's matrix units add them
    so."""
    tokens = MOMENT_TOKENS[device.type]
    exact = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    values_TF = torch.ones(1, tokens, shape.intermediate, dtype=dtype if exact else torch.float, device=device)

    def product() -> Tensor:
        return torch.bmm(values_TF.mT, values_TF, torch.float) if exact else torch.bmm(values_TF.mT, values_TF)

    seconds = _seconds(product, device)
    return 2 * tokens * shape.intermediate**2 / seconds


class _Layer:
    """A gated layer with norms, rotations and checks, on random numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: ProbedShape) -> None:
        self.device, self.dtype, self.shape, self.samples = device, dtype, shape, SAMPLES[device.type]
        hidden, inner, length = shape.hidden, shape.intermediate, shape.sequence
        self.query, self.out, self.gate, self.up, self.down = (
            self._weight(shape.features, hidden), self._weight(hidden, shape.features), self._weight(inner, hidden),
            self._weight(inner, hidden), self._weight(hidden, inner),
        )  # fmt: skip
        self.key, self.value = (self._weight(shape.read_features, hidden) for _ in range(2))
        self.inputs_BSD, self.weight_D = self._draw(self.samples, length, hidden), self._draw(hidden)
        self.angles_Sd = self._draw(length, HEAD_DIM)

    def rate(self, call: Callable[[], object], passes: int) -> float:
        """Operations a second, as the plan counts those of so many forward passes."""
        seconds = _seconds(call, self.device)
        shape = self.shape
        numbers = 2 * (shape.features + shape.read_features) * shape.hidden + 3 * shape.hidden * shape.intermediate
        tokens = self.samples * shape.sequence
        return passes * tokens * (2 * numbers + 2 * shape.sequence * shape.features) / seconds

    @torch.inference_mode()
    def forward(self) -> Tensor:
        """(B, S, D)."""
        return self._checked(self._through(self.inputs_BSD))

    def backward(self) -> Tensor:
        """(B, S, D): the gradient at the inputs, in float32, as the residual is then."""
        inputs_BSD = self.inputs_BSD.float().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            outputs_BSD = self._through(inputs_BSD)
        (found_BSD,) = torch.autograd.grad(outputs_BSD, inputs_BSD, torch.ones_like(outputs_BSD))
        return self._checked(found_BSD)

    def _draw(self, *sizes: int) -> Tensor:
        drawn = torch.randn(sizes[-1], device=self.device).div_(self.shape.hidden**0.5).to(self.dtype)
        return drawn.expand(sizes).contiguous()

    def _weight(self, outputs: int, inputs: int) -> Tensor:
        """As a worker holds it."""
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

    def _through(self, inputs_BSD: Tensor) -> Tensor:
        read_BSD = self._normed(inputs_BSD)
        query, key, value = (self._heads(read_BSD, weight) for weight in (self.query, self.key, self.value))
        query, key = self._turned(self._checked(query)), self._turned(self._checked(key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        after_BSD = inputs_BSD + linear(mixed.transpose(1, 2).flatten(2), self.out)
        read_BSD = self._normed(after_BSD)
        channels = functional.silu(linear(read_BSD, self.gate)) * linear(read_BSD, self.up)
        return after_BSD + linear(channels, self.down)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median, as what else a machine does now and then is no rate of the worker's."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()  # the first one loads libraries
    finish()
    taken: list[float] = []
    while sum(taken) < PROBE_SECONDS:
        started = time.perf_counter()
        call()
        finish()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
