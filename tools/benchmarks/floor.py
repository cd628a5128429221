"""A job against the least seconds that this machine could take for it, by one worker of one thread and by two.

    python -m tools.benchmarks.floor [--layers 24] [--samples 32] [--jobs dense compressed] [--workers 1 2]

The job is FLAT-LLM's, as in `predictions`: a random model of equal layers of 19.9 M parameters. Its floor is made of
what no program can leave out, each at the rate of torch's bare product of that shape and dtype, alone, on one thread,
measured now; those of half precision in float32 where that is faster (apart: in half precision whatever it takes):
linears and attention's two products once for each pass through a layer, moments' products, and solves' float64
operations; eigenproblems as torch solves them. What is symmetric or causal counts as half, an elimination and its
factors at the rate of float64 products, faster than any factor. In it is nothing elementwise (norms, rotations,
softmax, activations, rounding, adding), no check, no copy, no cosine, nothing of Python. All of it is shared evenly by
the workers; of each phase it is that, or the bytes that it writes at the disk's rate where these take longer. The floor
of the start is Ray's, with actors that import torch, and the source's digests. Prints, by phase, floor, measured
seconds and their ratio, as each job ends and in all at last. Needs an idle machine, and about 8 minutes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from deploy.quickstart.text import story_text
from manifests.loading import parse_manifest
from manifests.schema import Manifest
from pipeline.cost_model.work import COMPARED_TOKENS
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.units.sharding import held_out_windows, shard_range
from tools.benchmarks.jobs import end_on_sigterm, environment, print_table, run_manifest
from tools.benchmarks.memory_over_layers import write_model
from tools.benchmarks.predictions import ITEMSIZE, JOBS, STARTING, manifest_of

SECONDS = 0.3  # that each bare product is repeated for
PANEL = 64  # channels of an elimination that one product takes out
PRODUCT_ROWS = 4096  # tokens that a moment's product sums over at most
WRITTEN_BYTES, DIGESTED_BYTES = 2**28, 2**26
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
START = """
import sys, ray, torch
class Actor:
    def ready(self):
        import torch
workers = int(sys.argv[1])
ray.init("local", num_cpus=workers, include_dashboard=False, logging_level="ERROR")
actors = [ray.remote(Actor).remote() for _ in range(workers)]
ray.get([actor.ready.remote() for actor in actors])
"""


@dataclass(frozen=True)
class Bare:
    """So many products (rows, inner) @ (inner, columns), or eigenproblems of an order, in one call of torch's."""

    kind: Literal["product", "eigen"]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    batch: int = 1

    @property
    def flops(self) -> float:
        """Of the products."""
        rows, inner, columns = self.sizes
        return 2.0 * self.batch * rows * inner * columns

    def wide(self) -> Bare:
        """The same, of half precision in float32."""
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def seconds(self) -> float:
        """The median of repeats, on this process's threads."""
        call = self._call()
        call()
        taken: list[float] = []
        while sum(taken) < SECONDS:
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def _call(self) -> Callable[[], object]:
        if self.kind == "eigen":
            (order,) = self.sizes
            drawn = torch.randn(self.batch, order, order, dtype=self.dtype)
            symmetric = drawn + drawn.mT
            return lambda: torch.linalg.eigh(symmetric)
        rows, inner, columns = self.sizes
        left = torch.randn(self.batch, rows, inner).to(self.dtype)
        right = torch.randn(self.batch, columns, inner).to(self.dtype)  # as a linear's weights lie
        if self.batch == 1:
            return lambda: left[0] @ right[0].T
        return lambda: torch.bmm(left, right.mT)


@dataclass(frozen=True)
class Needed:
    """How often a phase of the job needs it; a part of it, where not all of its operations are."""

    phase: str
    bare: Bare
    times: float


def needed(manifest: Manifest, geometry: Geometry, dtype: torch.dtype) -> Iterator[Needed]:
    """All that the job cannot do without, as if every layer kept the same share of its values and channels."""
    calibration = manifest.calibration
    assert calibration is not None
    assert manifest.budget is not None
    samples, length, layers = calibration.samples, calibration.sequence_length, geometry.num_layers
    layer = geometry.layers[0]
    kept = kept_ranks(layer, manifest.budget.keep or 1.0)
    through = functools.partial(_forward, layer, dtype=dtype, length=length, samples=samples)
    if calibration.propagate == "compressed":
        tapped = solved = "walk"
        yield from _times(layers, through("importance"))
        yield from _times(layers, through(tapped, roles=LINEARS[:-1]))
        yield from _times(layers - 1, through("walk", kept=kept))
    else:
        tapped, solved = "statistics", "compress"
        yield from _times(layers, through(tapped))
    for shard in range(calibration.shards):
        start, stop = shard_range(shard, calibration.shards, samples)
        yield from _times(layers, _moments(layer, tapped, (stop - start) * length))
    yield from _times(layers, _solves(layer, solved, *kept))
    scored = functools.partial(_forward, layer, "score", dtype=torch.float)
    windows = held_out_windows(samples, samples, length)
    for count, of_length, sizes in (
        (windows, length, None), (windows, length, kept), (1, COMPARED_TOKENS, None), (2, COMPARED_TOKENS, kept)
    ):  # fmt: skip
        yield from _times(layers, scored(samples=count, length=of_length, kept=sizes))


def kept_ranks(layer: LayerGeometry, keep: float) -> tuple[int, int]:
    """Of a value head's numbers, and of the MLP's channels, where q and k stay whole and both keep the same share."""
    touched = layer.numbers(("v", "o", "gate", "up", "down"))
    share = 1.0 - (1.0 - keep) * layer.numbers() / touched
    return round(share * layer.attention.head_dim), round(share * layer.mlps[0].width)


def _times(count: float, found: Iterator[Needed]) -> Iterator[Needed]:
    for each in found:
        yield Needed(each.phase, each.bare, count * each.times)


def _forward(
    layer: LayerGeometry,
    phase: str,
    dtype: torch.dtype,
    length: int,
    samples: int,
    kept: tuple[int, int] | None = None,
    roles: tuple[str, ...] = LINEARS,
) -> Iterator[Needed]:
    """Of samples through a layer, one at a time: its linears of these roles, attention's products where o is one."""
    value, channels = kept or (layer.attention.head_dim, layer.mlps[0].width)
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
    """Of the MLP's channels, and of what each KV head's values become, over a shard."""
    rows = min(tokens, PRODUCT_ROWS)
    inner, width, single = layer.mlps[0].width, layer.attention.head_dim, torch.float
    yield Needed(phase, Bare("product", (inner, rows, inner), single), tokens / rows / 2)
    heads = layer.attention.heads // layer.attention.kv_heads
    rows = min(tokens * heads, PRODUCT_ROWS)
    bare = Bare("product", (width, rows, width), single, layer.attention.kv_heads)
    yield Needed(phase, bare, tokens * heads / rows / 2)


def _solves(layer: LayerGeometry, phase: str, value: int, channels: int) -> Iterator[Needed]:
    """Of one layer, in float64: bases of its values and both factors, elimination of channels with the refit."""
    double = functools.partial(Bare, dtype=torch.float64)
    hidden, inner, width = layer.hidden, layer.mlps[0].width, layer.attention.head_dim
    yield Needed(
        phase, double("eigen", (width,), batch=layer.attention.kv_heads), 2
    )  # a root of the outputs' gram, and the basis
    yield Needed(phase, double("product", (width, hidden, width), batch=layer.attention.heads), 1 / 2)
    yield Needed(phase, double("product", (value, width, hidden), batch=layer.attention.kv_heads), 1)
    yield Needed(phase, double("product", (hidden, width, value), batch=layer.attention.heads), 1)
    yield Needed(phase, double("product", (inner, hidden, inner)), 1 / 2)
    square = double("product", (inner, inner, inner))
    yield Needed(phase, square, inner**3 / square.flops)  # of the moment, a factor and the inverse
    removed, panel = inner - channels, double("product", (inner, PANEL, inner))
    downdated = (1 + 2) * (inner**3 - channels**3) / 3  # a triangle of the inverse by one vector, of the gram by two
    yield Needed(phase, panel, downdated / panel.flops)
    refit = double("product", (hidden, PANEL, inner))
    yield Needed(phase, refit, hidden * removed * (inner + channels) / refit.flops)


def written_bytes(manifest: Manifest, geometry: Geometry) -> dict[str, float]:
    """Phase -> bytes that it leaves on the disk."""
    assert manifest.calibration is not None
    assert manifest.budget is not None
    layer, layers = geometry.layers[0], geometry.num_layers
    written = layers * layer.numbers() * ITEMSIZE * (manifest.budget.keep or 1.0)
    if manifest.calibration.propagate == "compressed":
        return {"walk": written}
    inner, width = layer.mlps[0].width, layer.attention.head_dim
    triangles = inner * (inner + 1) / 2 + layer.attention.kv_heads * width * (width + 1) / 2
    return {"statistics": layers * 8 * triangles, "compress": written}


def floor_seconds(
    wanted: Mapping[Needed, float], written: Mapping[str, float], disk: float, workers: int
) -> dict[str, float]:
    """Phase -> seconds, of what is needed, with the seconds of each, and the bytes that are written."""
    phases: dict[str, float] = {}
    for each, seconds in wanted.items():
        phases[each.phase] = phases.get(each.phase, 0.0) + each.times * seconds / workers
    return {phase: max(seconds, written.get(phase, 0.0) / disk) for phase, seconds in phases.items()}


def disk_rate(folder: Path) -> float:
    """Bytes a second that a file takes until they are durable."""
    data, path = os.urandom(WRITTEN_BYTES), folder / "written"
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return WRITTEN_BYTES / seconds


def start_seconds(source_bytes: float, workers: int) -> float:
    """Of Ray with so many actors that import torch, and of the source's digests on all cores."""
    started = time.perf_counter()
    command = [sys.executable, "-c", START, str(workers)]
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    data = os.urandom(DIGESTED_BYTES)
    started = time.perf_counter()
    hashlib.sha256(data).digest()
    rate = len(data) / (time.perf_counter() - started)
    return seconds + source_bytes / rate / (os.cpu_count() or 1)


def measured(folder: Path, job: str, workers: int, samples: int) -> tuple[dict[str, float], float, str]:
    """Runs the job: seconds by phase of the floor, of its start with the command's, and those of its units in words."""
    folder.mkdir()
    started = time.perf_counter()
    seconds = run_manifest(manifest_of(folder, job, workers, samples), folder)["seconds"]
    wall = time.perf_counter() - started
    phases: dict[str, float] = {}
    for name, spent in seconds["phases"].items():
        if name not in STARTING:
            phase = "score" if name.startswith("score") or name == "verify" else name
            phases[phase] = phases.get(phase, 0.0) + spent
    units = ", ".join(f"{kind} {count} × {spent / count:.3f}" for kind, (count, spent, _) in seconds["units"].items())
    return phases, wall - sum(phases.values()), units


def compared(folder: Path, job: str, workers: int, samples: int) -> list[list[object]]:
    """A row for each phase, for all of them, and for all with the start."""
    manifest = parse_manifest(manifest_of(folder, job, workers, samples))
    geometry = geometry_of(standard_config(json.loads((folder.parent / "model/config.json").read_text())))
    torch.set_num_threads(1)
    all_needed = _together(needed(manifest, geometry, torch.bfloat16))
    shapes = {bare for each in all_needed for bare in (each.bare, each.bare.wide())}
    known = {bare: bare.seconds() for bare in sorted(shapes, key=str)}
    rate, written = disk_rate(folder.parent), written_bytes(manifest, geometry)
    stored = floor_seconds({each: known[each.bare] for each in all_needed}, written, rate, workers)
    fastest = {each: min(known[each.bare], known[each.bare.wide()]) for each in all_needed}
    floors = floor_seconds(fastest, written, rate, workers)
    source = sum(layer.numbers() for layer in geometry.layers) * ITEMSIZE
    start = start_seconds(source, workers)
    phases, begun, units = measured(folder, job, workers, samples)
    print(f"\n{job}, {workers} worker(s), seconds of units: {units}", file=sys.stderr)
    rates = [f"{bare.batch} x {bare.sizes} {str(bare.dtype)[6:]}: {bare.flops / seconds / 1e9:.0f}" for bare, seconds in
             known.items() if bare.kind == "product"]  # fmt: skip
    print("bare products, GFLOP/s:", "; ".join(rates), file=sys.stderr)
    rows = [_row(job, workers, name, floors.get(name, 0.0), spent) for name, spent in phases.items()]
    least, spent = sum(floors.values()), sum(phases.values())
    return [
        *rows,
        _row(job, workers, "all", least, spent),
        _row(job, workers, "all, in half precision", sum(stored.values()), spent),
        _row(job, workers, "all, with the start", least + start, spent + begun),
    ]


def _together(found: Iterator[Needed]) -> list[Needed]:
    """Of each phase, what is done by the same product as one."""
    times: dict[tuple[str, Bare], float] = {}
    for each in found:
        times[each.phase, each.bare] = times.get((each.phase, each.bare), 0.0) + each.times
    return [Needed(phase, bare, count) for (phase, bare), count in times.items()]


def _row(job: str, workers: int, phase: str, least: float, spent: float) -> list[object]:
    return [job, workers, phase, f"{least:.1f}", f"{spent:.1f}", f"{spent / least:.2f}" if least else ""]


def _print(rows: list[list[object]]) -> None:
    print_table(["job", "workers", "phase", "floor, s", "job, s", "job / floor"], rows)
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--jobs", nargs="+", choices=[job for job in JOBS if JOBS[job][1] == "flat_llm"])
    options.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    arguments = options.parse_args(argv)
    end_on_sigterm()
    totals: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as scratch:
        base = Path(scratch)
        write_model(base / "model", arguments.layers)
        (base / "text.txt").write_text(story_text(300_000, seed=1), encoding="utf-8")
        for job in arguments.jobs or ["dense"]:
            for workers in arguments.workers:
                rows: list[list[Any]] = compared(base / f"{job}-{workers}", job, workers, arguments.samples)
                _print(rows)
                totals += rows[-2:]
    print()
    _print(totals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
