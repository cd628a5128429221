"""The stored moments of a job's layers: those of both passes, missing ones, and leftovers of an interruption."""

from __future__ import annotations

import pytest

from manifests.errors import CorruptError
from pipeline.driver.scheduler import Scheduler
from pipeline.driver.session import Session
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.registry import tasks_by_layer
from tests.driver.simulation import JOBS, MemoryJournal, Recorder, SimulatedPool, World, WorldCleaner, run


def stored(name: str, world: World) -> StoredStatistics:
    scheduler = Scheduler(SimulatedPool(world), Recorder(world))
    return StoredStatistics(Session(JOBS[name](), scheduler, MemoryJournal(world), WorldCleaner(world)))


@pytest.mark.parametrize("name", ["dense", "gradient", "gradient-some"])
def test_each_task_finds_its_moments(name: str) -> None:
    job = JOBS[name]()
    world, _ = run(job)
    statistics = stored(name, world)
    for task in job.tasks:
        assert {*statistics.of_task(task)} == {*task.moments}
    for layer in range(job.num_layers):
        both = {moment.key for task in job.tasks if task.layer == layer for moment in task.moments}
        assert statistics.of_layer(layer).keys() == both
        assert statistics.missing(layer) == ()


def test_before_the_pass_all_are_missing() -> None:
    job, statistics = JOBS["gradient"](), stored("gradient", World())
    for layer in range(job.num_layers):
        assert statistics.of_dense_pass(layer) == {}
        assert statistics.missing(layer) == tasks_by_layer(job.tasks)[layer].moments
        with pytest.raises(CorruptError, match="is missing or damaged"):
            statistics.of_layer(layer)
