"""The least seconds that this machine could take for a job of FLAT-LLM, by phase. `predictions` prints them.

The floor counts only work that no program can leave out. Its parts:

- Linears and both products of attention, once for each pass through a layer.
- The products of moments, and the float64 products of solves. Symmetric and causal products count as half.
- Eigenproblems, as torch solves them. Eliminations and triangular solves count at the rate of float64 products.

Each runs alone, on one thread, at the rate of torch's bare product of that shape and dtype, measured now. Products of
half precision are counted in float32 where that is faster. The workers share the work evenly. A phase takes that time,
or the time that the disk needs for the bytes written, whichever is longer. The floor leaves out elementwise work
(norms, rotations, softmax, activations, rounding, additions), checks, copies, cosines and Python.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from manifests.schema import Manifest
from pipeline.cost_model.work import COMPARED_TOKENS
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.units.sharding import held_out_windows, shard_range

SECONDS = 0.3  # each bare product is repeated for this long
PANEL = 64  # channels that one product of an elimination removes
PRODUCT_ROWS = 4096  # most tokens that one product of a moment sums over
WRITTEN_BYTES = 2**28
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Bare:
    """A batch of products (rows, inner) @ (inner, columns), or of eigenproblems of an order, in one call of torch."""

    kind: Literal["product", "eigen"]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    batch: int = 1

    @property
    def flops(self) -> float:
        """Operations of the products."""
        rows, inner, columns = self.sizes
        return 2.0 * self.batch * rows * inner * columns

    def wide(self) -> Bare:
        """Return the same work, with half precision computed in float32."""
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def seconds(self) -> float:
        """Time the call, repeatedly, on the threads of this process; return the median."""
        call = self._call()
        call()
        durations: list[float] = []
        while sum(durations) < SECONDS:
            started = time.perf_counter()
            call()
            durations.append(time.perf_counter() - started)
        return statistics.median(durations)

    def _call(self) -> Callable[[], object]:
        if self.kind == "eigen":
            (order,) = self.sizes
            drawn = torch.randn(self.batch, order, order, dtype=self.dtype)
            symmetric = drawn + drawn.mT
            return lambda: torch.linalg.eigh(symmetric)
        rows, inner, columns = self.sizes
        inputs = torch.randn(self.batch, rows, inner).to(self.dtype)
        weights = torch.randn(self.batch, columns, inner).to(self.dtype)
        if self.batch == 1:
            return lambda: inputs[0] @ weights[0].T
        return lambda: torch.bmm(inputs, weights.mT)


@dataclass(frozen=True)
class Needed:
    """Work that a phase repeats `times` times; a fraction where only part of its operations is necessary."""

    phase: str
    bare: Bare
    times: float


def floor_of(manifest: Manifest, geometry: Geometry, workers: int, folder: Path) -> dict[str, float]:
    """Measure the rates of products, eigenproblems and the disk of `folder`; return the least seconds by phase."""
    torch.set_num_threads(1)
    work = _together(needed(manifest, geometry, torch.bfloat16))
    shapes = {bare for each in work for bare in (each.bare, each.bare.wide())}
    seconds = {bare: bare.seconds() for bare in sorted(shapes, key=str)}
    fastest = {each: min(seconds[each.bare], seconds[each.bare.wide()]) for each in work}
    return floor_seconds(fastest, written_bytes(manifest, geometry), disk_rate(folder), workers)


def needed(manifest: Manifest, geometry: Geometry, dtype: torch.dtype) -> Iterator[Needed]:
    """Yield the necessary work of a job, as if every layer kept the same share of its values and channels."""
    calibration = manifest.calibration
    assert calibration is not None
    assert manifest.budget is not None
    samples, length, layers = calibration.samples, calibration.sequence_length, geometry.num_layers
    layer = geometry.layers[0]
    ranks = kept_ranks(layer, manifest.budget.keep or 1.0)
    through = functools.partial(_forward, layer, dtype=dtype, length=length, samples=samples)
    if calibration.propagate == "compressed":
        tapped = solved = "walk"
        yield from _times(layers, through("importance"))
        yield from _times(layers, through(tapped, roles=LINEARS[:-1]))
        yield from _times(layers - 1, through("walk", ranks=ranks))
    else:
        tapped, solved = "statistics", "compress"
        yield from _times(layers, through(tapped))
    for shard in range(calibration.shards):
        start, stop = shard_range(shard, calibration.shards, samples)
        yield from _times(layers, _moments(layer, tapped, (stop - start) * length))
    yield from _times(layers, _solves(layer, solved, *ranks))
    scored = functools.partial(_forward, layer, "score", dtype=torch.float)
    windows = held_out_windows(samples, samples, length)
    for count, of_length, sizes in (
        (windows, length, None), (windows, length, ranks), (1, COMPARED_TOKENS, None), (2, COMPARED_TOKENS, ranks)
    ):  # fmt: skip
        yield from _times(layers, scored(samples=count, length=of_length, ranks=sizes))


def kept_ranks(layer: LayerGeometry, keep: float) -> tuple[int, int]:
    """Return the ranks of a value head and of the MLP if q and k stay whole and both keep the same share."""
    touched = layer.numbers(("v", "o", "gate", "up", "down"))
    share = 1.0 - (1.0 - keep) * layer.numbers() / touched
    return round(share * layer.attention.head_dim), round(share * layer.mlps[0].width)


def _times(count: float, work: Iterator[Needed]) -> Iterator[Needed]:
    for each in work:
        yield Needed(each.phase, each.bare, count * each.times)


def _forward(
    layer: LayerGeometry,
    phase: str,
    dtype: torch.dtype,
    length: int,
    samples: int,
    ranks: tuple[int, int] | None = None,
    roles: tuple[str, ...] = LINEARS,
) -> Iterator[Needed]:
    """Yield the work of samples in one layer, one at a time: linears of `roles`, and attention if `o` is among them."""
    value, channels = ranks or (layer.attention.head_dim, layer.mlps[0].width)
    widths = {"v": layer.attention.kv_heads * value, "gate": channels, "up": channels}
    reads = {"o": layer.attention.heads * value, "down": channels}
    for role in roles:
        outputs, inputs = layer.weight_shape(role)
        sizes = (length, reads.get(role, inputs), widths.get(role, outputs))
        yield Needed(phase, Bare("product", sizes, dtype), samples)
    if "o" in roles:
        for sizes in ((length, layer.attention.head_dim, length), (length, length, value)):
            yield Needed(phase, Bare("product", sizes, dtype, layer.attention.heads), samples / 2)


def _moments(layer: LayerGeometry, phase: str, tokens: int) -> Iterator[Needed]:
    """Yield the work of a shard's moments: of the MLP's channels, and of each KV head's mixed values."""
    rows = min(tokens, PRODUCT_ROWS)
    inner, width, single = layer.mlps[0].width, layer.attention.head_dim, torch.float
    yield Needed(phase, Bare("product", (inner, rows, inner), single), tokens / rows / 2)
    heads = layer.attention.heads // layer.attention.kv_heads
    rows = min(tokens * heads, PRODUCT_ROWS)
    bare = Bare("product", (width, rows, width), single, layer.attention.kv_heads)
    yield Needed(phase, bare, tokens * heads / rows / 2)


def _solves(layer: LayerGeometry, phase: str, value: int, channels: int) -> Iterator[Needed]:
    """Yield the float64 work of solving a layer: value bases, both factors, elimination of channels and its refit."""
    double = functools.partial(Bare, dtype=torch.float64)
    hidden, inner, width = layer.hidden, layer.mlps[0].width, layer.attention.head_dim
    eigen = double("eigen", (width,), batch=layer.attention.kv_heads)
    yield Needed(phase, eigen, 2)  # a root of the outputs' gram, and the basis
    yield Needed(phase, double("product", (width, hidden, width), batch=layer.attention.heads), 1 / 2)
    yield Needed(phase, double("product", (value, width, hidden), batch=layer.attention.kv_heads), 1)
    yield Needed(phase, double("product", (hidden, width, value), batch=layer.attention.heads), 1)
    yield Needed(phase, double("product", (inner, hidden, inner)), 1 / 2)
    square = double("product", (inner, inner, inner))
    yield Needed(phase, square, inner**3 / square.flops)  # the moment's factor and its inverse
    removed, panel = inner - channels, double("product", (inner, PANEL, inner))
    downdated = (1 + 2) * (inner**3 - channels**3) / 3  # triangles: the inverse by one vector, the gram by two
    yield Needed(phase, panel, downdated / panel.flops)
    refit = double("product", (hidden, PANEL, inner))
    yield Needed(phase, refit, hidden * removed * (inner + channels) / refit.flops)


def written_bytes(manifest: Manifest, geometry: Geometry) -> dict[str, float]:
    """Return the bytes that each phase leaves on the disk."""
    assert manifest.calibration is not None
    assert manifest.budget is not None
    layer, layers = geometry.layers[0], geometry.num_layers
    written = layers * layer.numbers() * layer.bits // 8 * (manifest.budget.keep or 1.0)
    if manifest.calibration.propagate == "compressed":
        return {"walk": written}
    inner, width = layer.mlps[0].width, layer.attention.head_dim
    triangles = inner * (inner + 1) / 2 + layer.attention.kv_heads * width * (width + 1) / 2
    return {"statistics": layers * 8 * triangles, "compress": written}


def floor_seconds(
    work: Mapping[Needed, float], written: Mapping[str, float], disk: float, workers: int
) -> dict[str, float]:
    """Return seconds by phase, from seconds of one call of each work, bytes written by phase, and bytes a second."""
    phases: dict[str, float] = {}
    for each, seconds in work.items():
        phases[each.phase] = phases.get(each.phase, 0.0) + each.times * seconds / workers
    return {phase: max(seconds, written.get(phase, 0.0) / disk) for phase, seconds in phases.items()}


def disk_rate(folder: Path) -> float:
    """Measure how many bytes a second become durable in a folder."""
    data, path = os.urandom(WRITTEN_BYTES), folder / "written"
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return WRITTEN_BYTES / seconds


def _together(work: Iterator[Needed]) -> list[Needed]:
    """Add up equal work of a phase."""
    times: dict[tuple[str, Bare], float] = {}
    for each in work:
        times[each.phase, each.bare] = times.get((each.phase, each.bare), 0.0) + each.times
    return [Needed(phase, bare, count) for (phase, bare), count in times.items()]
