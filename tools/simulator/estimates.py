"""The course of each unit on a simulated worker: its seconds by the cost model, and an estimated result.

A result has the records and handles that the driver needs, without data. Seconds are those of `LayerWork`, which stands
for every layer. A layer's moments count as equally large, and so do the parts of a layer with many experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from manifests.records import ArrayRecord, Curve, FormSpec, GradientRecord, RefinedFigures, StagedRecord
from pipeline.cost_model.phases import (
    PlannedPasses,
    compare_seconds,
    correction_seconds,
    forward_seconds,
    gradient_grid_seconds,
    gradient_seconds,
    grid_seconds,
    held_out_seconds,
    moment_wait_seconds,
    pass_on_seconds,
    read_seconds,
    statistics_seconds,
    store_seconds,
)
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.cost_model.work import LayerWork
from pipeline.driver.job_spec import Job
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import layer_gradients, layer_moments
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
    Summed,
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
from workers.placement import shard_of

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


@dataclass
class Estimates:
    """Returns the courses of a job's units.

    Attributes:
        busy: the workers' seconds by kind of work.
        reads: the reads of layers that have begun, by what reads them, the layer, and the node.
    """

    clock: Clock
    job: Job
    work: LayerWork
    rates: Rates
    passes: PlannedPasses
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reads: dict[tuple[str, int, int], Transfer] = field(default_factory=dict)

    def __call__(self, unit: Unit, worker: Worker) -> Course[Any]:
        """Return the course of a unit on a worker. Raises TypeError for units that no simulated job has."""
        match unit:
            case Forward() | Pair() | Backward():
                return self._pass(unit, worker)
            case ChooseGrids():
                return self._choose_grids(unit, worker)
            case Collect():
                return self._collect(unit, worker)
            case CheckGrids():
                return self._after(0.0, "", CheckGridsDone({}))
            case Add():
                return self._add(unit)
            case Total():
                return self._total(unit, worker)
            case Reduce():
                return self._reduce(unit, worker)
            case Measure():
                return self._after(0.0, "", {})
            case BeginCurve() | CurvePieces() | Predict():
                return self._curve(unit, worker)
            case Solve():
                return self._solve(unit)
            case Refine():
                return self._refine(unit)
            case Write():
                return self._write(unit, worker)
            case WindowForward():
                return self._window(unit, worker)
            case Score():
                return self._after(0.0, "", Scored(0.0, 1))
            case Compare():
                return self._compare(unit)
            case ReadLayer():
                return self._read_layer(unit, worker)
        raise TypeError(f"no seconds are known for {unit.key}")

    def _after(self, seconds: float, kind: str, result: Any) -> Course[Any]:
        yield seconds
        if kind:
            self.busy[kind] += seconds
        return result

    # -- passes of shards --------------------------------------------------------------------------------------------

    def _pass(self, unit: Summable, worker: Worker) -> Course[ShardDone]:
        yield self._layer_read(unit, worker)
        if unit.ahead is not None:
            self._read(unit.lineage, unit.ahead, worker.node, getattr(unit, "ahead_weights", ()))
        kind, seconds = self._seconds(unit)
        yield from self._after(seconds + self._replay_seconds(unit, worker), kind, None)
        if unit.sums is not None:
            worker.sums.setdefault(unit.sums.name, []).append(unit.shard)
        if stored := self._stored_bytes(unit):
            yield self.rates.commit_s
            yield self.clock.transfer(f"disk {worker.node}", stored / self.rates.disk)
        self._hold(unit, worker, unit.emit)
        return ShardDone(
            partials={moment: HANDLE for moment in unit.moments if moment.kind == "sample"},
            cosine=(1.0, 1) if getattr(unit, "cosine", False) else None,
            activation=RECORD if unit.store else None,
            tokens=1,
            inputs=RECORD if getattr(unit, "keep_inputs", False) else None,
            worker=worker.name,
        )

    def _seconds(self, unit: Summable) -> tuple[str, float]:
        """Return the kind and the seconds of a shard's pass through a layer or a part of it."""
        work, rates, passes, shards = self.work, self.rates, self.passes, self.job.shards
        if isinstance(unit, Backward):
            return "gradient", gradient_seconds(work, rates) / self._parts(unit) / len(self.job.gradient_shards)
        if isinstance(unit, Pair):
            return self._pair_seconds(unit)
        if unit.staged is not None or (unit.lineage == "compressed" and not unit.moments):
            seconds = forward_seconds(work, rates, passes, packed=unit.staged is not None)
            return "propagate", seconds / self._parts(unit) / shards
        if unit.moments:
            return "statistics", statistics_seconds(work, rates, passes) / self._parts(unit) / shards
        cosines = work.cosine_bytes / rates.memory / len(self.job.importance_shards) if unit.cosine else 0.0
        return "importance", forward_seconds(work, rates, passes) / self._parts(unit) / shards + cosines

    def _pair_seconds(self, unit: Pair) -> tuple[str, float]:
        """Return the kind and the seconds of a shard's pass through the layer of both models.

        A correction passes each layer to each of its points, and on to the next. A layer that is trained together with
        others is passed once, others to their targets and to the next layer.
        """
        shards, work, rates = self.job.shards, self.work, self.rates
        if work.correction_flops and not unit.targets:
            steps = 1 + sum(1 for points in self.job.points[unit.layer] if self._pairs(unit.layer, points))
            return "correct", correction_seconds(work, rates) / steps / shards
        seconds = work.refinement.passes / rates.products / shards
        return "refine", seconds / (1 if work.refinement.independent else 2)

    def _replay_seconds(self, unit: Summable | WindowForward, worker: Worker) -> float:
        """Return the seconds in which a worker recomputes the values that the unit needs, from the nearest layer where
        it holds them, or they are committed."""
        held = worker.hidden.get(_shard(unit))
        if isinstance(unit, Backward):
            above = [layer for layer in (held, unit.base) if layer is not None and layer > unit.layer]
            lacking = 0 if unit.probe else min(above) - unit.layer - 1
            return lacking * gradient_seconds(self.work, self.rates) / len(self.job.gradient_shards)
        lacking = unit.layer - max(layer for layer in (held, unit.base) if layer is not None and layer <= unit.layer)
        if isinstance(unit, WindowForward):
            return lacking * self._window_seconds(unit)
        models = 2 if isinstance(unit, Pair) else 1
        return lacking * models * forward_seconds(self.work, self.rates, self.passes) / self.job.shards

    def _hold(self, unit: Summable | WindowForward, worker: Worker, emit: bool = True) -> None:
        """Note the values that a worker holds after a unit: a layer's inputs, or the gradients there."""
        if isinstance(unit, Backward):
            worker.hidden[_shard(unit)] = unit.layer if emit and not unit.part else unit.layer + 1
        else:
            worker.hidden[_shard(unit)] = unit.layer + emit

    def _parts(self, unit: Forward | Backward) -> int:
        return len(self.job.parts(unit.layer, (), getattr(unit, "staged", None)))

    def _stored_bytes(self, unit: Summable) -> float:
        """Return the bytes that a unit stores: values of a shard, of both models or of one, and inputs of its gradient
        samples."""
        models = 2 if isinstance(unit, Pair) else 1
        outputs = models * self.work.hidden_bytes / self.job.shards if unit.store else 0.0
        if isinstance(unit, Forward) and unit.keep_inputs:
            return outputs + self.work.gradient_input_bytes / len(self.job.gradient_shards)
        return outputs

    def _layer_read(self, unit: Summable, worker: Worker) -> Transfer:
        return self._read(unit.lineage, unit.layer, worker.node, getattr(unit, "weights", ()))

    def _read(self, reader: str, layer: int, node: int, weights: Sequence[Any] = ()) -> Transfer:
        """Return the read of a layer by a node, for a pass. Start it if it has not begun. `weights`: handles of parts
        that all nodes have read, which come over the network."""
        if (reader, layer, node) not in self.reads:
            if weights:
                # The network carries all nodes' parts at once.
                transfer = next((self.reads[key] for key in self._on_all_nodes(reader, layer)), None)
                transfer = transfer or self.clock.transfer(
                    "network", pass_on_seconds(self.work, self.rates, self.passes)
                )
            elif reader in ("dense", "compressed"):
                place = "memory" if self.passes.source_cached(self.rates) else "disk"
                seconds = read_seconds(self.work, self.rates, self.passes, shared=False)
                transfer = self.clock.transfer(f"{place} {node}", seconds)
            else:
                transfer = self._read_again(node, self.work.weight_bytes)
            self.reads[reader, layer, node] = transfer
        return self.reads[reader, layer, node]

    def _on_all_nodes(self, reader: str, layer: int) -> list[tuple[str, int, int]]:
        nodes = range(self.passes.nodes(self.rates))
        return [key for node in nodes if (key := (reader, layer, node)) in self.reads]

    def _read_again(self, node: int, size: float) -> Transfer:
        """Start to read bytes that a node has read before, or written."""
        cached, rates = self.passes.cached, self.rates
        place, rate = ("memory", rates.link) if cached else ("disk", rates.disk)
        return self.clock.transfer(f"{place} {node}", size / rate)

    def _read_layer(self, unit: ReadLayer, worker: Worker) -> Course[ReadDone]:
        yield self.clock.transfer(f"disk {worker.node}", read_seconds(self.work, self.rates, self.passes))
        return ReadDone(HANDLE)

    # -- sums --------------------------------------------------------------------------------------------------------

    def _choose_grids(self, unit: ChooseGrids, worker: Worker) -> Course[ChooseGridsDone]:
        forward: Summable = unit.forward
        yield self._layer_read(forward, worker)
        if isinstance(forward, Backward):
            kind, seconds = "gradient", gradient_grid_seconds(self.work, self.rates)
        else:
            kind, models = ("correct", 2) if isinstance(forward, Pair) else ("statistics", 1)
            seconds = models * grid_seconds(self.work, self.rates)
        yield from self._after(seconds + self._replay_seconds(forward, worker), kind, None)
        self._hold(forward, worker, emit=False)
        return ChooseGridsDone({moment: HANDLE for moment in forward.moments})

    def _collect(self, unit: Collect, worker: Worker) -> Course[CollectDone]:
        size = self._bytes(unit.lineage, unit.layer, unit.moments)
        yield self.clock.transfer(f"link {worker.name}", size / self.rates.link)
        return CollectDone(
            partials={moment: (HANDLE,) * unit.parts for moment in unit.moments},
            diagonals=dict.fromkeys(unit.moments, HANDLE),
            shards=tuple(worker.sums.pop(unit.sums)),
            node=f"node-{worker.node}",
            tokens=dict.fromkeys(unit.moments, 1),
        )

    def _add(self, unit: Add) -> Course[AddDone]:
        """Add a part of a moment on a worker's device, which each sum enters and one leaves. Sums of other nodes come
        over the network first."""
        rates, count = self.rates, len(unit.partials)
        size = self._bytes(unit.lineage, unit.layer, (unit.moment,)) / self.passes.workers
        nodes = self.passes.nodes(rates)
        if nodes > 1 and not unit.node:
            yield self.clock.transfer("network", size * (1 - 1 / nodes) / rates.network)
        copying = (count + 1) / rates.link if rates.link < rates.memory else 0.0
        yield size * (copying + 3 * (count - 1) / rates.memory)
        return AddDone(HANDLE)

    def _total(self, unit: Total, worker: Worker) -> Course[ArrayRecord]:
        size, rates = self._bytes(unit.lineage, unit.layer, (unit.moment,)), self.rates
        seconds = store_seconds(self.work, rates, self.passes) * size / self.work.moment_bytes
        yield self.clock.transfer(f"disk {worker.node}", seconds, PIECES)
        return GRADIENTS if unit.moment.kind == "gradient" else RECORD

    def _reduce(self, unit: Reduce, worker: Worker) -> Course[ArrayRecord]:
        samples = [moment for moment in layer_moments(self.job.tasks, unit.layer) if moment.kind == "sample"]
        yield self.clock.transfer(f"disk {worker.node}", self.work.sample_bytes / len(samples) / self.rates.disk)
        return RECORD

    def _bytes(self, lineage: str, layer: int, moments: Sequence[Moment]) -> float:
        """Return the size of the sums of some moments of a layer."""
        if lineage == "paired":
            points = [points for points in self.job.points[layer] if self._pairs(layer, points)]
            step = next(step for step, some in enumerate(points) if moments[0].point in some)
            return self.work.pair_bytes[step] * len(moments) / len(self._pairs(layer, points[step]))
        if lineage == "gradient":
            return self.work.gradient_bytes * len(moments) / len(layer_gradients(self.job.tasks, layer))
        summed = [moment for moment in layer_moments(self.job.tasks, layer) if moment.kind in SUMMED]
        return self.work.moment_bytes * len(moments) / len(summed)

    def _pairs(self, layer: int, points: Sequence[str]) -> set[Moment]:
        """Return the pairs of a layer that are summed at some points."""
        tasks = [task for task in self.job.tasks if task.layer == layer]
        return {moment for task in tasks for moment in task.corrections if moment.point in points}

    # -- groups ------------------------------------------------------------------------------------------------------

    def _curve(self, unit: BeginCurve | CurvePieces | Predict, worker: Worker) -> Course[Any]:
        """Read the moments, then compute the curve, or the part of it that the unit asks for."""
        curve = self._of_task(self.work.curves, unit.task, self.job.predicts)
        if isinstance(unit, Predict) and unit.pieces:
            return CURVE
        seconds = solve_seconds(curve, self.rates)
        if not isinstance(unit, Predict):
            assert curve.shared is not None, "a curve in pieces has a common part"
            begun = solve_seconds(curve.shared, self.rates)
            again = curve.repeated / self.rates.double
            share = len(unit.numbers) / unit.task.pieces if isinstance(unit, CurvePieces) else 0.0
            seconds = (seconds - begun) * share + again if isinstance(unit, CurvePieces) else begun
        size = self.work.moment_bytes / max(1, len(self.work.curves))
        if self.passes.cached:
            yield self.clock.transfer(f"link of {worker.name}", size / self.rates.link)
        else:
            yield self.clock.transfer(f"disk {worker.node}", size / self.rates.disk)
        result: Any = CURVE if isinstance(unit, Predict) else HANDLE
        if isinstance(unit, CurvePieces):
            result = [HANDLE] * len(unit.numbers)
        return (yield from self._after(seconds, "curves", result))

    def _solve(self, unit: Solve) -> Course[SolveDone]:
        solve = self._of_task(self.work.solves, unit.task, self.job.tasks)
        seconds = solve_seconds(solve, self.rates) / max(1, len(unit.task.corrections))
        if unit.task.moments:
            seconds += moment_wait_seconds(self.work, self.rates, self.passes)
        for moment, found in unit.statistics.items():
            if moment.kind == "pair" and isinstance(found, Summed):
                seconds += self._bytes("paired", unit.task.layer, (moment,)) / self.rates.link
        forms = {unit.task.name: FormSpec(form="dense", rank=1)}
        return (yield from self._after(seconds, "solve", SolveDone(HANDLE, forms, {})))

    def _of_task(self, works: Sequence[Work], task: Task, tasks: Sequence[Task]) -> Work:
        """Return the work of a task by its place among those of its layer."""
        names = [other.name for other in tasks if other.layer == task.layer]
        return works[names.index(task.name) % len(works)]

    def _refine(self, unit: Refine) -> Course[RefineDone]:
        seconds = self.work.refinement.training_seconds(self.rates, self.passes.cached)
        groups = tuple(SolveDone(HANDLE, group.forms, group.report) for group in unit.groups)
        return (yield from self._after(seconds, "refine", RefineDone(groups, TRAINED)))

    def _write(self, unit: Write, worker: Worker) -> Course[StagedRecord]:
        yield self.clock.transfer(f"disk {worker.node}", self.work.written_bytes / self.rates.disk)
        path = f"staged/layer-{unit.layer:05d}.{0:032x}.safetensors"
        return StagedRecord(path=path, size=1, sha256="0" * 64, tensors={})

    # -- scores ------------------------------------------------------------------------------------------------------

    def _window(self, unit: WindowForward, worker: Worker) -> Course[ShardDone]:
        yield self._window_read(unit, unit.layer, worker)
        if unit.ahead is not None:
            self._window_read(unit, unit.ahead, worker)
        seconds = self._window_seconds(unit) + self._replay_seconds(unit, worker)
        yield from self._after(seconds, "held-out", None)
        self._hold(unit, worker)
        return ShardDone({}, None, RECORD if unit.store else None, 1)

    def _window_read(self, unit: WindowForward, layer: int, worker: Worker) -> Transfer:
        key = (unit.model, layer, worker.node)
        if key not in self.reads:
            size = self.work.weight_bytes if unit.staged is None else self.work.written_bytes
            self.reads[key] = self._read_again(worker.node, size)
        return self.reads[key]

    def _window_seconds(self, unit: WindowForward) -> float:
        flops = self.work.held_out_flops[unit.staged is not None]
        return held_out_seconds(flops, self.work, self.rates, self.passes) / unit.windows.shards

    def _compare(self, unit: Compare) -> Course[CompareDone]:
        seconds = len(unit.staged) * compare_seconds(self.work, self.rates, self.passes)
        return (yield from self._after(seconds, "compare", CompareDone({"layer_errors": (), "sketch": ()}, HANDLE)))


def _shard(unit: Summable | WindowForward) -> tuple[str, int]:
    """Return the name of a shard's values: those of each pass apart."""
    model, shard = shard_of(unit)
    return (model or getattr(unit, "lineage", ""), shard)
