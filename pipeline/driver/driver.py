"""The loop over layers: schedules units, commits their results, and resumes interrupted jobs.

No I/O and no tensors: units go to a pool, results go to a journal (`pipeline.driver.ledger_keys`). Order of durability:
a layer's statistics are entered before its factors, its factors before the hidden states that follow from them;
replaced data is dropped last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from manifests.entries import CurvesEntry, MeasuredEntry, RanksEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, LedgerKey, StagedRecord
from pipeline.driver.backward_pass import GradientPass
from pipeline.driver.compressed_walk import CompressedWalk
from pipeline.driver.corrected_walk import CorrectedWalk
from pipeline.driver.curves import compute_curves
from pipeline.driver.dense_walk import DenseWalk
from pipeline.driver.forward_units import dense_entry, joined
from pipeline.driver.in_flight import LayersInFlight
from pipeline.driver.independent_walk import IndependentWalk
from pipeline.driver.interfaces import Cleaner, Journal
from pipeline.driver.job_spec import (
    Job,
    RanksOf,
    importance_from_ledger,
    needs_both_models,
    scores_from_ledger,
    trains_independently,
)
from pipeline.driver.layer_reading import LayerReading
from pipeline.driver.layer_solving import LayerSolves, solve_layers
from pipeline.driver.ledger_keys import (
    LOSS_RATIOS,
    RANKS,
    curves_key,
    dense_key,
    measured_key,
)
from pipeline.driver.reduction import LayerPass, Reductions
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.driver.session import Session, solve_units, write_units
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import layers_of
from pipeline.units.units import Forward, Measure, Solve, SolveDone


class Driver:
    """Runs the computation of a job, until every claimed layer is staged and in the journal."""

    def __init__(self, job: Job, scheduler: Scheduler, journal: Journal, cleaner: Cleaner) -> None:
        self.job = job
        self.journal = journal
        self.cleaner = cleaner
        self.observer = scheduler.observer
        self.session = Session(job, scheduler, journal, cleaner)
        self.stored = StoredStatistics(self.session)
        self.reductions = Reductions(self.session)
        self.gradients = GradientPass(self.session)
        self.has_moments = any(task.moments for task in job.tasks)

    def run(self) -> None:
        """Run all phases, each from its last journal entry.

        Corrupt data, and uncommitted data lost with a node, is recomputed; entries of corrupt data are retracted. An
        error that occurs more than `recovery.REPAIRS` times in the same place is raised.
        """
        self._repaired(self._run_phases)

    def prepare(self) -> None:
        """Run and enter the phases on which the choice of ranks depends."""
        self._repaired(self._prepare)

    def _repaired(self, phases: Callable[[], Coroutine[None]]) -> None:
        while True:
            try:
                return self.session.scheduler.run(phases())
            except (CorruptError, LostInputError) as error:
                self.session.scheduler.cancel()
                self.session.repairs.invalidate(error)

    def _prepare(self, with_moments: bool = True) -> Coroutine[None]:
        """Run the phases before ranks are chosen. Without `with_moments`, the dense pass sums no moments, because
        `DenseWalk` will."""
        self.stored.retain()
        with_moments = with_moments and self.job.propagate == "dense"
        if "importance" in self.job.scores or (with_moments and self.has_moments) or self.gradients.span():
            yield from self._dense_pass(with_moments)
        yield from self.gradients.run()
        yield from self._measure()
        yield from self._predict()

    def _run_phases(self) -> Coroutine[None]:
        in_pass = self.job.solves_in_pass()
        yield from self._prepare(with_moments=not in_pass)
        ranks = self.choose_ranks()
        if any(map(trains_independently, self.job.tasks)):
            yield from IndependentWalk(self.session, self.stored).run(ranks)
        elif any(map(needs_both_models, self.job.tasks)):
            yield from CorrectedWalk(self.session, self.stored).run(ranks)
        elif self.job.propagate == "dense" or not self.has_moments:
            if in_pass:
                yield from DenseWalk(self.session, self.stored).run(ranks)
            yield from self._solve_all(ranks)
        else:
            yield from CompressedWalk(self.session, self.stored).run(ranks)
        self.cleaner.retain_activations(())
        self.stored.retain()

    # -- the dense pass: importance, and all statistics with `propagate: dense` -------------------------------------

    def _dense_pass(self, with_moments: bool) -> Coroutine[None]:
        last = self.job.num_layers - 1
        span = self.gradients.span()
        missing = [layer for layer in range(last + 1) if not self._is_entered(layer, with_moments, layer in span)]
        if not missing:
            return
        phase, shards = "statistics" if with_moments else "importance", self.job.dense_shards()
        units = len(shards) * sum(len(self.job.parts(layer, ())) for layer in missing)
        self.observer.phase(phase, len(missing), max(1, units // len(missing)))
        passed: list[tuple[LayerPass, Mapping[str, ArrayRecord]]] = []
        in_flight = LayersInFlight(self.session, partial(self._enter_dense, phase, span, passed))
        reading = LayerReading(self.session, last)
        for layer in missing:
            moments = self.stored.missing(layer) if with_moments else ()
            weights = yield from reading.weights(layer)
            for part in self.job.parts(layer, moments):
                store = part.last and self.job.is_boundary(layer + 1) and layer < last
                units_of = partial(
                    self._dense_units, layer, part.moments, weights,
                    part=part.number, emit=layer < last, store=store, keep=part.first and layer in span, shards=shards,
                )  # fmt: skip
                yield from in_flight.run(layer, part.moments, units_of, stores=store)
        yield from in_flight.finish()
        self.cleaner.retain_activations(tuple(self.gradients.stored_inputs(span)))

    def _dense_units(
        self, layer: int, moments: tuple[Moment, ...], weights: tuple[tuple[Any, ...], tuple[Any, ...]], **options: Any
    ) -> list[Forward]:
        """Return the units of all shards, from the latest committed inputs."""
        base = self.session.forwards.last_committed("dense", layer)
        return self.session.forwards.units("dense", layer, None, moments, base, cosine=True, weights=weights, **options)

    def _enter_dense(
        self,
        phase: str,
        span: range,
        passed: list[tuple[LayerPass, Mapping[str, ArrayRecord]]],
        layer: int,
        result: LayerPass,
    ) -> Coroutine[Sequence[ArrayRecord] | None]:
        """Enter the dense pass through a layer when its last part is done.

        Return the hidden states that are still needed, or None if none can be dropped: the last committed ones, and
        those that the backward pass will need. `passed`: the earlier parts of the layer, with their moments.
        """
        passed.append((result, (yield from self.reductions.stored(result))))
        if len(passed) < len(self.job.parts(layer, ())):
            return None
        statistics = dict(self.stored.of_dense_pass(layer))
        for _, moments in passed:
            statistics |= moments
        entry = dense_entry(joined([part.done for part, _ in passed]), statistics, inputs=layer in span)
        passed.clear()
        self.session.enter(dense_key(layer), entry)
        self.observer.layer_done(phase, layer, {})
        return (*entry.activations, *self.gradients.stored_inputs(span)) if entry.activations else None

    def _is_entered(self, layer: int, with_moments: bool, with_inputs: bool) -> bool:
        entry = self.journal.get(dense_key(layer))
        if entry is None or (with_moments and self.stored.missing(layer)):
            return False
        return entry.inputs is not None or not with_inputs

    # -- ranks, and the results that they depend on ------------------------------------------------------------------

    def choose_ranks(self) -> RanksOf:
        """Return the ranks of all tasks, by task key. They are chosen and entered once, after `prepare`.

        Raises InputError if no ranks meet the budget, and CorruptError if an entry of `prepare` is missing.
        """
        entered = self.journal.get(RANKS)
        if entered is None:
            importances = importance_from_ledger(self.job, self.session.entry)
            corrected = self.journal.get(LOSS_RATIOS)
            scores = scores_from_ledger(self.job, self.session.entry, importances, corrected)
            importance = {str(layer): value for layer, value in scores.importance.items()}  # as JSON stores it
            entered = RanksEntry(ranks=self.job.allocate(scores), importance=importance)
            self.session.enter(RANKS, entered)
        return entered.ranks

    def _measure(self) -> Coroutine[None]:
        """Measure the dense weights, with one entry per layer."""
        for layers in self._batches("measure", self.job.measures, measured_key):
            units = [Measure(task) for task in self.job.measures if task.layer in layers]
            results = list(zip(units, (yield units), strict=True))
            for layer in layers:
                measured = {unit.task.key: result for unit, result in results if unit.task.layer == layer}
                self.session.enter(measured_key(layer), MeasuredEntry(measured=measured))
                self.observer.layer_done("measure", layer, {})

    def _predict(self) -> Coroutine[None]:
        """Compute curves of predicted loss, with one entry per layer."""
        for layers in self._batches("curves", self.job.predicts, curves_key):
            tasks = {task: self.stored.of_task(task) for task in self.job.predicts if task.layer in layers}
            curves = yield from compute_curves(self.session, tasks)
            for layer in layers:
                of_layer = {task.key: curve for task, curve in curves.items() if task.layer == layer}
                self.session.enter(curves_key(layer), CurvesEntry(curves=of_layer))
                self.observer.layer_done("curves", layer, {})

    def _batches(
        self, phase: str, tasks: Sequence[Task], key_of: Callable[[int], LedgerKey[Any]]
    ) -> Iterator[list[int]]:
        """Yield the layers whose tasks have no entry yet, in batches of one layer per worker. Begin a phase if there
        are any."""
        pending = [layer for layer in layers_of(tasks) if self.journal.get(key_of(layer)) is None]
        if pending:
            self.observer.phase(phase, len(pending), _groups(tasks, pending))
        while pending:
            layers, pending = self.session.batch(pending)
            yield layers

    # -- solving without a walk: without data, or from the statistics of the dense pass ------------------------------

    def _solve_all(self, ranks: RanksOf) -> Coroutine[None]:
        """Solve the remaining layers, several at a time."""
        pending = self.session.uncompressed()
        if not pending:
            return
        self.observer.phase("compress", len(pending), _groups(self.job.tasks, pending))

        def solves_of(layer: int) -> LayerSolves:
            """Return the units that solve and write a layer."""
            units = solve_units(self.job, layer, self.stored.of_layer(layer), ranks, self.session.hint_of)
            return LayerSolves(units, partial(write_units, layer, units), partial(self._enter_solved, layer, units))

        yield from solve_layers(self.session, pending, solves_of, self.stored.retain_only)

    def _enter_solved(
        self, layer: int, solves: Sequence[Solve], solutions: list[SolveDone], records: list[StagedRecord]
    ) -> None:
        (record,) = records
        self.session.enter_layer(layer, list(zip(solves, solutions, strict=True)), record)


def _groups(tasks: Sequence[Task], layers: Collection[int]) -> int:
    """Return the average number of tasks per layer, rounded, at least one."""
    return max(1, round(sum(task.layer in layers for task in tasks) / max(1, len(layers))))
