"""Joint solves of points that differ in size alone, so that their moments are read and decomposed once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manifests.errors import Interrupted, LaminaError
from manifests.records import StagedRecord
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import RanksOf, staged_layer
from pipeline.driver.layer_solving import LayerSolves, solve_layers
from pipeline.driver.session import write_unit
from pipeline.job.worker_session import JobWorkers
from pipeline.methods.registry import layers_of
from pipeline.sweeping.points import SweptPoint
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.units.units import SizesSolved, Solve, SolveDone, SolveSizes, Write


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
            driver.prepare()
            ranks.append(driver.choose_ranks())
        first = self.drivers[0]
        layers = layers_of(first.job.tasks)
        if pending := [layer for layer in layers if self._missing(layer)]:
            first.observer.phase("compress", len(pending), len(first.job.tasks) // len(layers))
            first.session.scheduler.run(
                solve_layers(first.session, pending, lambda layer: self._solves(layer, ranks), lambda _: None)
            )

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

        def by_point(solutions: list[SizesSolved]) -> list[list[tuple[Solve, SolveDone]]]:
            """Return the solves of each point, as if it had been solved alone."""
            return [
                [
                    (Solve(unit.task, unit.sizes[place], unit.statistics), solution.sizes[place])
                    for unit, solution in zip(units, solutions, strict=True)
                ]
                for place in range(len(missing))
            ]

        def writes(solutions: list[Any]) -> list[Write]:
            solved = zip(missing, by_point(solutions), strict=True)
            return [write_unit(layer, parts, self.points[index].digest) for index, parts in solved]

        def enter(solutions: list[Any], records: list[StagedRecord]) -> None:
            for index, parts, record in zip(missing, by_point(solutions), records, strict=True):
                self.drivers[index].session.commit_layer(layer, parts, record)
            first.observer.layer_done("compress", layer, {})

        return LayerSolves(units, writes, enter)
