"""Joint solves of points that differ in size alone, so that their moments are read and decomposed once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from manifests.errors import Interrupted, LaminaError
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import RanksOf, staged_layer
from pipeline.driver.layer_solving import LayerQueue, LayerSolves, SolvedLayer
from pipeline.driver.ledger_keys import layer_key
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import layer_entry, write_unit
from pipeline.job.worker_session import JobWorkers
from pipeline.methods.registry import layers_of
from pipeline.sweeping.points import SweptPoint
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.units.units import SizesSolved, Solve, SolveSizes, Write


def stage_together(sweep: SweepContext, points: Sequence[SweptPoint], workers: JobWorkers) -> None:
    """Solve, write and commit the layers that any point of a series lacks.

    After an error, which is logged, the points solve their missing layers one by one.

    Raises:
        Interrupted: a signal came; committed layers stay.
    """
    try:
        _JointSolving(points, [workers.driver(sweep.of(point)) for point in points]).run()
    except Interrupted:
        raise
    except LaminaError as error:
        workers.pool.cancel_pending()
        sweep.job.observer.say(f"{points[0].point.series}: solved size by size, as {error}", logging.WARNING)


@dataclass(frozen=True)
class _JointSolving:
    """The points of a series and a driver for each. All drivers have the same tasks."""

    points: Sequence[SweptPoint]
    drivers: Sequence[Driver]

    def run(self) -> None:
        ranks: list[RanksOf] = []
        for driver in self.drivers:  # the first computes the curves, which all share
            driver.run(until_ranks=True)
            ranks.append(driver.choose_ranks())
        first = self.drivers[0]
        layers = layers_of(first.job.tasks)
        if pending := [layer for layer in layers if self._missing(layer)]:
            first.observer.phase("compress", len(pending), len(first.job.tasks) // len(layers))
            first.session.scheduler.run(self._solve(pending, ranks))

    def _solve(self, layers: Sequence[int], ranks: Sequence[RanksOf]) -> Coroutine[None]:
        """Solve some layers, and enter each at all points that lack it."""
        first = self.drivers[0]
        queue = LayerQueue(first.session, layers, lambda layer: self._solves(layer, ranks))
        while queue.remaining:
            layer, units, solutions, records = yield from queue.next_written()
            missing = self._missing(layer)
            for index, solved, record in zip(missing, _by_point(units, solutions), records, strict=True):
                self.drivers[index].session.enter(layer_key(layer), layer_entry(layer, solved, record))
            first.observer.layer_done("compress", layer, {})

    def _missing(self, layer: int) -> list[int]:
        """Return the indices of the points that lack a layer."""
        return [index for index, driver in enumerate(self.drivers) if staged_layer(driver.journal, layer) is None]

    def _solves(self, layer: int, ranks: Sequence[RanksOf]) -> LayerSolves:
        first, missing = self.drivers[0], self._missing(layer)
        statistics = first.stored.of_layer(layer)
        units = [
            SolveSizes(
                task,
                tuple(ranks[index][task.key] for index in missing),
                {moment: statistics[moment.key] for moment in task.moments},
                first.session.hint_of(task),
                first.job.factor_parts(task),
            )
            for task in first.job.tasks
            if task.layer == layer
        ]

        def writes(solutions: list[SizesSolved]) -> list[Write]:
            solved = zip(missing, _by_point(units, solutions), strict=True)
            return [write_unit(layer, groups, self.points[index].digest) for index, groups in solved]

        return LayerSolves(units, writes)


def _by_point(units: Sequence[SolveSizes], solutions: Sequence[SizesSolved]) -> list[SolvedLayer]:
    """Return the groups of a layer at each point, as if it had been solved alone."""
    return [
        [
            (Solve(unit.task, unit.sizes[place], unit.statistics), solution.sizes[place])
            for unit, solution in zip(units, solutions, strict=True)
        ]
        for place in range(len(units[0].sizes))
    ]
