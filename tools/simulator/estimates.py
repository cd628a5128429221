"""The course of each unit on a simulated worker: its seconds by the cost model, and an estimated result.

A result has the records and handles that the driver needs, without data. Seconds are those of `LayerWork`, which stands
for every layer. A layer's moments count as equally large, and so do the parts of a layer with many experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manifests.records import ArrayRecord, Curve, FormSpec, GradientRecord, RefinedFigures, StagedRecord
from pipeline.cost_model.prices import Prices
from pipeline.cost_model.rates import BACK
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.driver.job_spec import Job
from pipeline.methods.method import Moment, Task
from pipeline.methods.work import Work
from pipeline.units.curves import BeginCurve, CurvePieces, Predict
from pipeline.units.reads import ReadDone, ReadLayer
from pipeline.units.scores import Compare, CompareDone, Score, Scored, WindowForward
from pipeline.units.sums import (
    SUMMED,
    Add,
    AddDone,
    CheckGrids,
    CheckGridsDone,
    ChooseGrids,
    ChooseGridsDone,
    Collect,
    CollectDone,
    Total,
)
from pipeline.units.units import (
    Backward,
    Forward,
    Measure,
    Pair,
    Reduce,
    Refine,
    RefineDone,
    ShardDone,
    Solve,
    SolveDone,
    Summable,
    Unit,
    Write,
)
from tools.simulator.clock import Clock, Course, Transfer
from tools.simulator.pool import Worker

HANDLE = "tensor"
PIECES = 8  # writes of a layer's sums, some rows at a time: other requests to the disk come between
ARRAY: dict[str, Any] = {
    "version": 1, "path": f"array/{0:032x}", "shape": (1,), "dtype": "uint8", "chunks": (1,), "symmetric": False,
    "metadata_sha256": "0" * 64, "checksums": ("",),
}  # fmt: skip
RECORD = ArrayRecord(**ARRAY)
GRADIENTS = GradientRecord(**ARRAY, square_norms=(1.0,), sequences=1, tokens=1)
CURVE = Curve(ranks={"rank": (1,)}, numbers=(1,), cache=(0,), loss=(0.0,))
TRAINED = RefinedFigures(
    kept=True, before=1.0, after=0.5, train_before=1.0, train_after=0.5, steps=1, steps_done=1, learning_rate=0.1,
    held_out=1, samples=1,
)  # fmt: skip


class Estimates:
    """Returns the course of any unit of a job, by its class.

    Attributes:
        busy: the workers' seconds by kind of work.
        reads: the reads of layers that have begun, by what reads them, the layer, and the node; -1: by all nodes.
    """

    def __init__(self, clock: Clock, job: Job, prices: Prices) -> None:
        self.clock, self.job, self.prices = clock, job, prices
        self.work, self.rates, self.passes = prices.work, prices.rates, prices.passes
        self.busy: dict[str, float] = defaultdict(float)
        self.reads: dict[tuple[str, int, int], Transfer] = {}

    def __call__(self, unit: Unit, worker: Worker) -> Course[Any]:
        """Return the course of a unit on a worker. Raises AttributeError for units that no simulated job has."""
        course: Course[Any] = getattr(self, f"_{type(unit).__name__.lower()}")(unit, worker)
        return course

    def _compute(self, kind: str, seconds: float) -> Course[None]:
        yield seconds
        self.busy[kind] += seconds

    def _disk(self, worker: Worker, seconds: float, pieces: int = 1) -> Transfer:
        return self.clock.transfer(f"disk {worker.node}", seconds, pieces)

    # -- passes of shards --------------------------------------------------------------------------------------------

    def _forward(self, unit: Forward, worker: Worker) -> Course[ShardDone]:
        work, prices, shards = self.work, self.prices, self.job.shards
        if unit.staged is not None or (unit.lineage == "compressed" and not unit.moments):
            kind, seconds = "propagate", prices.forward_seconds(packed=unit.staged is not None)
        elif unit.moments:
            kind, seconds = "statistics", prices.statistics_seconds()
        else:
            cosines = unit.cosine * work.cosine_bytes / self.rates.memory / max(1, len(self.job.importance_shards))
            kind, seconds = "importance", prices.forward_seconds() + cosines * shards
        inputs = unit.keep_inputs * work.gradient_input_bytes / max(1, len(self.job.gradient_shards))
        stored = unit.store * work.hidden_bytes / shards + inputs
        parts = len(self.job.parts(unit.layer, (), unit.staged))
        done = yield from self._pass(unit, worker, kind, seconds / shards / parts, stored)
        samples = {moment: HANDLE for moment in unit.moments if moment.kind == "sample"}
        cosine, kept = (1.0, 1) if unit.cosine else None, RECORD if unit.keep_inputs else None
        return replace(done, partials=samples, cosine=cosine, inputs=kept)

    def _pair(self, unit: Pair, worker: Worker) -> Course[ShardDone]:
        """Pass the layer of both models.

        A correction passes each layer to each of its points, and to the next layer. A layer that is trained together
        with others is passed once, others to their targets and to the next layer.
        """
        if self.work.correction_flops and not unit.targets:
            steps = 1 + len(self._corrected_steps(unit.layer))
            kind, seconds = "correct", self.prices.correction_seconds() / steps
        else:
            kind, training = "refine", self.work.refinement
            seconds = training.passing_flops / self.rates.products / (1 if training.independent else 2)
        stored = unit.store * 2 * self.work.hidden_bytes / self.job.shards
        return (yield from self._pass(unit, worker, kind, seconds / self.job.shards, stored))

    def _backward(self, unit: Backward, worker: Worker) -> Course[ShardDone]:
        seconds = self.prices.gradient_seconds() / len(self.job.gradient_shards)
        stored = unit.store * self.work.gradient_input_bytes / len(self.job.gradient_shards)
        parts = len(self.job.parts(unit.layer, ())) * (BACK if unit.forth else 1)
        return (yield from self._pass(unit, worker, "gradient", seconds / parts, stored))

    def _pass(
        self, unit: Summable, worker: Worker, kind: str, seconds: float, stored_bytes: float
    ) -> Course[ShardDone]:
        yield self._layer_read(unit, unit.layer, worker)
        if unit.ahead is not None:
            self._layer_read(unit, unit.ahead, worker)
        yield from self._compute(kind, seconds + self._replay_seconds(unit, worker))
        if unit.sums is not None:
            worker.sums.setdefault(unit.sums.name, []).append(unit.shard)
        if stored_bytes:
            yield self.rates.commit_s
            yield self._disk(worker, stored_bytes / self.rates.disk)
        if isinstance(unit, Backward):
            worker.hidden[_shard(unit)] = unit.layer + (not unit.emit)
        else:
            worker.hidden[_shard(unit)] = unit.layer + (unit.emit and self._is_last_part(unit))
        return ShardDone({}, None, RECORD if unit.store else None, 1, worker=worker.name)

    def _is_last_part(self, unit: Forward | Pair | WindowForward) -> bool:
        return unit.part in (None, self.job.parts(unit.layer, (), unit.staged)[-1].number)

    def _replay_seconds(self, unit: Summable | WindowForward, worker: Worker) -> float:
        """Return the seconds in which a worker recomputes the values that the unit needs, from the nearest layer where
        it holds them, or they are committed."""
        at = [layer for layer in (worker.hidden.get(_shard(unit)), unit.base) if layer is not None]
        if isinstance(unit, Backward):
            lacking = 0 if unit.probe else min(layer for layer in at if layer > unit.layer) - unit.layer - 1
            return lacking * self.prices.gradient_seconds() / len(self.job.gradient_shards)
        lacking = unit.layer - max(layer for layer in at if layer <= unit.layer)
        if isinstance(unit, WindowForward):
            return lacking * self._window_seconds(unit)
        models = 2 if isinstance(unit, Pair) else 1
        return lacking * models * self.prices.forward_seconds() / self.job.shards

    def _layer_read(self, unit: Summable, layer: int, worker: Worker) -> Transfer:
        """Return the read of a layer by a worker's node, or its way over the network if each node has read a part."""
        shared = isinstance(unit, Forward) and bool(unit.weights)
        key = (unit.lineage, layer, -1 if shared else worker.node)
        if shared and key not in self.reads:
            self.reads[key] = self.clock.transfer("network", self.prices.pass_on_seconds())
        first = unit.lineage in ("dense", "compressed")
        cached = self.prices.source_cached if first else self.passes.cached
        return self._read(key, self.work.weight_bytes, cached)

    def _read(self, key: tuple[str, int, int], size: float, cached: bool) -> Transfer:
        """Return the read of a layer, from memory if it is cached. Start it if it has not begun."""
        if key not in self.reads:
            place, rate = ("memory", self.rates.link) if cached else ("disk", self.rates.disk)
            self.reads[key] = self.clock.transfer(f"{place} {key[-1]}", size / rate)
        return self.reads[key]

    def _readlayer(self, unit: ReadLayer, worker: Worker) -> Course[ReadDone]:
        yield self._disk(worker, self.prices.read_seconds())
        return ReadDone(HANDLE)

    # -- sums --------------------------------------------------------------------------------------------------------

    def _choosegrids(self, unit: ChooseGrids, worker: Worker) -> Course[ChooseGridsDone]:
        forward: Summable = unit.forward
        yield self._layer_read(forward, forward.layer, worker)
        kind, seconds = "statistics", self.prices.grid_seconds()
        if isinstance(forward, Backward):
            kind, seconds = "gradient", self.prices.gradient_grid_seconds()
        elif isinstance(forward, Pair):
            kind, seconds = "correct", 2 * seconds
        yield from self._compute(kind, seconds + self._replay_seconds(forward, worker))
        worker.hidden[_shard(forward)] = forward.layer + isinstance(forward, Backward)
        return ChooseGridsDone(dict.fromkeys(forward.moments, HANDLE))

    def _collect(self, unit: Collect, worker: Worker) -> Course[CollectDone]:
        size = self._bytes(unit.lineage, unit.layer, unit.moments)
        yield self.clock.transfer(f"link {worker.name}", self.prices.collect_seconds(size))
        sums, diagonals = dict.fromkeys(unit.moments, (HANDLE,) * unit.parts), dict.fromkeys(unit.moments, HANDLE)
        shards, tokens = tuple(worker.sums.pop(unit.sums)), dict.fromkeys(unit.moments, 1)
        return CollectDone(sums, diagonals, shards, f"node-{worker.node}", tokens)

    def _checkgrids(self, unit: CheckGrids, worker: Worker) -> Course[CheckGridsDone]:
        yield 0.0
        return CheckGridsDone({})

    def _add(self, unit: Add, worker: Worker) -> Course[AddDone]:
        """Add a part of a moment on a worker's device, which each sum enters and one leaves. Sums of other nodes come
        over the network first."""
        size = self._bytes(unit.lineage, unit.layer, (unit.moment,)) / self.passes.workers
        if self.prices.nodes > 1 and not unit.node:
            yield self.clock.transfer("network", self.prices.cross_seconds(size))
        yield self.prices.device_add_seconds(size, len(unit.partials))
        return AddDone(HANDLE)

    def _total(self, unit: Total, worker: Worker) -> Course[ArrayRecord]:
        seconds = self.prices.store_seconds(self._bytes(unit.lineage, unit.layer, (unit.moment,)))
        yield self._disk(worker, seconds, PIECES)
        return GRADIENTS if unit.moment.kind == "gradient" else RECORD

    def _reduce(self, unit: Reduce, worker: Worker) -> Course[ArrayRecord]:
        samples = sum(moment.kind == "sample" for moment in self.job.layer_moments(unit.layer))
        yield self._disk(worker, self.work.sample_bytes / samples / self.rates.disk)
        return RECORD

    def _bytes(self, lineage: str, layer: int, moments: Sequence[Moment]) -> float:
        """Return the size of the sums of some moments of a layer."""
        if lineage == "paired":
            steps = zip(self._corrected_steps(layer), self.work.pair_bytes, strict=False)
            pairs, size = next((pairs, size) for pairs, size in steps if moments[0] in pairs)
            return size * len(moments) / len(pairs)
        if lineage == "gradient":
            return self.work.gradient_bytes * len(moments) / len(self.job.layer_gradients(layer))
        summed = sum(moment.kind in SUMMED for moment in self.job.layer_moments(layer))
        return self.work.moment_bytes * len(moments) / summed

    def _corrected_steps(self, layer: int) -> list[set[Moment]]:
        """Return the pairs that each step of a layer's correction sums."""
        pairs = {moment for task in self.job.tasks if task.layer == layer for moment in task.corrections}
        steps = ({pair for pair in pairs if pair.point in points} for points in self.job.points[layer])
        return [step for step in steps if step]

    # -- groups ------------------------------------------------------------------------------------------------------

    def _measure(self, unit: Measure, worker: Worker) -> Course[dict[str, Any]]:
        yield 0.0
        return {}

    def _begincurve(self, unit: BeginCurve, worker: Worker) -> Course[Any]:
        yield from self._curve(worker, solve_seconds(self._shared(unit.task), self.rates))
        return HANDLE

    def _curvepieces(self, unit: CurvePieces, worker: Worker) -> Course[list[Any]]:
        curve = self._curve_work(unit.task)
        seconds = solve_seconds(curve, self.rates) - solve_seconds(self._shared(unit.task), self.rates)
        seconds *= len(unit.numbers) / unit.task.pieces
        yield from self._curve(worker, seconds + curve.repeated / self.rates.double)
        return [HANDLE] * len(unit.numbers)

    def _predict(self, unit: Predict, worker: Worker) -> Course[Curve]:
        if not unit.pieces:
            yield from self._curve(worker, solve_seconds(self._curve_work(unit.task), self.rates))
        return CURVE

    def _curve(self, worker: Worker, seconds: float) -> Course[None]:
        """Read the moments of a group, and compute its curve or a part of it."""
        size = self.work.moment_bytes / len(self.work.curves)
        if self.passes.cached:
            yield self.clock.transfer(f"link of {worker.name}", size / self.rates.link)
        else:
            yield self._disk(worker, size / self.rates.disk)
        yield from self._compute("curves", seconds)

    def _curve_work(self, task: Task) -> Work:
        return self._of_task(self.work.curves, task, self.job.predicts)

    def _shared(self, task: Task) -> Work:
        shared = self._curve_work(task).shared
        assert shared is not None, "a curve in pieces has a common part"
        return shared

    def _solve(self, unit: Solve, worker: Worker) -> Course[SolveDone]:
        solve = self._of_task(self.work.solves, unit.task, self.job.tasks)
        seconds = solve_seconds(solve, self.rates) / max(1, len(unit.task.corrections))
        if unit.task.moments:
            seconds += self.prices.moment_wait_seconds()
        pairs = [moment for moment in unit.statistics if moment.kind == "pair"]
        seconds += sum(self._bytes("paired", unit.task.layer, (pair,)) for pair in pairs) / self.rates.link
        yield from self._compute("solve", seconds)
        return SolveDone(HANDLE, {unit.task.name: FormSpec(form="dense", rank=1)}, {})

    def _of_task(self, works: Sequence[Work], task: Task, tasks: Sequence[Task]) -> Work:
        """Return the work of a task by its place among those of its layer."""
        names = [other.name for other in tasks if other.layer == task.layer]
        return works[names.index(task.name) % len(works)]

    def _refine(self, unit: Refine, worker: Worker) -> Course[RefineDone]:
        yield from self._compute("refine", self.prices.training_seconds())
        return RefineDone(tuple(SolveDone(HANDLE, group.forms, group.report) for group in unit.groups), TRAINED)

    def _write(self, unit: Write, worker: Worker) -> Course[StagedRecord]:
        yield self._disk(worker, self.prices.write_seconds())
        path = f"staged/layer-{unit.layer:05d}.{0:032x}.safetensors"
        return StagedRecord(path=path, size=1, sha256="0" * 64, tensors={})

    # -- scores ------------------------------------------------------------------------------------------------------

    def _windowforward(self, unit: WindowForward, worker: Worker) -> Course[ShardDone]:
        size = self.work.weight_bytes if unit.staged is None else self.work.written_bytes
        yield self._read((unit.model, unit.layer, worker.node), size, self.passes.cached)
        if unit.ahead is not None:
            self._read((unit.model, unit.ahead, worker.node), size, self.passes.cached)
        yield from self._compute("held-out", self._window_seconds(unit) + self._replay_seconds(unit, worker))
        if unit.store:
            yield self.rates.commit_s
        worker.hidden[_shard(unit)] = unit.layer + self._is_last_part(unit)
        return ShardDone({}, None, RECORD if unit.store else None, 1)

    def _window_seconds(self, unit: WindowForward) -> float:
        flops = self.work.held_out_flops[unit.staged is not None]
        parts = len(self.job.parts(unit.layer, (), unit.staged))
        return self.prices.held_out_seconds(flops) / unit.windows.shards / parts

    def _score(self, unit: Score, worker: Worker) -> Course[Scored]:
        yield 0.0
        return Scored(0.0, 1)

    def _compare(self, unit: Compare, worker: Worker) -> Course[CompareDone]:
        yield from self._compute("compare", len(unit.staged) * self.prices.compare_seconds())
        return CompareDone({"layer_errors": (), "sketch": ()}, HANDLE)


def _shard(unit: Summable | WindowForward) -> tuple[str, int]:
    """Return the name of a shard's values on the way through a model."""
    return (unit.model if isinstance(unit, WindowForward) else unit.lineage, unit.shard)
