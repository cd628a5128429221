"""Runs task streams: generators that yield units of work and receive their results.

A stream yields what it waits for, and receives:

- a sequence of units: their results, in the same order. The units are submitted together.
- a `Task`: the return value of that task's stream.
- a `Stage` of a task: None, once the task has announced it.
- `Reached(name)`: None, at once. It announces a stage of the stream's own task.
- `UNTIL_WANTED`: None, once another stream waits for this one, directly or not.
- `NOTHING_DUE`: None, later. Only background streams do (`pipeline.driver.background_pool`).

CorruptError and LostInputError of a unit, or of a task, are raised in the stream at its `yield`, when the other units
of the batch are done. Any other error ends the whole run. No I/O, no threads: the scheduler waits for the pool alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from manifests.errors import CorruptError, LostInputError
from pipeline.driver.interfaces import Observer, Pool
from pipeline.units.units import Unit

T = TypeVar("T")


class Pause(Enum):
    """Reasons for a stream to wait for something other than units."""

    UNTIL_WANTED = "until wanted"
    NOTHING_DUE = "nothing due"


UNTIL_WANTED, NOTHING_DUE = Pause.UNTIL_WANTED, Pause.NOTHING_DUE


@dataclass(frozen=True)
class Reached:
    """Announces a stage of the stream that yields it."""

    name: str


@dataclass(frozen=True)
class Stage:
    """A point in the course of a task that another stream waits for; reached at the latest when the task is done."""

    task: Task[Any]
    name: str


TaskStream = Generator[Any, Any, T]
Loss = CorruptError | LostInputError


class Task(Generic[T]):
    """A stream that a scheduler runs."""

    def __init__(self, stream: TaskStream[T]) -> None:
        self.stream = stream
        self.done = False
        self.outcome: T | None = None
        self.error: Loss | None = None
        self.wanted = False  # whether the main stream waits for it, directly or not
        self.paused = False
        self.stages: set[str] = set()
        self.awaited: Task[Any] | None = None
        self.waiters: list[tuple[Task[Any], str]] = []  # tasks, with the stage they wait for; "": the outcome
        self.keys: tuple[str, ...] = ()  # of the batch of units in hand
        self.results: dict[str, Any] = {}
        self.lost: Loss | None = None  # what a unit of the batch raised

    def stage(self, name: str) -> Stage:
        """A point to wait for."""
        return Stage(self, name)


def batch(units: Sequence[Unit]) -> TaskStream[list[Any]]:
    """Does some units. Returns their results, in order."""
    results: list[Any] = yield units
    return results


def gather(tasks: Iterable[Task[T]]) -> TaskStream[list[T]]:
    """Waits for some tasks. Returns their outcomes, in order."""
    outcomes: list[T] = []
    for task in tasks:
        outcomes.append((yield task))
    return outcomes


class Scheduler:
    """Runs streams on a pool; results return to the stream that asked for them."""

    def __init__(self, pool: Pool, observer: Observer) -> None:
        self.pool = pool
        self.observer = observer
        self.owners: dict[str, Task[Any]] = {}  # of the submitted units, by key
        self.live: set[Task[Any]] = set()

    def run(self, stream: TaskStream[T]) -> T:
        """Runs a stream to its end, and whatever it spawns. Returns what it returns.

        Raises:
            CorruptError, LostInputError: the stream did not handle it.
            LaminaError: a unit or a stream raised it.
        """
        task = self._task(stream)
        task.wanted = True
        self._resume(task)
        while not task.done:
            self._next_result()
        while self.owners:  # results that no stream waits for any more
            self._next_result()
        if task.error is not None:
            raise task.error
        outcome: T = task.outcome  # type: ignore[assignment]  # done without an error
        return outcome

    def spawn(self, stream: TaskStream[T]) -> Task[T]:
        """Starts a stream beside the one that calls this; its first units are submitted at once."""
        task = self._task(stream)
        self._resume(task)
        return task

    def cancel(self) -> None:
        """Waits for all submitted units, and ends all streams."""
        self.pool.cancel_pending()
        self.owners.clear()
        for task in self.live:
            task.stream.close()
        self.live.clear()

    def _task(self, stream: TaskStream[T]) -> Task[T]:
        task = Task(stream)
        self.live.add(task)
        return task

    def _next_result(self) -> None:
        """Waits for one unit, and resumes its stream if that was the last of the batch."""
        assert self.owners, "a stream waits for something that never comes"
        try:
            unit, result = self.pool.wait()
        except (CorruptError, LostInputError) as error:
            if error.unit not in self.owners:
                raise
            task = self.owners.pop(error.unit)
            task.lost = task.lost or error
        else:
            self.observer.unit_done(unit, result)
            task = self.owners.pop(unit.key)
            task.results[unit.key] = result
        if self.owners.keys().isdisjoint(task.keys):
            self._end_batch(task)

    def _end_batch(self, task: Task[Any]) -> None:
        keys, results, lost = task.keys, task.results, task.lost
        task.keys, task.results, task.lost = (), {}, None
        self._resume(task, None if lost else [results[key] for key in keys], lost)

    def _resume(self, task: Task[Any], value: Any = None, error: Loss | None = None) -> None:
        """Runs a stream until it waits for something, or ends."""
        while True:
            try:
                step = task.stream.throw(error) if error is not None else task.stream.send(value)
            except StopIteration as end:
                return self._end(task, end.value, None)
            except (CorruptError, LostInputError) as lost:
                return self._end(task, None, lost)
            value, error = None, None
            if isinstance(step, Task | Stage):
                other, name = (step, "") if isinstance(step, Task) else (step.task, step.name)
                if not other.done and name not in other.stages:
                    return self._await(task, other, name)
                value, error = (None, other.error) if name or other.error else (other.outcome, None)
            elif isinstance(step, Reached):
                self._reach(task, step.name)
            elif isinstance(step, Pause):
                assert step is UNTIL_WANTED, "only background streams wait for work that is not due"
                if not task.wanted:
                    task.paused = True
                    return None
            elif step:
                return self._submit(task, step)
            else:
                value = []

    def _submit(self, task: Task[Any], units: Sequence[Unit]) -> None:
        task.keys = tuple(unit.key for unit in units)
        for unit in units:
            assert unit.key not in self.owners, f"{unit.key} is submitted already"
            self.owners[unit.key] = task
        for unit in units:
            self.pool.submit(unit)

    def _await(self, task: Task[Any], other: Task[Any], name: str) -> None:
        other.waiters.append((task, name))
        task.awaited = other
        if task.wanted:
            self._want(other)

    def _want(self, task: Task[Any] | None) -> None:
        """Marks a task, and what it waits for, as needed by the main stream."""
        while task is not None and not task.wanted:
            task.wanted = True
            if task.paused:
                task.paused = False
                self._resume(task)
            task = task.awaited

    def _reach(self, task: Task[Any], name: str) -> None:
        task.stages.add(name)
        ready = [waiter for waiter, stage in task.waiters if stage == name]
        task.waiters = [(waiter, stage) for waiter, stage in task.waiters if stage != name]
        for waiter in ready:
            waiter.awaited = None
            self._resume(waiter)

    def _end(self, task: Task[Any], outcome: Any, error: Loss | None) -> None:
        task.done, task.outcome, task.error, task.awaited = True, outcome, error, None
        self.live.discard(task)
        waiters, task.waiters = task.waiters, []
        for waiter, stage in waiters:
            waiter.awaited = None
            self._resume(waiter, None if stage else outcome, error)
