"""The loop over layers: which units are due, in which order they are committed, where an interrupted job goes on.

No I/O and no tensors: units go to a pool, results go to a journal (`pipeline.driver.ledger_keys`). Order of durability:
a layer's statistics are entered before its factors, its factors before the hidden states that follow from them;
replaced data is dropped last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from manifests.entries import (
    CurvesEntry,
    MeasuredEntry,
    RanksEntry,
)
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, StagedRecord
from pipeline.driver.backward_pass import GradientPass
from pipeline.driver.compressed_walk import CompressedWalk
from pipeline.driver.corrected_walk import CorrectedWalk
from pipeline.driver.curves import take_curves
from pipeline.driver.dense_walk import DenseWalk
from pipeline.driver.forward_pass import ForwardPass, dense_entry
from pipeline.driver.in_flight import UnderWay
from pipeline.driver.interfaces import Cleaner, Journal, Observer, Pool
from pipeline.driver.job_spec import Job, RanksOf, entered_importance, entered_scores, staged_layer
from pipeline.driver.layer_reading import LayerReading
from pipeline.driver.layer_solving import LayerSolves, solve_layers
from pipeline.driver.ledger_keys import (
    RANKS,
    curves_key,
    dense_key,
    gradient_key,
    layer_key,
    measured_key,
    statistics_key,
)
from pipeline.driver.recovery import Repairs, computed_keys
from pipeline.driver.reduction import Summing, Taken
from pipeline.driver.scheduler import Steps, solve_units, write_units
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import layer_gradients, layer_moments, layers_of
from pipeline.units.units import Forward, Measure, Solve, SolveDone


class Driver:
    """Runs a job's computation to its end: afterwards every claimed layer is staged and entered in the journal."""

    def __init__(self, job: Job, pool: Pool, journal: Journal, cleaner: Cleaner, observer: Observer) -> None:
        self.job = job
        self.pool = pool
        self.journal = journal
        self.cleaner = cleaner
        self.observer = observer
        self.repairs = Repairs(journal, computed_keys(job.num_layers), observer)
        self.steps = Steps(pool, journal, observer, self.repairs)
        self.summing = Summing(self.steps)
        self.gradients = GradientPass(job, self.steps, cleaner)
        self.forwards = ForwardPass(job, journal)

    def run(self) -> None:
        """Goes through the phases, each from where the journal says it was left.

        Stored data that proves corrupt is taken out of the journal and computed again, and so is what was lost with a
        node before it was committed. What goes wrong more than `repair.REPAIRS` times in the same place is raised.
        """
        self._repaired(self._run_phases)

    def prepare(self) -> None:
        """Goes through the phases before ranks are chosen: afterwards all that they follow is in the journal."""
        self._repaired(self._prepare)

    def _repaired(self, phases: Callable[[], None]) -> None:
        while True:
            try:
                return phases()
            except (CorruptError, LostInputError) as error:
                self.steps.cancel()
                self.repairs.invalidate(error)

    def _prepare(self, with_moments: bool = True) -> None:
        """Without `with_moments`, no moments of the dense model are taken: its layers are solved in that pass."""
        self._retain_statistics()
        with_moments = with_moments and self.job.propagate == "dense"
        has_moments = any(task.moments for task in self.job.tasks)
        if "importance" in self.job.scores or (with_moments and has_moments) or self.gradients.span():
            self._dense_pass(with_moments)
        self.gradients.run()
        if self.job.measures:
            self._measure()
        if self.job.predicts:
            self._predict()

    def _run_phases(self) -> None:
        in_pass = self.job.solves_in_pass()
        self._prepare(with_moments=not in_pass)
        dense = self.job.propagate == "dense"
        has_moments = any(task.moments for task in self.job.tasks)
        ranks = self.choose_ranks()
        if any(task.corrections for task in self.job.tasks):
            statistics, retain = self._statistics_of, self._retain_statistics
            CorrectedWalk(self.job, self.steps, self.summing, self.cleaner, statistics, self.told, retain).run(ranks)
        elif dense or not has_moments:
            if in_pass:
                DenseWalk(self.job, self.steps, self.cleaner, self.summing, self._retain_statistics).run(ranks)
            self._solve_all(ranks)
        else:
            CompressedWalk(self.job, self.steps, self.cleaner, self.summing, self._gradient_statistics).run(ranks)
        self.cleaner.retain_activations(())
        self._retain_statistics()

    def _retain_statistics(self, besides: Iterable[ArrayRecord] = ()) -> None:
        """Drops the moments that no entry names, as an interruption leaves them, but those `besides`, and those of
        finished layers."""
        live = [*besides]
        for layer in range(self.job.num_layers):
            if self.job.keep_statistics or self.journal.get(layer_key(layer)) is None:
                for entry in (
                    self.journal.get(dense_key(layer)),
                    self.journal.get(gradient_key(layer)),
                    self.journal.get(statistics_key(layer)),
                ):
                    live += entry.statistics.values() if entry else ()
        self.cleaner.retain_statistics(tuple(live))

    # -- the dense pass: importance, and with propagate: dense every statistic --------------------------------------

    def _dense_pass(self, with_moments: bool) -> None:
        last = self.job.num_layers - 1
        span = self.gradients.span()  # the layers whose inputs the backward pass will need
        missing = [layer for layer in range(last + 1) if not self._is_measured(layer, with_moments, layer in span)]
        if not missing:
            return
        phase, shards = "statistics" if with_moments else "importance", self.job.dense_shards()
        self.observer.phase(phase, len(missing), len(shards))
        under_way = UnderWay(self.summing, self.cleaner, partial(self._enter_dense, phase, span))
        reading = LayerReading(self.steps, last)
        for layer in missing:
            wanted = layer_moments(self.job.tasks, layer) if with_moments else ()
            moments = tuple(moment for moment in wanted if moment.key not in self._dense_found(layer))
            store = self.job.is_boundary(layer + 1) and layer < last
            units = partial(
                self._dense_units, layer, moments, reading.weights(layer),
                emit=layer < last, store=store, keep=layer in span, shards=shards,
            )  # fmt: skip
            under_way.take(layer, moments, units, stores=store)
        under_way.finish()
        self.cleaner.retain_activations(tuple(self.gradients.stored_inputs(span)))

    def _dense_units(
        self, layer: int, moments: tuple[Moment, ...], weights: tuple[tuple[Any, ...], tuple[Any, ...]], **asked: Any
    ) -> list[Forward]:
        """From the inputs that are entered by now."""
        base = self.forwards.last_committed("dense", layer)
        return self.forwards.units("dense", layer, None, moments, base, cosine=True, weights=weights, **asked)

    def _dense_found(self, layer: int) -> Mapping[str, ArrayRecord]:
        entry = self.journal.get(dense_key(layer))
        return entry.statistics if entry else {}

    def _enter_dense(self, phase: str, span: range, layer: int, taken: Taken) -> Sequence[ArrayRecord] | None:
        """The hidden states that are needed from there on, if others than before: what entered the last layer of which
        they are committed, and what the backward pass will need."""
        statistics = {**self._dense_found(layer), **self.summing.stored(taken)}
        entry = dense_entry(taken.done, statistics, inputs=layer in span)
        self.steps.enter(dense_key(layer), entry)
        self.observer.layer_done(phase, layer, {})
        return (*entry.activations, *self.gradients.stored_inputs(span)) if entry.activations else None

    def _is_measured(self, layer: int, with_moments: bool, with_inputs: bool) -> bool:
        entry = self.journal.get(dense_key(layer))
        wanted = layer_moments(self.job.tasks, layer) if with_moments else ()
        if entry is None or not all(moment.key in entry.statistics for moment in wanted):
            return False
        return entry.inputs is not None or not with_inputs

    # -- ranks, and what they follow ---------------------------------------------------------------------------------

    def choose_ranks(self) -> RanksOf:
        """Of every task, entered once; behind `prepare`."""
        entered = self.journal.get(RANKS)
        if entered is None:
            scores = entered_scores(self.job, self.steps.entry, entered_importance(self.job, self.steps.entry))
            importance = {str(layer): value for layer, value in scores.importance.items()}  # as JSON keeps it
            entered = RanksEntry(ranks=self.job.allocate(scores), importance=importance)
            self.steps.enter(RANKS, entered)
        return entered.ranks

    def _measure(self) -> None:
        """What the dense weights tell, a batch of layers at a time; one entry for each layer."""
        pending = [layer for layer in layers_of(self.job.measures) if self.journal.get(measured_key(layer)) is None]
        if not pending:
            return
        self.observer.phase("measure", len(pending), _groups(self.job.measures, pending))
        while pending:
            batch, pending = self.steps.batch(pending)
            units = [Measure(task) for task in self.job.measures if task.layer in batch]
            for layer, found in self._found(batch, units).items():
                self.steps.enter(measured_key(layer), MeasuredEntry(measured=found))
                self.observer.layer_done("measure", layer, {})

    def _predict(self) -> None:
        """What each size of a group costs the loss, a batch of layers at a time; one entry for each layer."""
        pending = [layer for layer in layers_of(self.job.predicts) if self.journal.get(curves_key(layer)) is None]
        if not pending:
            return
        self.observer.phase("curves", len(pending), _groups(self.job.predicts, pending))
        while pending:
            batch, pending = self.steps.batch(pending)
            tasks = {task: self._statistics_of(task) for task in self.job.predicts if task.layer in batch}
            curves = take_curves(self.steps, tasks)
            for layer in batch:
                found = {task.key: curve for task, curve in curves.items() if task.layer == layer}
                self.steps.enter(curves_key(layer), CurvesEntry(curves=found))
                self.observer.layer_done("curves", layer, {})

    def _found(self, layers: list[int], units: Sequence[Measure]) -> dict[int, dict[str, Any]]:
        """What some units give, by layer and `Task.key`."""
        results = list(zip(units, self.steps.do(units), strict=True))
        return {
            layer: {unit.task.key: found for unit, found in results if unit.task.layer == layer} for layer in layers
        }

    # -- solving without a walk: data-free, or from the statistics of the dense pass ---------------------------------

    def _solve_all(self, ranks: RanksOf) -> None:
        """Layer after layer."""
        pending = [layer for layer in layers_of(self.job.tasks) if not staged_layer(self.journal, layer)]
        if not pending:
            return
        self.observer.phase("compress", len(pending), _groups(self.job.tasks, pending))

        def solves_of(layer: int) -> LayerSolves:
            units = solve_units(self.job.tasks, layer, self.layer_statistics(layer), ranks, self.told)
            return LayerSolves(units, partial(write_units, layer, units), partial(self._enter_solved, layer, units))

        solve_layers(self.steps, pending, solves_of, self._release_statistics)

    def _enter_solved(
        self, layer: int, solves: Sequence[Solve], solutions: list[SolveDone], records: list[StagedRecord]
    ) -> None:
        (record,) = records
        self.steps.enter_layer(layer, list(zip(solves, solutions, strict=True)), record)

    def _release_statistics(self, left: Sequence[int]) -> None:
        """Drops those of layers that are done, unless they are kept."""
        if not self.job.keep_statistics:
            live = [self.layer_statistics(layer) for layer in left]
            self.cleaner.retain_statistics(tuple(record for found in live for record in found.values()))

    def layer_statistics(self, layer: int) -> Mapping[str, ArrayRecord]:
        """The moments of a layer that the dense pass and the backward pass have entered, by key."""
        values = self.steps.entry(dense_key(layer)).statistics if layer_moments(self.job.tasks, layer) else {}
        return {**values, **self._gradient_statistics(layer)}

    def _gradient_statistics(self, layer: int) -> Mapping[str, ArrayRecord]:
        if not layer_gradients(self.job.tasks, layer):
            return {}
        return self.steps.entry(gradient_key(layer)).statistics

    def told(self, task: Task) -> str:
        """What the task's curve told besides; nothing where it has none."""
        entered = self.journal.get(curves_key(task.layer))
        curve = entered.curves.get(task.key) if entered else None
        return curve.told if curve else ""

    def _statistics_of(self, task: Task) -> dict[Moment, ArrayRecord]:
        entered = self.layer_statistics(task.layer)
        return {moment: entered[moment.key] for moment in task.moments}


def _groups(tasks: Sequence[Task], layers: Collection[int]) -> int:
    """How many of the tasks are of one of these layers, on average."""
    return max(1, round(sum(task.layer in layers for task in tasks) / max(1, len(layers))))
