"""What a pool's metrics are told of a job."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipeline.job.heartbeat import Heartbeat
from stores.run_directory import RunDirectory


class Pool:
    size = wanted = 1

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def busy(self) -> dict[str, str]:
        return {}

    def resize(self, workers: int) -> None:
        self.wanted = workers

    def show(self, phase: str, done: int, units: int) -> None:
        self.told.append((phase, done, units))


@pytest.mark.parametrize("fails", [False, True])
def test_a_phase_between_two_beats_is_told_of_at_its_end(tmp_path: Path, fails: bool) -> None:
    pool, state = Pool(), {"phase": "statistics", "done": 1, "of": 4}
    heartbeat = Heartbeat((), RunDirectory(tmp_path), threading.Event(), lambda: state)
    try:
        with heartbeat.attending(pool):
            assert not pool.told
            state = {"phase": "compress", "done": 4, "of": 4}
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert pool.told == [("compress", 4, 4)]
    assert heartbeat.pool is None
