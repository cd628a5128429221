"""Coroutines: the values that they yield and receive, and their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest

from manifests.errors import CorruptError, LostInputError, WorkerError
from pipeline.driver.scheduler import UNTIL_WANTED, Coroutine, Fiber, Reached, Scheduler, batch


@dataclass(frozen=True)
class Work:
    """A unit by its key alone."""

    key: str


class FakePool:
    """Answers units in the order of submission, or in the `order` given, with their keys in capitals."""

    size = 2
    nodes = (("worker-0",),)

    def __init__(self, fails: dict[str, Exception] | None = None, last_first: bool = False) -> None:
        self.fails = fails or {}
        self.last_first = last_first
        self.queue: deque[Work] = deque()
        self.submitted: list[str] = []
        self.cancelled = 0

    def submit(self, unit: Any) -> None:
        self.submitted.append(unit.key)
        self.queue.append(unit)

    def wait(self) -> tuple[Any, Any]:
        unit = self.queue.pop() if self.last_first else self.queue.popleft()
        if error := self.fails.pop(unit.key, None):
            error.unit = unit.key  # type: ignore[attr-defined]
            raise error
        return unit, unit.key.upper()

    def cancel_pending(self) -> None:
        self.cancelled += 1
        self.queue.clear()

    def forget(self) -> None:
        raise AssertionError


class Quiet:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def unit_done(self, unit: Any, result: Any) -> None:
        self.seen.append(unit.key)

    def phase(self, name: str, layers: int, units_per_layer: int) -> None: ...
    def layer_done(self, phase: str, layer: int, summary: Any) -> None: ...
    def repaired(self, reason: str, keys: Any) -> None: ...


def scheduler(fails: dict[str, Exception] | None = None, last_first: bool = False) -> tuple[Scheduler, FakePool, Quiet]:
    pool, observer = FakePool(fails, last_first), Quiet()
    return Scheduler(pool, observer), pool, observer


def units(*keys: str) -> Any:
    return [Work(key) for key in keys]


@pytest.mark.parametrize("last_first", [False, True])
def test_results_come_in_the_order_of_the_units(last_first: bool) -> None:
    runs, _, observer = scheduler(last_first=last_first)

    def coroutine() -> Coroutine[list[str]]:
        first = yield units("a", "b", "c")
        none = yield []
        second = yield units("d")
        return [*first, *none, *second]

    assert runs.run(coroutine()) == ["A", "B", "C", "D"]
    assert sorted(observer.seen) == ["a", "b", "c", "d"]


def test_a_spawned_stream_is_submitted_at_once_and_waited_for_later() -> None:
    runs, pool, _ = scheduler()

    def coroutine() -> Coroutine[list[Any]]:
        beside: Fiber[list[Any]] = runs.spawn(batch(units("x", "y")))
        first = yield units("a")
        assert pool.submitted == ["x", "y", "a"]
        return [first, (yield beside), (yield beside)]  # a fiber that is done may be asked again

    assert runs.run(coroutine()) == [["A"], ["X", "Y"], ["X", "Y"]]


def test_a_stage_is_reached_before_the_end() -> None:
    runs, _, observer = scheduler()
    order: list[str] = []

    def staged() -> Coroutine[str]:
        yield units("a")
        yield Reached("half")
        yield units("b")
        order.append("end")
        return "outcome"

    def coroutine() -> Coroutine[str]:
        fiber = runs.spawn(staged())
        yield fiber.stage("half")
        order.append("half")
        assert observer.seen == ["a"]
        yield fiber.stage("half")  # reached already
        outcome: str = yield fiber
        yield fiber.stage("never announced")  # the end of a fiber is every stage's
        return outcome

    assert runs.run(coroutine()) == "outcome"
    assert order == ["half", "end"]


def test_a_stream_that_pauses_goes_on_when_it_is_wanted() -> None:
    """Also when it is wanted through another one that the main fiber waits for."""
    runs, pool, _ = scheduler()

    def paused() -> Coroutine[str]:
        yield units("a")
        yield UNTIL_WANTED
        yield units("late")
        return "done"

    def between(fiber: Fiber[str]) -> Coroutine[str]:
        return (yield fiber)

    def coroutine() -> Coroutine[str]:
        fiber = runs.spawn(paused())
        middle = runs.spawn(between(fiber))
        yield units("b", "c")
        assert "late" not in pool.submitted
        return (yield middle)

    assert runs.run(coroutine()) == "done"
    assert pool.submitted[-1] == "late"


@pytest.mark.parametrize("error", [LostInputError("gone", ("made",)), CorruptError("damaged", "path")])
def test_a_loss_is_raised_where_the_stream_waits(error: Exception) -> None:
    """When the rest of the batch is done."""
    runs, _, observer = scheduler({"b": error})

    def coroutine() -> Coroutine[Any]:
        with pytest.raises((LostInputError, CorruptError)) as caught:
            yield units("a", "b", "c")
        assert caught.value is error
        assert observer.seen == ["a", "c"]
        return (yield units("b"))

    assert runs.run(coroutine()) == ["B"]


def test_a_loss_of_a_spawned_stream_waits_until_it_is_asked_for() -> None:
    error = LostInputError("gone", ("made",))
    runs, _, _ = scheduler({"x": error})

    def coroutine() -> Coroutine[str]:
        fiber = runs.spawn(batch(units("x")))
        yield units("a", "b")
        with pytest.raises(LostInputError) as caught:
            yield fiber
        assert caught.value is error
        return "handled"

    assert runs.run(coroutine()) == "handled"


def test_a_loss_that_nobody_handles_ends_the_run() -> None:
    runs, pool, _ = scheduler({"b": LostInputError("gone", ())})
    with pytest.raises(LostInputError, match="gone"):
        runs.run(batch(units("a", "b")))
    runs.cancel()
    assert pool.cancelled == 1
    assert runs.run(batch(units("a", "b"))) == ["A", "B"]


def test_any_other_error_ends_the_run_at_once() -> None:
    runs, pool, _ = scheduler({"a": WorkerError("out of memory")})
    closed: list[str] = []

    def beside() -> Coroutine[None]:
        try:
            yield units("x")
        finally:
            closed.append("beside")

    def coroutine() -> Coroutine[None]:
        yield units("a")

    def both() -> Coroutine[None]:
        runs.spawn(coroutine())
        yield from beside()

    with pytest.raises(WorkerError):
        runs.run(both())
    runs.cancel()
    assert closed == ["beside"]
    assert not pool.queue


def test_what_is_left_under_way_is_waited_for() -> None:
    runs, pool, _ = scheduler()

    def coroutine() -> Coroutine[str]:
        runs.spawn(batch(units("x", "y")))
        yield units("a")
        return "done"

    assert runs.run(coroutine()) == "done"
    assert not pool.queue


def test_a_stream_that_waits_for_what_never_comes_is_a_fault() -> None:
    runs, _, _ = scheduler()

    def endless(fiber: list[Any]) -> Coroutine[Any]:
        return (yield fiber[0].stage("never"))

    def coroutine() -> Coroutine[Any]:
        fibers: list[Any] = []

        def other() -> Coroutine[None]:
            yield units("a")
            yield fibers[0]  # waits for the one that waits for it

        fiber = runs.spawn(other())
        fibers.append(runs.spawn(endless([fiber])))
        return (yield fiber)

    with pytest.raises(AssertionError, match="will never come"):
        runs.run(coroutine())
