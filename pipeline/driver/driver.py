"""The loop over layers: schedules units, commits their results, and resumes interrupted jobs.

No I/O and no tensors: units go to a pool, results go to a journal (`pipeline.driver.ledger_keys`). Order of durability:
a layer's statistics are entered before its factors, its factors before the hidden states that follow from them;
replaced data is dropped last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from manifests.entries import CurvesEntry, MeasuredEntry, RanksEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import LedgerKey
from pipeline.driver.backward_pass import GradientPass
from pipeline.driver.compressed_walk import CompressedWalk
from pipeline.driver.corrected_walk import CorrectedWalk
from pipeline.driver.curves import compute_curves
from pipeline.driver.dense_pass import DensePass
from pipeline.driver.dense_walk import DenseWalk
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
from pipeline.driver.layer_solving import LayerQueue, LayerSolves
from pipeline.driver.ledger_keys import LOSS_RATIOS, RANKS, curves_key, measured_key
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.driver.session import Session, layer_entry, solve_units, write_units
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.method import Task
from pipeline.methods.registry import layers_of
from pipeline.units.units import Measure


class Driver:
    """Runs the computation of a job, until every claimed layer is staged and in the journal."""

    def __init__(self, job: Job, scheduler: Scheduler, journal: Journal, cleaner: Cleaner) -> None:
        self.job = job
        self.journal = journal
        self.cleaner = cleaner
        self.observer = scheduler.observer
        self.session = Session(job, scheduler, journal, cleaner)
        self.stored = StoredStatistics(self.session)

    def run(self, *, until_ranks: bool = False) -> None:
        """Run all phases, each from its last journal entry. `until_ranks`: only those that ranks depend on.

        Corrupt data, and uncommitted data lost with a node, is recomputed; entries of corrupt data are retracted. An
        error that occurs more than `recovery.REPAIRS` times in the same place is raised.
        """
        while True:
            try:
                return self.session.scheduler.run(self._prepare() if until_ranks else self._run_phases())
            except (CorruptError, LostInputError) as error:
                self.session.scheduler.cancel()
                self.session.repairs.invalidate(error)

    def _prepare(self, with_moments: bool = True) -> Coroutine[None]:
        """Run the phases before ranks are chosen. Without `with_moments`, the dense pass sums no moments, because
        `DenseWalk` will."""
        self.stored.retain()
        with_moments = with_moments and self.job.propagate == "dense"
        gradients = GradientPass(self.session)
        if "importance" in self.job.scores or (with_moments and self.job.has_moments) or gradients.span():
            yield from DensePass(self.session, self.stored, gradients, with_moments).run()
        yield from gradients.run()
        yield from self._measure()
        yield from self._predict()

    def _run_phases(self) -> Coroutine[None]:
        in_pass = self.job.solves_in_pass()
        yield from self._prepare(with_moments=not in_pass)
        ranks = self.choose_ranks()
        if any(map(trains_independently, self.job.tasks)):
            yield from IndependentWalk(self.session, self.stored, ranks).run()
        elif any(map(needs_both_models, self.job.tasks)):
            yield from CorrectedWalk(self.session, self.stored, ranks).run()
        elif self.job.propagate == "dense" or not self.job.has_moments:
            if in_pass:
                yield from DenseWalk(self.session, self.stored, ranks).run()
            yield from self._solve_all(ranks)
        else:
            yield from CompressedWalk(self.session, self.stored, ranks).run()
        self.cleaner.retain_activations(())
        self.stored.retain()

    # -- ranks, and the results that they depend on ------------------------------------------------------------------

    def choose_ranks(self) -> RanksOf:
        """Return the ranks of all tasks, by task key. They are chosen and entered once, after `run(until_ranks=True)`.

        Raises InputError if no ranks meet the budget, and CorruptError if an entry of these phases is missing.
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
        """Solve and enter the remaining layers, several at a time."""
        pending = self.session.uncompressed()
        if not pending:
            return
        self.observer.phase("compress", len(pending), _groups(self.job.tasks, pending))

        def solves_of(layer: int) -> LayerSolves:
            """Return the units that solve and write a layer."""
            units = solve_units(self.job, layer, self.stored.of_layer(layer), ranks, self.session.hint_of)
            return LayerSolves(units, partial(write_units, layer, units))

        queue = LayerQueue(self.session, pending, solves_of)
        while queue.remaining:
            written = yield from queue.next_written()
            (record,) = written.records
            self.session.commit_layer(written.layer, layer_entry(written.layer, written.solved, record))
            self.stored.retain_only(queue.remaining)


def _groups(tasks: Sequence[Task], layers: Collection[int]) -> int:
    """Return the average number of tasks per layer, rounded, at least one."""
    return max(1, round(sum(task.layer in layers for task in tasks) / max(1, len(layers))))
