"""Points that differ in size alone, solved together: what their solves share is read and computed once."""

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
from pipeline.driver.ledger_keys import layer_key
from pipeline.driver.session import layer_entry, write_unit
from pipeline.job.worker_session import JobWorkers
from pipeline.methods.registry import layers_of
from pipeline.sweeping.points import SweptPoint
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.units.units import SizesSolved, Solve, SolveDone, SolveSizes, Write


def stage_together(sweep: SweepContext, points: Sequence[SweptPoint], workers: JobWorkers) -> None:
    """Solves, writes and enters the layers that any of the points misses. They are those of one series.

    What goes wrong is said, and left to the points: each makes what it misses, and fails by name if it must. Raises
    Interrupted when a signal came; what is entered stays.
    """
    job = sweep.job
    try:
        _Together(points, [workers.driver(sweep.of(point)) for point in points]).run()
    except Interrupted:
        raise
    except LaminaError as error:
        workers.pool.cancel_pending()
        job.observer.say(f"{points[0].point.series}: solved size by size, as {error}", logging.WARNING)


@dataclass(frozen=True)
class _Together:
    """Drivers of points that have the same tasks, by point."""

    points: Sequence[SweptPoint]
    drivers: Sequence[Driver]

    def run(self) -> None:
        ranks: list[RanksOf] = []
        for driver in self.drivers:  # the first takes the curves, which are the others' too
            driver.prepare()
            ranks.append(driver.choose_ranks())
        tasks = self.drivers[0].job.tasks
        pending = [layer for layer in layers_of(tasks) if self._missing(layer)]
        if pending:
            first = self.drivers[0]
            first.observer.phase("compress", len(pending), len(tasks) // len(layers_of(tasks)))
            first.session.scheduler.run(
                solve_layers(first.session, pending, lambda layer: self._solves(layer, ranks), lambda _: None)
            )

    def _missing(self, layer: int) -> list[int]:
        """The places of the points that have not got it."""
        return [place for place, driver in enumerate(self.drivers) if staged_layer(driver.journal, layer) is None]

    def _solves(self, layer: int, ranks: Sequence[RanksOf]) -> LayerSolves:
        places, tasks = self._missing(layer), [task for task in self.drivers[0].job.tasks if task.layer == layer]
        found = self.drivers[0].layer_statistics(layer)
        units = [
            SolveSizes(
                task,
                tuple(ranks[place][task.key] for place in places),
                {moment: found[moment.key] for moment in task.moments},
                self.drivers[0].told(task),
            )
            for task in tasks
        ]

        def solved(solutions: list[SizesSolved], at: int) -> list[tuple[Solve, SolveDone]]:
            """Of the point at one of `places`, as if it had been solved by itself."""
            return [
                (Solve(unit.task, unit.sizes[at], unit.statistics), found.sizes[at])
                for unit, found in zip(units, solutions, strict=True)
            ]

        def writes(solutions: list[Any]) -> list[Write]:
            return [
                write_unit(layer, solved(solutions, at), self.points[place].digest) for at, place in enumerate(places)
            ]

        def enter(solutions: list[Any], records: list[StagedRecord]) -> None:
            for at, (place, record) in enumerate(zip(places, records, strict=True)):
                entry = layer_entry(layer, solved(solutions, at), record)
                self.drivers[place].session.enter(layer_key(layer), entry)
            self.drivers[0].observer.layer_done("compress", layer, {})

        return LayerSolves(units, writes, enter)
