"""The loop over layers: which units are due, in which order they are committed, where an interrupted job goes on.

No I/O and no tensors: units go to a pool, what is done goes to a journal. Order of durability: a layer's statistics are
entered before its factors, its factors before the hidden states that follow from them; replaced data is dropped last.

The journal's keys: `dense/L` the dense pass through layer L, `measured/L` what its weights tell, `ranks`,
`statistics/L` and `activations/L` of the walk, `layer/L` the compressed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manifests.errors import CorruptError, LostInputError
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
from pipeline.repair import Repairs

RanksOf = Mapping[str, Mapping[str, int]]


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
        self.repairs = Repairs(journal, job.num_layers, observer)

    def run(self) -> None:
        """Goes through the phases, each from where the journal says it was left.

        Stored data that proves corrupt is taken out of the journal and computed again, and so is what was lost with a
        node before it was committed. What goes wrong more than `repair.REPAIRS` times in the same place is raised.
        """
        while True:
            try:
                return self._run_phases()
            except (CorruptError, LostInputError) as error:
                self.pool.cancel_pending()
                self.repairs.invalidate(error)

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
        missing = [layer for layer in range(last + 1) if not self._is_measured(layer, with_moments)]
        if not missing:
            return
        base = next((layer for layer in range(missing[0], 0, -1) if self._activations("dense", layer)), 0)
        phase = "statistics" if with_moments else "importance"
        self.observer.phase(phase, len(missing), self.job.shards)
        for layer in missing:
            moments = layer_moments(self.job.tasks, layer) if with_moments else ()
            store = self._is_boundary(layer + 1) and layer < last
            emit = layer < last
            units = self._forward("dense", layer, None, moments, base, cosine=True, emit=emit, store=store)
            done, statistics = self._sum("dense", layer, moments, units)
            entry: Record = {"cosine": [result.cosine for result in done], "statistics": statistics}
            if store:
                entry["activations"] = [result.activation for result in done]
            self._enter(f"dense/{layer:05d}", entry)
            if store:
                base = layer + 1
                self.cleaner.retain_activations(tuple(entry["activations"]))
            self.observer.layer_done(phase, layer, {})
        self.cleaner.retain_activations(())

    def _is_measured(self, layer: int, with_moments: bool) -> bool:
        entry = self.journal.get(f"dense/{layer:05d}")
        wanted = layer_moments(self.job.tasks, layer) if with_moments else ()
        return entry is not None and all(moment.key in entry["statistics"] for moment in wanted)

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
        pending = [layer for layer in self._claimed() if not self._staged(layer)]
        if not pending:
            return
        first, last = pending[0], pending[-1]
        base = next((layer for layer in range(first, 0, -1) if self._activations("compressed", layer)), 0)
        self.observer.phase("walk", last + 1 - base, 2 * self.job.shards)
        for layer in range(base, last + 1):
            if layer in pending:
                self._compress({layer: self._walk_statistics(layer, base)}, ranks)
                if not self.job.keep_statistics:
                    self.cleaner.retain_statistics(())
            if layer < last and self._is_boundary(layer + 1):
                base = self._propagate(layer, base)

    def _walk_statistics(self, layer: int, base: int) -> Mapping[str, Record]:
        entered = self.journal.get(f"statistics/{layer:05d}")
        if entered is None:
            moments = layer_moments(self.job.tasks, layer)
            units = self._forward("compressed", layer, None, moments, base, emit=False) if moments else []
            entered = {"statistics": self._sum("compressed", layer, moments, units)[1]}
            self._enter(f"statistics/{layer:05d}", entered)
        statistics: dict[str, Record] = entered["statistics"]
        return statistics

    def _propagate(self, layer: int, base: int) -> int:
        """The layer's outputs, by the weights it now has, become the committed inputs of the next (returned)."""
        done = self._do(self._forward("compressed", layer, self._staged(layer), (), base, store=True))
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
    ) -> list[Unit]:
        """All shards through a layer, in shard order."""
        activations = self._activations(lineage, base)
        replay = tuple(self._staged(before) if lineage == "compressed" else None for before in range(base, layer))
        return [
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

    def _sum(
        self, lineage: Lineage, layer: int, moments: Sequence[Moment], forwards: Sequence[Unit]
    ) -> tuple[list[ForwardDone], dict[str, Record]]:
        """Does the forward units, then adds their moments: key -> record of the stored sum over all shards."""

        def reduces(done: Sequence[ForwardDone]) -> list[Unit]:
            return [
                Reduce(lineage, layer, moment, tuple(result.partials[moment] for result in done)) for moment in moments
            ]

        done, records = self._do_both(forwards, reduces)
        return done, {moment.key: record for moment, record in zip(moments, records, strict=True)}

    def _compress(self, statistics: Mapping[int, Mapping[str, Record]], ranks: RanksOf) -> None:
        """Solves every group of some layers, then writes and enters each layer."""
        solves: list[Unit] = [
            Solve(
                task, ranks[ranks_key(task)], {moment: statistics[layer][moment.key] for moment in task.group.moments}
            )
            for layer in statistics
            for task in self.job.tasks
            if task.group.layer == layer
        ]

        def parts(solutions: Sequence[SolveDone], layer: int) -> list[tuple[Solve, SolveDone]]:
            pairs = zip(solves, solutions, strict=True)
            return [(unit, done) for unit, done in pairs if isinstance(unit, Solve) and unit.task.group.layer == layer]

        solutions, staged = self._do_both(
            solves, lambda solutions: [_write_unit(layer, parts(solutions, layer)) for layer in statistics]
        )
        for layer, record in zip(statistics, staged, strict=True):
            solved = parts(solutions, layer)
            groups = {solve.task.group.name: _report(solve, solution) for solve, solution in solved}
            entry = {"staged": record, "forms": dict(_write_unit(layer, solved).forms), "groups": groups}
            self._enter(f"layer/{layer:05d}", entry)
            self.observer.layer_done("compress", layer, groups)

    def _do_both(
        self, producers: Sequence[Unit], consumers: Callable[[list[Any]], Sequence[Unit]]
    ) -> tuple[list[Any], list[Any]]:
        """Results of some units, and of those that build on them. What is lost in between is done again, no more."""
        made = self._do(producers)
        while True:
            try:
                return made, self._do(consumers(made))
            except LostInputError as error:
                lost = [place for place, unit in enumerate(producers) if unit.key in error.producers]
                if not lost:
                    raise
                self.pool.cancel_pending()
                self.repairs.invalidate(error)
                for place, result in zip(lost, self._do([producers[place] for place in lost]), strict=True):
                    made[place] = result

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
        self.repairs.progress()

    def _claimed(self) -> list[int]:
        return sorted({task.group.layer for task in self.job.tasks})

    def _entry(self, key: str) -> Record:
        entry = self.journal.get(key)
        if entry is None:
            raise CorruptError(
                f"ledger of RUN_DIR: {key} is missing or damaged although later entries build on it; was a mount lost?",
                key,
            )
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
