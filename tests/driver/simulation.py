"""Simulates a cluster in which each result is a digest of its inputs: a skipped step or a wrong input changes the
journal.

It can be killed between any two of its actions, and its stores can be damaged.
"""

from __future__ import annotations

import hashlib
import json
import random
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from manifests.errors import CorruptError, Interrupted, LostInputError, NumericsError
from manifests.methods import Refine as Settings
from manifests.records import (
    ArrayRecord,
    Curve,
    E,
    FormSpec,
    GradientRecord,
    LedgerKey,
    StagedLayer,
    StagedRecord,
)
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import Job
from pipeline.driver.scheduler import Scheduler
from pipeline.methods.method import Moment, Scores, Task
from pipeline.units.curves import BeginCurve, CurvePieces, Predict
from pipeline.units.reads import ReadDone, ReadLayer
from pipeline.units.scores import Score, Scored, WindowForward
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
    Unwritten,
    Write,
)
from tools.simulator import memory_journal as simulator
from tools.simulator.estimates import TRAINED


class Killed(BaseException):
    """Ends the simulated process; nothing catches it."""


@dataclass(frozen=True)
class Handle:
    """A handle of a unit's result; `life` is the number of the process that received it."""

    life: int
    value: str


def sha256(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def number_in(path: str) -> int:
    """Return the number of a record, by order of writing, from its path."""
    return int(path.removesuffix(".safetensors")[-32:], 16)


def digest(*parts: object) -> str:
    return hashlib.blake2s(repr(parts).encode()).hexdigest()[:16]


@dataclass
class World:
    """The state that survives a process: stores and journal. `events`: durable changes, in order.

    `fuel`: the number of actions before the process is killed. `damaged`: the numbers of the records (by order of
    writing) that are corrupt when read. `left`: the states that a process killed at any time would leave; of several
    without a durable change in between, the last, when most work is lost.
    """

    stores: dict[str, dict[str, str]] = field(default_factory=lambda: {"activation": {}, "statistic": {}, "staged": {}})
    values: dict[str, str] = field(default_factory=dict)  # of all paths, removed ones included
    entries: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)
    done: list[Unit] = field(default_factory=list)
    passes: int = 0  # of shards through layers
    backward_passes: int = 0
    handles: list[weakref.ref[Handle]] = field(default_factory=list)  # all that were created
    repairs: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    damaged: frozenset[int] = frozenset()
    fuel: int | None = None
    left: list[World] | None = None
    life: int = 0

    def copy(self) -> World:
        """Return an independent copy of the state."""
        stores = {kind: dict(live) for kind, live in self.stores.items()}
        lists = {name: list(getattr(self, name)) for name in ("events", "done", "handles", "repairs")}
        return replace(self, stores=stores, values=dict(self.values), entries=dict(self.entries), left=None, **lists)

    def happen(self) -> None:
        if self.left is not None:
            if self.left and (self.left[-1].entries, self.left[-1].stores) == (self.entries, self.stores):
                self.left.pop()
            self.left.append(self.copy())
        if self.fuel is not None:
            self.fuel -= 1
            if self.fuel < 0:
                raise Killed

    def store(self, kind: str, value: str) -> ArrayRecord:
        """Store an array, represented by its value."""
        path = self._keep(kind, f"{kind}/{len(self.values):032x}", value)
        return ArrayRecord(
            version=1,
            path=path,
            shape=(1,),
            dtype="uint8",
            chunks=(1,),
            symmetric=False,
            metadata_sha256=sha256(value),
            checksums=(value,),
        )

    def store_staged(self, layer: int, value: str) -> StagedRecord:
        """Store a compressed layer, represented by its value."""
        path = self._keep("staged", f"staged/layer-{layer:05d}.{len(self.values):032x}.safetensors", value)
        return StagedRecord(path=path, size=len(value), sha256=sha256(value), tensors={})

    def _keep(self, kind: str, path: str, value: str) -> str:
        self.values[path] = value
        self.stores[kind][path] = value
        return path

    def load(self, kind: str, record: ArrayRecord | StagedRecord) -> str:
        path = record.path
        if path not in self.stores[kind]:
            raise CorruptError(f"{path}: missing", path)
        if number_in(path) in self.damaged:
            raise CorruptError(f"{path}: damaged", path)
        said = record.sha256 if isinstance(record, StagedRecord) else record.metadata_sha256
        assert sha256(self.stores[kind][path]) == said
        return self.stores[kind][path]

    def journal(self) -> dict[str, Any]:
        """Return the entries, with each record replaced by its value."""
        return {key: self._plain(json.loads(text)) for key, text in self.entries.items()}

    def number_of(self, value: str) -> int:
        """Return the number, by order of writing, of the first record with this value."""
        return list(self.values.values()).index(value)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, dict):
            if "path" in value:
                return self.values[value["path"]]
            return {key: self._plain(child) for key, child in value.items()}
        return [self._plain(child) for child in value] if isinstance(value, list) else value


class MemoryJournal(simulator.MemoryJournal):
    """A ledger in memory that records its changes in a world, which may end the process before or after each."""

    def __init__(self, world: World) -> None:
        super().__init__(world.entries)
        self.world = world

    def commit(self, key: LedgerKey[E], record: E) -> None:
        self.world.happen()
        super().commit(key, record)
        self.world.events.append(("commit", key))
        self.world.happen()

    def retract(self, key: str) -> None:
        self.world.happen()
        super().retract(key)
        self.world.events.append(("retract", key))
        self.world.happen()


class WorldCleaner:
    def __init__(self, world: World) -> None:
        self.world = world

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        self._retain("activation", records)

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        self.world.happen()
        for record in records:
            assert not any(f'"{record.path}"' in text for text in self.world.entries.values())
            del self.world.stores["activation"][record.path]
        self.world.happen()

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        self._retain("statistic", records)

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        self._retain("staged", records)

    def _retain(self, kind: str, records: Sequence[ArrayRecord | StagedRecord]) -> None:
        self.world.happen()
        kept = {record.path for record in records}
        self.world.stores[kind] = {path: value for path, value in self.world.stores[kind].items() if path in kept}
        self.world.events.append(("retain", f"{kind} {len(kept)}"))
        self.world.happen()


@dataclass
class Recorder:
    """An observer that records its calls."""

    world: World
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    layers: list[tuple[str, int]] = field(default_factory=list)
    summaries: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)

    def phase(self, name: str, layers: int, units_per_layer: int) -> None:
        self.phases.append((name, layers, units_per_layer))

    def unit_done(self, unit: Unit, result: Any) -> None:
        self.units.append(unit.key)

    def layer_done(self, phase: str, layer: int, summary: Mapping[str, Any]) -> None:
        self.layers.append((phase, layer))
        if phase == "compress":
            self.summaries[layer] = summary

    def repaired(self, reason: str, keys: Sequence[str]) -> None:
        self.world.repairs.append((reason, tuple(keys)))


class SimulatedPool:
    """A pool that does units when the driver waits, in `order`: "first", "last", or a seed to shuffle by.

    Its workers hold only their sums between units: every forward pass starts at `base`. Handles are invalid in another
    process.

    `narrow`: moment keys whose first grid of each layer is too narrow. `die_before`: a unit's key -> the worker that
    dies before the unit, once.
    """

    def __init__(self, world: World, order: str | int = "first", size: int = 2) -> None:
        self.world = world
        self.size = size
        self.pending: list[Unit] = []
        self.drained = 0
        self.fail_on: dict[str, Exception] = {}  # unit key -> raised once
        self.stop_after: int | None = None  # waits before a signal is noticed
        self.sums: dict[str, dict[str, dict[int, dict[str, str]]]] = {}  # worker -> pass -> shard -> moment -> value
        self.latest: dict[str, str] = {}  # worker -> its latest pass
        self.turn = 0
        self.cut = 2  # the most parts of a moment
        self.workers_per_node = 100
        self.narrow: frozenset[str] = frozenset()
        self.die_before: dict[str, str] = {}
        self.random = random.Random(order) if isinstance(order, int) else None
        self.last_first = order == "last"
        world.life += 1

    @property
    def nodes(self) -> list[list[str]]:
        names = [f"worker-{number}" for number in range(self.size)]
        return [names[at : at + self.workers_per_node] for at in range(0, self.size, self.workers_per_node)]

    def submit(self, unit: Unit) -> None:
        assert unit.key not in [other.key for other in self.pending]
        self.pending.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        self.world.happen()
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after < 0:
                raise Interrupted("stopped")
        assert self.pending, "the driver waits for nothing"
        if self.random is not None:
            unit = self.pending.pop(self.random.randrange(len(self.pending)))
        else:
            unit = self.pending.pop(-1 if self.last_first else 0)
        if error := self.fail_on.pop(unit.key, None):
            if isinstance(error, LostInputError):
                error.unit = unit.key
            raise error
        if worker := self.die_before.pop(unit.key, None):
            self.sums.pop(worker, None)
        self.world.done.append(unit)
        self.world.events.append(("unit", unit.key))
        try:
            return unit, self._execute(unit)
        except CorruptError as error:
            error.unit = unit.key
            raise

    def cancel_pending(self) -> None:
        self.drained += 1
        self.pending.clear()

    def forget(self) -> None:
        assert not self.pending
        self.world.events.append(("forget", ""))

    def _execute(self, unit: Unit) -> Any:
        if isinstance(unit, ReadLayer):
            return ReadDone(self._handle(f"weights {unit.layer} {unit.part}/{unit.parts}"))
        if isinstance(unit, Forward):
            return self._forward(unit)
        if isinstance(unit, Pair):
            return self._pair(unit)
        if isinstance(unit, Backward):
            return self._backward(unit)
        if isinstance(unit, ChooseGrids):
            assert all(moment.kind in SUMMED for moment in unit.forward.moments)
            layer = unit.forward.layer
            for record in (unit.forward.base_record, *getattr(unit.forward, "inputs", ())):
                assert record is None or self.world.load("activation", record), "a worker may have to read it"
            return ChooseGridsDone({moment: self._handle(f"grid {layer}") for moment in unit.forward.moments})
        if isinstance(unit, Collect):
            return self._collect(unit)
        if isinstance(unit, CheckGrids):
            narrow = [moment for moment in unit.grids if moment.key in self.narrow]
            return CheckGridsDone(
                {moment: self._handle("wider") for moment in narrow if self._open(unit.grids[moment]) != "wider"}
            )
        if isinstance(unit, Add):
            return AddDone(self._handle(json.dumps(self._joined(unit.partials))))
        if isinstance(unit, Total):
            return self._total(unit)
        if isinstance(unit, Reduce):
            assert unit.moment.kind == "sample"
            parts = [self._open(handle) for handle in unit.partials]
            return self.world.store("statistic", digest("sum", unit.lineage, unit.layer, unit.moment.key, parts))
        if isinstance(unit, Measure):
            return {"number": int(digest("measured", unit.key)[:2], 16)}
        if isinstance(unit, BeginCurve | CurvePieces | Predict):
            return self._curve(unit)
        if isinstance(unit, Solve):
            return self._solve(unit)
        if isinstance(unit, Refine):
            return self._refine(unit)
        if isinstance(unit, WindowForward | Score):
            return self._score(unit)
        assert isinstance(unit, Write)
        return self.world.store_staged(unit.layer, self._written(unit))

    def _written(self, unit: Write) -> str:
        assert {form.rank for form in unit.forms.values()} == {1 + unit.layer}
        parts = [self._open(handle) for handle in unit.factors]
        return digest("written", unit.layer, parts, sorted(unit.forms))

    def _curve(self, unit: BeginCurve | CurvePieces | Predict) -> Any:
        """Return a curve, which is the same with and without pieces."""
        read = [self.world.load("statistic", record) for record in unit.statistics.values()]
        shared = digest("shared", unit.task.key, read)
        if isinstance(unit, BeginCurve):
            return shared
        numbers = unit.numbers if isinstance(unit, CurvePieces) else range(unit.task.pieces)
        assert getattr(unit, "shared", None) in (None, shared)
        pieces = [digest("piece", shared, number) for number in numbers]
        if isinstance(unit, CurvePieces):
            return pieces
        assert unit.pieces in ((), tuple(pieces))
        number = 1 + int(digest("predicted", pieces)[:2], 16)
        return Curve(ranks={"rank": (number,)}, numbers=(number,), cache=(0,), loss=(0.0,))

    def _forward(self, unit: Forward) -> ShardDone:
        assert 0 <= unit.base <= unit.layer
        assert len(unit.replay) == unit.layer - unit.base
        assert (unit.base_record is None) == (unit.base == 0)
        for layer, handles in ((unit.layer, unit.weights), (unit.layer + 1, unit.ahead_weights)):
            parts = range(len(handles))
            assert [self._open(handle) for handle in handles] == [f"weights {layer} {p}/{len(parts)}" for p in parts]
        hidden = digest("embedded", unit.shard)
        if unit.base_record is not None:
            hidden = self.world.load("activation", unit.base_record)
        for before, staged in enumerate(unit.replay, unit.base):
            assert staged is None or unit.lineage == "compressed"
            hidden = self._through(before, staged, hidden)
        assert unit.staged is None or not unit.moments, "statistics are taken on dense weights"
        output = self._through(unit.layer, unit.staged, hidden)
        number = int(hidden[:4], 16)
        kept = self.world.store("activation", digest("input", unit.layer, hidden)) if unit.keep_inputs else None
        moments = {moment: digest("moment", moment.key, unit.layer, hidden) for moment in unit.moments}
        samples = {moment: self._handle(value) for moment, value in moments.items() if moment.kind == "sample"}
        assert (unit.sums is not None) == any(moment.kind == "value" for moment in moments)
        return ShardDone(
            partials=samples,
            cosine=(number / 65536, 1) if unit.cosine else None,
            activation=self.world.store("activation", output) if unit.store else None,
            tokens=1,
            inputs=kept,
            worker=self._add(unit, {moment.key: value for moment, value in moments.items() if moment.kind == "value"}),
        )

    def _add(self, unit: Summable, values: dict[str, str]) -> str:
        """Add a shard to the sums of the next worker in turn, and return that worker."""
        worker = f"worker-{self.turn % max(1, self.size)}"
        self.turn += 1
        if unit.sums is not None:
            assert {self._open(handle) for handle in unit.sums.grids.values()} <= {f"grid {unit.layer}", "wider"}
            passes = self.sums.setdefault(worker, {})
            if unit.sums.name not in passes:
                for name in passes.keys() - {
                    self.latest.get(worker)
                }:  # as workers do: older sums have been handed over
                    del passes[name]
                self.latest[worker] = unit.sums.name
            shards = passes.setdefault(unit.sums.name, {})
            assert unit.shard not in shards
            shards[unit.shard] = values
        return worker

    def _collect(self, unit: Collect) -> CollectDone | None:
        if unit.worker not in self.sums:
            return None
        shards = self.sums[unit.worker].pop(unit.sums)
        found = {
            moment: json.dumps({shard: values[moment.key] for shard, values in shards.items()})
            for moment in unit.moments
        }
        parts = min(self.cut, unit.parts)
        cut = {
            moment: tuple(self._handle(f'{{"{part}": {text}}}') for part in range(parts))
            for moment, text in found.items()
        }
        node = f"node-{int(unit.worker.rpartition('-')[2]) // self.workers_per_node}"
        diagonals, tokens = {moment: self._handle("squares") for moment in found}, dict.fromkeys(found, len(shards))
        return CollectDone(cut, diagonals, tuple(shards), node, tokens)

    def _joined(self, handles: Sequence[Handle]) -> dict[str, dict[str, str]]:
        """Join sums of different shards or parts: part -> shard -> value."""
        joined: dict[str, dict[str, str]] = {}
        for handle in handles:
            for part, found in json.loads(self._open(handle)).items():
                assert not joined.get(part, {}).keys() & found.keys(), "a shard is added once"
                joined[part] = {**joined.get(part, {}), **found}
        return joined

    def _total(self, unit: Total) -> ArrayRecord:
        gradients = unit.moment.kind == "gradient"
        assert (unit.lineage == "gradient") == gradients
        value = self._sum(unit.layer, unit.moment, unit.summed)
        record = self.world.store("statistic", value)
        return GradientRecord(**dict(record), square_norms=(1.0,), sequences=1, tokens=1) if gradients else record

    def _sum(self, layer: int, moment: Moment, summed: Summed) -> str:
        parts = self._joined(summed.partials)
        first, *others = (sorted(found.items()) for found in parts.values())
        assert all(other == first for other in others), "every part is over all shards"
        return digest("sum", layer, moment.key, first)

    def _pair(self, unit: Pair) -> ShardDone:
        assert len(unit.replay) == unit.layer - unit.base
        assert (unit.base_record is None) == (unit.base == 0)
        assert unit.staged is None or unit.staged.rounded == {}
        embedded = digest("embedded", unit.shard)
        dense, packed = embedded, embedded
        if unit.base_record is not None:
            dense, packed = self.world.load("activation", unit.base_record).split()
        for before, staged in enumerate(unit.replay, unit.base):
            dense, packed = self._through(before, None, dense), self._through(before, staged, packed)
        after = self._through(unit.layer, None, dense), self._through(unit.layer, unit.staged, packed)
        inputs = packed if unit.share == 1.0 else digest("mixed", unit.share, dense, packed)
        left = (after[0], inputs) if unit.targets else after
        assert unit.known is None or self.world.load("activation", unit.known).split() == [after[0], packed]
        moments = {moment: digest("pair", moment.key, unit.layer, dense, packed, *after) for moment in unit.moments}
        assert (unit.sums is not None) == bool(moments)
        return ShardDone(
            partials={},
            cosine=None,
            activation=self.world.store("activation", " ".join(left)) if unit.store else None,
            tokens=1,
            worker=self._add(unit, {moment.key: value for moment, value in moments.items()}),
        )

    def _score(self, unit: WindowForward | Score) -> ShardDone | Scored:
        """Return a loss that depends on everything that the windows passed."""
        assert len(unit.replay) == unit.layer - unit.base
        assert unit.base_record is not None or unit.base == 0
        tokens = self.world.load("activation", unit.windows.tokens) if unit.windows.tokens else "given"
        hidden = digest("embedded", tokens, unit.shard)
        if unit.base_record is not None:
            hidden = self.world.load("activation", unit.base_record)
        for before, staged in enumerate(unit.replay, unit.base):
            hidden = self._through(before, staged, hidden)
        if isinstance(unit, WindowForward):
            output = self._through(unit.layer, unit.staged, hidden)
            stored = self.world.store("activation", output) if unit.store else None
            return ShardDone(partials={}, cosine=None, activation=stored, tokens=1)
        dense = self.world.load("activation", unit.dense) if unit.dense is not None else ""
        return Scored(float(int(digest("loss", hidden, dense)[:6], 16)), 1)

    def _backward(self, unit: Backward) -> ShardDone:
        self.world.backward_passes += len(unit.inputs)
        read = [self.world.load("activation", record) for record in unit.inputs]
        if unit.probe:
            assert unit.base == unit.layer + 1
            assert unit.base_record is None
            gradient = digest("probe", unit.layer, unit.shard)
        elif unit.base_record is not None:
            gradient = self.world.load("activation", unit.base_record)
        else:
            gradient = digest("head", unit.shard)
        for layer, hidden in reversed(list(enumerate(read[1:], unit.layer + 1))):
            gradient = digest("back", layer, hidden, gradient)
        moments = {moment: digest("gradient", moment.key, unit.layer, read[0], gradient) for moment in unit.moments}
        assert (unit.sums is not None) == bool(moments)
        return ShardDone(
            partials={},
            cosine=None,
            activation=self.world.store("activation", digest("back", unit.layer, read[0], gradient))
            if unit.store
            else None,
            tokens=1,
            worker=self._add(unit, {moment.key: value for moment, value in moments.items()}),
        )

    def _through(self, layer: int, staged: StagedLayer | Unwritten | None, hidden: str) -> str:
        self.world.passes += 1
        return digest("through", layer, self._weights(layer, staged), hidden)

    def _weights(self, layer: int, staged: StagedLayer | Unwritten | None) -> str:
        if staged is None:
            return "dense"
        if isinstance(staged, Unwritten):
            assert staged.write.layer == layer
            return self._written(staged.write)
        assert staged.forms
        assert all(form.rank == 1 + layer for form in staged.forms.values())
        return self.world.load("staged", staged)

    def _solve(self, unit: Solve) -> SolveDone:
        group = unit.task
        pairs = [moment for moment in unit.statistics if moment.kind == "pair"]
        assert tuple(unit.statistics) == (*group.moments, *pairs)
        assert len(pairs) == bool(group.corrections)
        assert not pairs or (unit.before is None) == (pairs[0] == group.corrections[0])
        read = [
            self._sum(group.layer, moment, found) if isinstance(found, Summed) else self.world.load("statistic", found)
            for moment, found in unit.statistics.items()
        ]
        before = self._open(unit.before) if unit.before is not None else ""
        value = digest("solved", group.layer, group.name, read, sorted(unit.ranks.items()), before)
        form = FormSpec(form="test", rank=1 + group.layer)
        said = {f"{group.name}.{pair.point}": form for pair in pairs}
        return SolveDone(self._handle(value), {group.name: form, **said}, {"error": 0.5, **dict.fromkeys(said, 1.0)})

    def _refine(self, unit: Refine) -> RefineDone:
        assert all(group.task.refine for group in unit.groups)
        read = [self.world.load("staged", unit.staged), *(self.world.load("activation", of) for of in unit.targets)]
        solved = (
            SolveDone(self._handle(digest("refined", group.task.key, read)), group.forms, group.report)
            for group in unit.groups
        )
        return RefineDone(tuple(solved), TRAINED)

    def _handle(self, value: str) -> Handle:
        handle = Handle(self.world.life, value)
        self.world.handles.append(weakref.ref(handle))
        return handle

    def _open(self, handle: Handle) -> str:
        assert handle.life == self.world.life, "a handle of a process that is gone"
        return handle.value


IMPORTANCE = frozenset({"importance"})
SHARED, OWN, MLP = Moment("q.in"), Moment("o.in", heads=2, groups=1), Moment("down.in")
MID, OUT = Moment("mid", kind="gradient"), Moment("out", kind="gradient")
PAIRS = {point: Moment(point, kind="pair") for point in ("attention.in", "o.in", "down.in")}


def make_tasks(layers: Sequence[int], groups: Sequence[str] = ("attention", "mlp")) -> tuple[Task, ...]:
    """Return tasks of one or two groups per layer; group "free" needs no statistics."""
    moments = {
        "attention": (SHARED, OWN),
        "mlp": (SHARED, MLP),
        "free": (),
        "loss-attention": (SHARED, MID),
        "loss-mlp": (MLP, OUT),
        **{f"expert-{number}": (SHARED, Moment(f"experts.{number}.down.in")) for number in range(5)},
    }
    return tuple(
        Task(layer, name, (f"role-{name}",), moments[name], method=0) for layer in layers for name in sorted(groups)
    )


def make_corrected_tasks(layers: Sequence[int], groups: Sequence[str] = ("first", "second")) -> tuple[Task, ...]:
    """Return tasks solved in parts: "first" by two pairs, "second" by one of these and a later one; "free" by none."""
    pairs = {"first": ("attention.in", "o.in"), "second": ("attention.in", "down.in"), "free": ()}
    return tuple(
        Task(
            layer,
            name,
            (f"role-{name}",),
            (SHARED,) if pairs[name] else (),
            tuple(PAIRS[point] for point in pairs[name]),
            method=0,
        )
        for layer in layers
        for name in sorted(groups)
    )


def measures(layers: Sequence[int]) -> tuple[Task, ...]:
    return tuple(Task(layer, name, ("k",), method=1) for layer in layers for name in ("first", "second"))


def make_job(tasks: tuple[Task, ...], num_layers: int = 4, shards: int = 2, **settings: Any) -> Job:
    def allocate(scores: Scores) -> dict[str, dict[str, int]]:
        wide = {layer: round(1000 * score) for layer, score in scores.importance.items()}
        known = sum(found["number"] for found in (scores.measured or {}).values())
        known += sum(curve.numbers[0] for curve in (scores.curves or {}).values())
        return {task.key: {"rank": 1 + known + wide.get(task.layer, 0)} for task in tasks}

    given = {"scores": IMPORTANCE, "propagate": "compressed", "importance_shards": tuple(range(shards)), **settings}
    given.setdefault("points", (("attention.in", "o.in", "mlp.in", "down.in"),) * num_layers)
    return Job(num_layers=num_layers, shards=shards, tasks=tasks, allocate=allocate, **given)


def make_experts_job(**settings: Any) -> Job:
    """Return a job in which two of three layers have five experts, and workers hold two at a time."""
    tasks = make_tasks([0], ["mlp"]) + make_tasks([1, 2], ["attention", "expert-0", "expert-3", "expert-4"])
    return make_job(tasks, num_layers=3, experts=(0, 5, 5), held_experts=2, **settings)


def make_gradient_job(
    layers: Sequence[int], groups: Sequence[str] = ("loss-attention", "loss-mlp"), **settings: Any
) -> Job:
    """Return a job whose ranks follow curves, which depend on moments of values and of gradients."""
    tasks = make_tasks(layers, groups)
    given: dict[str, Any] = {
        "num_layers": max(layers) + 1,
        "propagate": "dense",
        "keep_statistics": True,
        "scores": frozenset(),
        "gradient_shards": (0, 1),
        "predicts": tuple(task for task in tasks if task.moments),
        **settings,
    }
    if given["propagate"] == "compressed":
        given["predicts"] = ()  # curves need dense statistics
    return make_job(tasks, **given)


def make_pieces_job(layers: Sequence[int], pieces: int = 3) -> Job:
    """Return a job in which the curves of one of two groups may be computed in pieces."""
    job = make_gradient_job(layers)
    long = {task: replace(task, pieces=pieces) for task in job.tasks if task.name == "loss-mlp"}
    tasks = tuple(long.get(task, task) for task in job.tasks)
    return replace(job, tasks=tasks, predicts=tasks)


def make_corrected_job(layers: Sequence[int], groups: Sequence[str] = ("first", "second"), **settings: Any) -> Job:
    """Return a job that solves each layer in parts, on outputs of the compressed layers before it."""
    given = {"num_layers": max(layers) + 1, "propagate": "dense", "keep_statistics": True, "scores": frozenset()}
    return make_job(make_corrected_tasks(layers, groups), **{**given, **settings})


def make_refined_job(
    layers: Sequence[int],
    corrected: Sequence[str] = (),
    groups: Sequence[str] = ("attention",),
    inputs: str = "compressed",
    **settings: Any,
) -> Job:
    """Return a job with training after solves; those in `corrected` are corrected first, and "free" is not trained."""
    training = Settings.model_validate({"inputs": inputs})
    given = {"num_layers": max(layers) + 1, "propagate": "dense", "keep_statistics": True, "scores": frozenset()}
    tasks = (*make_tasks(layers, groups), *make_corrected_tasks(layers, corrected))
    trained = (replace(task, refine=None if task.name == "free" else training) for task in tasks)
    return make_job(tuple(sorted(trained, key=lambda task: task.layer)), **{**given, **settings})


def run(job: Job, world: World | None = None, pool: SimulatedPool | None = None) -> tuple[World, Recorder]:
    """Run one process from start to end."""
    world = world or World()
    recorder = Recorder(world)
    scheduler = Scheduler(pool or SimulatedPool(world), recorder)
    Driver(job, scheduler, MemoryJournal(world), WorldCleaner(world)).run()
    return world, recorder


def run_until(job: Job, unit: str) -> World:
    """Return the world of a job that ended with an error at a unit, without the units before."""
    world = World()
    pool = SimulatedPool(world)
    pool.fail_on[unit] = NumericsError("stopped")
    with pytest.raises(NumericsError, match="stopped"):
        run(job, world, pool)
    world.done.clear()
    return world


def run_with_a_death(job: Job, when: str) -> tuple[World, Counter[str]]:
    """Run a job by three workers, the first of which dies before a unit. Return its world, and the units done again.

    The journal is that of the job without a death, and nothing had to be repaired.
    """
    expected, world = World(), World()
    run(job, expected, SimulatedPool(expected, size=3))
    pool = SimulatedPool(world, size=3)
    pool.die_before[when] = "worker-0"
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert not world.repairs
    return world, Counter(unit.key for unit in forwards(world)) - Counter(unit.key for unit in forwards(expected))


ALL = range(4)
JOBS: dict[str, Callable[[], Job]] = {
    "compressed": lambda: make_job(make_tasks(ALL)),
    "compressed-kept": lambda: make_job(make_tasks(ALL), keep_statistics=True),
    "compressed-uniform": lambda: make_job(make_tasks(ALL), scores=frozenset()),
    "compressed-every-2": lambda: make_job(make_tasks(range(5)), num_layers=5, every=2),
    "compressed-every-3": lambda: make_job(make_tasks(range(7)), num_layers=7, every=3, shards=1),
    "compressed-last-2": lambda: make_job(make_tasks([2, 3])),
    "compressed-some": lambda: make_job(make_tasks([1, 3], ["mlp"]), num_layers=6, scores=frozenset()),
    "compressed-mixed": lambda: make_job(make_tasks([0, 2], ["free", "mlp"]) + make_tasks([1], ["free"])),
    "compressed-sampled": lambda: make_job(make_tasks(ALL), shards=3, importance_shards=(0, 2)),
    "compressed-sampled-every-2": lambda: make_job(make_tasks(ALL), shards=3, importance_shards=(1,), every=2),
    "dense": lambda: make_job(make_tasks(ALL), propagate="dense", keep_statistics=True),
    "dense-sampled": lambda: make_job(make_tasks(ALL), propagate="dense", shards=3, importance_shards=(0, 2)),
    "dense-dropped": lambda: make_job(make_tasks(ALL), propagate="dense"),
    "dense-uniform": lambda: make_job(make_tasks(ALL), propagate="dense", scores=frozenset()),
    "dense-uniform-kept": lambda: make_job(
        make_tasks(range(5)), num_layers=5, propagate="dense", scores=frozenset(), keep_statistics=True, every=2
    ),
    "dense-uniform-every-3": lambda: make_job(
        make_tasks(range(11)), num_layers=11, propagate="dense", scores=frozenset(), every=3
    ),
    "dense-uniform-some": lambda: make_job(
        make_tasks([1, 4], ["free", "mlp"]) + make_tasks([2], ["free"]),
        num_layers=6,
        propagate="dense",
        scores=frozenset(),
    ),
    "dense-every-2": lambda: make_job(make_tasks(range(5)), num_layers=5, propagate="dense", every=2),
    "dense-every-3": lambda: make_job(make_tasks(range(7)), num_layers=7, propagate="dense", every=3, shards=1),
    "dense-last-2": lambda: make_job(make_tasks([2, 3]), propagate="dense"),
    "experts-dense": lambda: make_experts_job(propagate="dense", keep_statistics=True),
    "experts-dense-every-2": lambda: make_experts_job(propagate="dense", every=2),
    "experts-in-pass": lambda: make_experts_job(propagate="dense", scores=frozenset()),
    "experts-compressed": lambda: make_experts_job(),
    "experts-compressed-kept": lambda: make_experts_job(keep_statistics=True, every=2),
    "gradient": lambda: make_gradient_job(ALL, shards=3, gradient_shards=(0, 2)),
    "gradient-dropped": lambda: make_gradient_job(ALL, keep_statistics=False),
    "gradient-every-2": lambda: make_gradient_job(range(5), every=2),
    "gradient-every-3": lambda: make_gradient_job(range(7), every=3, shards=1, gradient_shards=(0,)),
    "gradient-last-2": lambda: make_gradient_job([2, 3]),
    "gradient-some": lambda: make_gradient_job([1, 3], groups=["free", "loss-mlp"], num_layers=5),
    "gradient-local": lambda: make_gradient_job(ALL, gradient="local", every=2),
    "gradient-pieces": lambda: make_pieces_job(range(3)),
    "gradient-behind-compressed": lambda: make_gradient_job(ALL, propagate="compressed"),
    "corrected": lambda: make_corrected_job(range(3), ["first"], shards=1),
    "corrected-two": lambda: make_corrected_job(range(2), shards=1, keep_statistics=False),
    "corrected-every-2": lambda: make_corrected_job(range(4), ["second"], every=2, shards=1),
    "corrected-some": lambda: make_corrected_job([1], ["first", "free"], num_layers=3),
    "refined": lambda: make_refined_job(range(3), shards=1),
    "refined-every-2": lambda: make_refined_job(range(4), shards=1, every=2, keep_statistics=False),
    "refined-some": lambda: make_refined_job([1, 3], groups=["free", "mlp"], num_layers=5, shards=1),
    "refined-corrected": lambda: make_refined_job(range(2), ["first"], ["free"], shards=1),
    "refined-apart": lambda: make_refined_job(range(5), inputs="dense"),
    "refined-mixed": lambda: make_refined_job(range(5), groups=["free", "mlp"], inputs="mixed"),
    "refined-mixed-some": lambda: make_refined_job([1, 3], num_layers=5, inputs="mixed", keep_statistics=False),
    "refined-apart-some": lambda: make_refined_job(
        [1, 3], groups=["free", "mlp"], num_layers=5, inputs="dense", keep_statistics=False
    ),
    "free": lambda: make_job(make_tasks(ALL, ["free"]), scores=frozenset()),
    "free-ranked": lambda: make_job(make_tasks(ALL, ["free"])),
    "free-measured": lambda: make_job(make_tasks(ALL, ["free"]), scores=frozenset(), measures=measures(ALL)),
    "compressed-measured": lambda: make_job(make_tasks(ALL), measures=measures([1, 3])),
}


def commits(world: World) -> list[str]:
    """Return the committed keys, in order."""
    return [key for event, key in world.events if event == "commit"]


def backwards(world: World) -> list[Backward]:
    return [unit for unit in world.done if isinstance(unit, Backward)]


def forwards(world: World) -> list[Forward]:
    return [unit for unit in world.done if isinstance(unit, Forward)]


def solves(world: World) -> list[Solve]:
    """Return the units that solved groups, in order."""
    return [unit for unit in world.done if isinstance(unit, Solve)]
