"""Which processes go on after those of a training have ended, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from manifests.errors import WorkerError
from manifests.schema import Workers
from workers import training

NODE = "a" * 56
NO_ROOM, LOST = ControllerError(WorkerGroupStartupTimeoutError(2)), ControllerError(WorkerGroupStartupFailedError("x"))
ENDED = WorkerGroupError("processes ended", {1: RuntimeError("killed")})
Train = Callable[..., tuple[list[int], list[str]]]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return `train(*ends, room)`, which trains in two processes whose attempts end so, and returns the numbers of
    processes of the attempts, and what was said."""

    def run(*ends: Exception | None, room: int = 2) -> tuple[list[int], list[str]]:
        begun, said, over, left = list[int](), list[str](), list[bool](), [*ends]

        def attempt(task: Any, journal: Any, processes: int, *_: Any) -> Exception | None:
            begun.append(processes)
            return left.pop(0)

        mailbox = SimpleNamespace(end=SimpleNamespace(remote=lambda: over.append(True)))
        places = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: mailbox))
        monkeypatch.setattr(training, "Mailbox", places)
        monkeypatch.setattr(training.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE))
        monkeypatch.setattr(training, "whole_room", lambda _: room)
        monkeypatch.setattr(training, "_train", attempt)
        monkeypatch.setenv(training.START_TIMEOUT, "1")
        journal: Any = SimpleNamespace(last=lambda: None, say=said.append)
        task: Any = None
        try:
            training.train_in_processes(task, journal, 2, Workers(max=2))
        finally:
            assert over == [True]
        return begun, said

    return run


def test_as_many_as_have_room_go_on(train: Train) -> None:
    begun, (said,) = train(NO_ROOM, None, room=1)
    assert begun == [2, 1]
    assert said == "heal: 2 processes did not start; the cluster has room for 1, which go on"
    assert train(None) == ([2], [])


def test_a_node_that_dies_while_they_start_costs_a_try(train: Train) -> None:
    assert train(LOST, LOST, LOST, None)[0] == [2, 2, 2, 2]
    with pytest.raises(WorkerError, match="did not start"):
        train(LOST, LOST, LOST, LOST)


def test_no_room_ends_the_job(train: Train) -> None:
    with pytest.raises(WorkerError, match=r"2 processes .* did not start \(.*\); waited 600 s \(workers.start_timeout"):
        train(NO_ROOM)
    with pytest.raises(WorkerError, match="1 processes"):
        train(NO_ROOM, NO_ROOM, room=1)


def test_processes_that_are_lost_again_and_again_end_the_job(train: Train) -> None:
    with pytest.raises(WorkerError, match=r"ended 4 times \(process 1: killed\)"):
        train(ENDED, room=1)
