"""The loop over layers: which units are due, in which order they are committed, where an interrupted job goes on.

No I/O and no tensors: units go to a pool, what is done goes to a journal. Order of durability: a layer's statistics are
entered before its factors, its factors before the hidden states that follow from them; replaced data is dropped last.

The journal's keys: `dense/L` the dense pass through layer L, `measured/L` what its weights tell, `ranks`,
`statistics/L` and `activations/L` of the walk, `layer/L` the compressed layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manifests.errors import CorruptError, LaminaError, LostInputError
from pipeline.methods.method import Form, Moment, Scores
from pipeline.methods.registry import Task, layer_importance, layer_moments, ranks_key
from pipeline.ports import (
    Cleaner,
    Forward,
    ForwardDone,
    Journal,
    Lineage,
    Measure,
    Observer,
    Pool,
    Record,
    Reduce,
    Solve,
    SolveDone,
    Unit,
    Write,
)

RanksOf = Mapping[str, Mapping[str, int]]
REPAIRS = 3


@dataclass(frozen=True)
class Job:
    """What the driver must know of a job.

    Attributes:
        allocate: scores -> ranks of every task, by `ranks_key`.
        scores: the fields of `Scores` that calibration text must give.
        measures: what must be measured on the dense weights before ranks are chosen.
        propagate: whose hidden states the statistics are taken on.
        every: hidden states are committed each time this many layers are done.
    """

    num_layers: int
    shards: int
    tasks: tuple[Task, ...]
    allocate: Callable[[Scores], dict[str, dict[str, int]]]
    scores: frozenset[str]
    propagate: Lineage
    every: int = 1
    keep_statistics: bool = False
    measures: tuple[Task, ...] = ()


class Driver:
    """Runs a job's computation to its end: afterwards every claimed layer is staged and entered in the journal."""

    def __init__(self, job: Job, pool: Pool, journal: Journal, cleaner: Cleaner, observer: Observer) -> None:
        self.job = job
        self.pool = pool
        self.journal = journal
        self.cleaner = cleaner
        self.observer = observer
        self.repairs: Counter[str] = Counter()  # by entry; "": what was lost since the last commit

    def run(self) -> None:
        """Goes through the phases, each from where the journal says it was left.

        Stored data that proves corrupt is taken out of the journal and computed again, and so is what was lost with a
        worker before it was committed. What goes wrong more than `REPAIRS` times in the same place is raised.
        """
        while True:
            try:
                return self._run_phases()
            except (CorruptError, LostInputError) as error:
                self.pool.drain()
                self._repair(error)

    def _run_phases(self) -> None:
        self._retain_statistics()
        dense = self.job.propagate == "dense"
        has_moments = any(task.group.moments for task in self.job.tasks)
        if "importance" in self.job.scores or (dense and has_moments):
            self._dense_pass(with_moments=dense)
        if self.job.measures:
            self._measure()
        ranks = self._ranks()
        if dense or not has_moments:
            self._solve_all(ranks)
        else:
            self._walk(ranks)
        self.cleaner.retain_activations(())
        self._retain_statistics()

    def _retain_statistics(self) -> None:
        """Drops the moments that no entry names, as an interruption leaves them, and those of finished layers."""
        live: list[Record] = []
        for layer in range(self.job.num_layers):
            if self.job.keep_statistics or self.journal.get(f"layer/{layer:05d}") is None:
                for key in (f"dense/{layer:05d}", f"statistics/{layer:05d}"):
                    live += (self.journal.get(key) or {}).get("statistics", {}).values()
        self.cleaner.retain_statistics(tuple(live))

    # -- the dense pass: importance, and with propagate: dense every statistic --------------------------------------

    def _dense_pass(self, with_moments: bool) -> None:
        last = self.job.num_layers - 1
        missing = [layer for layer in range(last + 1) if self.journal.get(f"dense/{layer:05d}") is None]
        if not missing:
            return
        base = next((layer for layer in range(missing[0], 0, -1) if self._activations("dense", layer)), 0)
        phase = "statistics" if with_moments else "importance"
        self.observer.phase(phase, len(missing), self.job.shards)
        for layer in missing:
            moments = layer_moments(self.job.tasks, layer) if with_moments else ()
            store = self._is_boundary(layer + 1) and layer < last
            emit = layer < last
            done = self._forward("dense", layer, None, moments, base, cosine=True, emit=emit, store=store)
            entry: Record = {
                "cosine": [result.cosine for result in done],
                "statistics": self._reduce("dense", layer, moments, done),
            }
            if store:
                entry["activations"] = [result.activation for result in done]
            self._enter(f"dense/{layer:05d}", entry)
            if store:
                base = layer + 1
                self.cleaner.retain_activations(tuple(entry["activations"]))
            self.observer.layer_done(phase, layer, {})
        self.cleaner.retain_activations(())

    def _ranks(self) -> RanksOf:
        entered = self.journal.get("ranks")
        if entered is None:
            importance = self._importance() if "importance" in self.job.scores else {}
            measured: dict[str, Any] = {}
            for layer in sorted({task.group.layer for task in self.job.measures}):
                measured |= self._entry(f"measured/{layer:05d}")["measured"]
            ranks = self.job.allocate(Scores(importance, measured))
            entered = {"ranks": ranks, "importance": importance}
            self._enter("ranks", _with_text_keys(entered))
        chosen: RanksOf = entered["ranks"]
        return chosen

    def _measure(self) -> None:
        """What the dense weights tell, a batch of layers at a time; one entry for each layer."""
        layers = sorted({task.group.layer for task in self.job.measures})
        pending = [layer for layer in layers if self.journal.get(f"measured/{layer:05d}") is None]
        self.observer.phase("measure", len(pending), 1)
        while pending:
            batch, pending = self._cut(pending)
            units = [Measure(task) for task in self.job.measures if task.group.layer in batch]
            results = list(zip(units, self._do(units), strict=True))
            for layer in batch:
                measured = {ranks_key(unit.task): found for unit, found in results if unit.task.group.layer == layer}
                self._enter(f"measured/{layer:05d}", {"measured": measured})
                self.observer.layer_done("measure", layer, {})

    def _importance(self) -> dict[int, float]:
        """Of every layer, from the cosines of all shards, summed in shard order."""
        means = []
        for layer in range(self.job.num_layers):
            cosines = self._entry(f"dense/{layer:05d}")["cosine"]
            means.append(sum(total for total, _ in cosines) / sum(count for _, count in cosines))
        return layer_importance(means)

    # -- solving without a walk: data-free, or from the statistics of the dense pass ---------------------------------

    def _solve_all(self, ranks: RanksOf) -> None:
        pending = [layer for layer in self._claimed() if not self._staged(layer)]
        self.observer.phase("compress", len(pending), 1)
        while pending:
            batch, pending = self._cut(pending)
            self._compress({layer: self._dense_statistics(layer) for layer in batch}, ranks)
            if not self.job.keep_statistics:
                live = [self._dense_statistics(layer) for layer in pending]
                self.cleaner.retain_statistics(tuple(record for found in live for record in found.values()))

    def _dense_statistics(self, layer: int) -> Mapping[str, Record]:
        if not layer_moments(self.job.tasks, layer):
            return {}
        statistics: dict[str, Record] = self._entry(f"dense/{layer:05d}")["statistics"]
        return statistics

    # -- the walk with propagate: compressed -------------------------------------------------------------------------

    def _walk(self, ranks: RanksOf) -> None:
        claimed = self._claimed()
        first = next((layer for layer in claimed if not self._staged(layer)), None)
        if first is None:
            return
        last = claimed[-1]
        base = next((layer for layer in range(first, 0, -1) if self._activations("compressed", layer)), 0)
        self.observer.phase("walk", last + 1 - base, 2 * self.job.shards)
        for layer in range(base, last + 1):
            if layer in claimed and not self._staged(layer):
                self._compress({layer: self._walk_statistics(layer, base)}, ranks)
                if not self.job.keep_statistics:
                    self.cleaner.retain_statistics(())
            if layer < last and self._is_boundary(layer + 1):
                base = self._propagate(layer, base)

    def _walk_statistics(self, layer: int, base: int) -> Mapping[str, Record]:
        entered = self.journal.get(f"statistics/{layer:05d}")
        if entered is None:
            moments = layer_moments(self.job.tasks, layer)
            done = self._forward("compressed", layer, None, moments, base, emit=False) if moments else []
            entered = {"statistics": self._reduce("compressed", layer, moments, done)}
            self._enter(f"statistics/{layer:05d}", entered)
        statistics: dict[str, Record] = entered["statistics"]
        return statistics

    def _propagate(self, layer: int, base: int) -> int:
        """The layer's outputs, by the weights it now has, become the committed inputs of the next (returned)."""
        done = self._forward("compressed", layer, self._staged(layer), (), base, store=True)
        activations = [result.activation for result in done]
        self._enter(f"activations/{layer + 1:05d}", {"activations": activations})
        self.cleaner.retain_activations(tuple(record for record in activations if record))
        return layer + 1

    # -- steps -------------------------------------------------------------------------------------------------------

    def _cut(self, pending: list[int]) -> tuple[list[int], list[int]]:
        """As many layers as there are workers, and the rest."""
        count = max(1, self.pool.size)  # 0 while the only worker is being replaced
        return pending[:count], pending[count:]

    def _is_boundary(self, layer: int) -> bool:
        return layer % self.job.every == 0

    def _forward(
        self,
        lineage: Lineage,
        layer: int,
        staged: Record | None,
        moments: tuple[Moment, ...],
        base: int,
        *,
        cosine: bool = False,
        emit: bool = True,
        store: bool = False,
    ) -> list[ForwardDone]:
        """All shards through a layer; results in shard order."""
        activations = self._activations(lineage, base)
        replay = tuple(self._staged(before) if lineage == "compressed" else None for before in range(base, layer))
        units = [
            Forward(
                lineage=lineage,
                layer=layer,
                shard=shard,
                staged=staged,
                moments=moments,
                cosine=cosine,
                emit=emit,
                store=store,
                base=base,
                base_record=activations[shard] if activations else None,
                replay=replay,
                ahead=layer + 1 if layer + 1 < self.job.num_layers else None,
            )
            for shard in range(self.job.shards)
        ]
        return self._do(units)

    def _reduce(
        self, lineage: Lineage, layer: int, moments: Iterable[Moment], done: Sequence[ForwardDone]
    ) -> dict[str, Record]:
        """Moment key -> record of the stored sum over all shards."""
        units = [
            Reduce(lineage, layer, moment, tuple(result.partials[moment] for result in done)) for moment in moments
        ]
        return {unit.moment.key: record for unit, record in zip(units, self._do(units), strict=True)}

    def _compress(self, statistics: Mapping[int, Mapping[str, Record]], ranks: RanksOf) -> None:
        """Solves every group of some layers, then writes and enters each layer."""
        solves = [
            Solve(
                task, ranks[ranks_key(task)], {moment: statistics[layer][moment.key] for moment in task.group.moments}
            )
            for layer in statistics
            for task in self.job.tasks
            if task.group.layer == layer
        ]
        solved: dict[int, list[tuple[Solve, SolveDone]]] = {layer: [] for layer in statistics}
        for solve, solution in zip(solves, self._do(solves), strict=True):
            solved[solve.task.group.layer].append((solve, solution))
        writes = [_write_unit(layer, parts) for layer, parts in solved.items()]
        for write, staged in zip(writes, self._do(writes), strict=True):
            groups = {solve.task.group.name: _report(solve, solution) for solve, solution in solved[write.layer]}
            entry = {"staged": staged, "forms": dict(write.forms), "groups": groups}
            self._enter(f"layer/{write.layer:05d}", entry)
            self.observer.layer_done("compress", write.layer, groups)

    def _do(self, units: Sequence[Unit]) -> list[Any]:
        """Submits units and waits for all of them. Results in the order of the units."""
        results: dict[str, Any] = {}
        for unit in units:
            self.pool.submit(unit)
        while len(results) < len(units):
            unit, result = self.pool.wait()
            results[unit.key] = result
            self.observer.unit_done(unit, result)
        return [results[unit.key] for unit in units]

    # -- the journal -------------------------------------------------------------------------------------------------

    def _enter(self, key: str, record: Record) -> None:
        self.journal.commit(key, record)
        del self.repairs[""]

    def _claimed(self) -> list[int]:
        return sorted({task.group.layer for task in self.job.tasks})

    def _entry(self, key: str) -> Record:
        entry = self.journal.get(key)
        if entry is None:
            raise CorruptError(f"journal: {key} is missing or damaged although later entries build on it", key)
        return entry

    def _staged(self, layer: int) -> Record | None:
        """The committed compressed layer: its file and its forms."""
        entry = self.journal.get(f"layer/{layer:05d}")
        return {**entry["staged"], "forms": entry["forms"]} if entry else None

    def _activations(self, lineage: Lineage, layer: int) -> list[Record] | None:
        """Records of the committed inputs of a layer, by shard; None when there are none (layer 0: the embeddings)."""
        if layer == 0:
            return None
        entry = self.journal.get(f"dense/{layer - 1:05d}" if lineage == "dense" else f"activations/{layer:05d}")
        return entry.get("activations") if entry else None

    def _repair(self, error: LaminaError) -> None:
        """Takes back every entry that names the corrupt data, so that it is computed again."""
        named: list[str] = []
        path = error.path if isinstance(error, CorruptError) else ""
        if isinstance(error, CorruptError):
            named = [key for key in self._keys() if (entry := self.journal.get(key)) and _names(entry, path)]
            if not named:
                raise error
        self.repairs.update(named or [""])
        if any(self.repairs[key] > REPAIRS for key in named or [""]):
            raise error
        self.observer.repaired(str(error), named)
        for key in named:
            if any(_names(record, path) for record in (self.journal.get(key) or {}).get("activations", [])):
                self._forget_activations("dense" if key.startswith("dense/") else "compressed")
            else:
                self.journal.retract(key)

    def _forget_activations(self, lineage: Lineage) -> None:
        """All hidden states of a lineage: the ones before the newest were dropped when those were entered."""
        kind = "dense" if lineage == "dense" else "activations"
        for key in self._keys():
            entry = self.journal.get(key) if key.startswith(f"{kind}/") else None
            if entry is not None and lineage == "compressed":
                self.journal.retract(key)
            elif entry is not None and "activations" in entry:
                self.journal.commit(key, {name: value for name, value in entry.items() if name != "activations"})

    def _keys(self) -> list[str]:
        kinds = ("dense", "statistics", "activations", "layer")
        return [f"{kind}/{layer:05d}" for kind in kinds for layer in range(self.job.num_layers + 1)]


def _write_unit(layer: int, parts: Sequence[tuple[Solve, SolveDone]]) -> Write:
    forms: dict[str, Form] = {}
    for _, solution in parts:
        forms.update(solution.forms)
    roles = tuple(role for solve, _ in parts for role in solve.task.group.roles)
    return Write(layer, tuple(solution.factors for _, solution in parts), roles, forms)


def _with_text_keys(entry: Any) -> Any:
    """As JSON keeps it."""
    return {str(key): _with_text_keys(value) for key, value in entry.items()} if isinstance(entry, Mapping) else entry


def _report(solve: Solve, solution: SolveDone) -> dict[str, Any]:
    return {"method": solve.task.method, "ranks": dict(solve.ranks), **solution.report}


def _names(entry: Any, path: str) -> bool:
    """Whether a record somewhere in an entry has this path."""
    if isinstance(entry, Mapping):
        return entry.get("path") == path or any(_names(value, path) for value in entry.values())
    return isinstance(entry, list) and any(_names(value, path) for value in entry)
