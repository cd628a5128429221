"""Runs task streams: generators that yield units of work and receive their results.

A stream yields what it waits for, and receives:

- a sequence of units: their results in the same order.
- a `Task`: the return value of that task's stream.
- a `Stage` of a task: None, once the task has announced it.
- `Reached(name)`: None, at once. It announces a stage of the stream's own task.
- `UNTIL_WANTED`: None, once the main stream waits for this one, directly or indirectly.
- `NOTHING_DUE`: None, when a worker is idle again. Only background streams may yield this.

CorruptError and LostInputError of a unit or a task are raised at the stream's `yield`, after the other units of the
batch are done. Any other error ends the whole run. The scheduler has no I/O and no threads: it waits only for the pool.

The units of a batch are submitted together. Units of a background stream are submitted one at a time, to idle workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from manifests.errors import CorruptError, LostInputError
from pipeline.driver.interfaces import Observer, Pool
from pipeline.units.units import ConcurrentUnit, SolveUnit, Unit, Write

LEAVES_WORKERS_IDLE = SolveUnit | Write  # few run at a time, and they take longer than background units
BACKGROUND_DEPTH = 2  # background units per worker, when there is no other work
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
    """A point of a task's progress that other streams can wait for. It is reached when the task ends, or before."""

    task: Task[Any]
    name: str


TaskStream = Generator[Any, Any, T]
Loss = CorruptError | LostInputError


class Task(Generic[T]):
    """A stream that a scheduler runs.

    Attributes:
        background: its units are submitted only to idle workers.
        wanted: the main stream waits for it, directly or indirectly.
        waiters: the tasks that wait for it, each with the name of a stage, or "" for the outcome.
        keys: the keys of the batch of units that it waits for.
        unsubmitted: units of the batch that wait for an idle worker.
        lost: the first error of a unit of the batch.
    """

    def __init__(self, stream: TaskStream[T], background: bool = False) -> None:
        self.stream = stream
        self.background = background
        self.done = False
        self.outcome: T | None = None
        self.error: Loss | None = None
        self.wanted = False
        self.paused = False
        self.stages: set[str] = set()
        self.awaited: Task[Any] | None = None
        self.waiters: list[tuple[Task[Any], str]] = []
        self.keys: tuple[str, ...] = ()
        self.unsubmitted: deque[Unit] = deque()
        self.results: dict[str, Any] = {}
        self.lost: Loss | None = None

    def stage(self, name: str) -> Stage:
        """Return a point to wait for."""
        return Stage(self, name)


def batch(units: Sequence[Unit]) -> TaskStream[list[Any]]:
    """Run some units. Return their results, in order."""
    results: list[Any] = yield units
    return results


def gather(tasks: Iterable[Task[T]]) -> TaskStream[list[T]]:
    """Wait for some tasks. Return their outcomes, in order."""
    outcomes: list[T] = []
    for task in tasks:
        outcomes.append((yield task))
    return outcomes


class Scheduler:
    """Runs streams on a pool, and sends each result to the stream that yielded the unit.

    Attributes:
        in_flight: the submitted units, each with its task, by key.
        background: the unfinished background streams, in the order in which they were added.
        alone: only background streams are left.
    """

    def __init__(self, pool: Pool, observer: Observer) -> None:
        self.pool = pool
        self.observer = observer
        self.in_flight: dict[str, tuple[Unit, Task[Any]]] = {}
        self.live: set[Task[Any]] = set()
        self.background: list[Task[Any]] = []
        self.background_begun = False
        self.alone = False

    def run(self, stream: TaskStream[T]) -> T:
        """Run a stream, and the streams that it spawns, to the end. Return its return value.

        Raises:
            CorruptError, LostInputError: the stream did not handle the error.
            LaminaError: a unit or a stream raised it.
        """
        task = Task(stream)
        task.wanted = True
        self._start(task)
        while not task.done:
            self._next_result()
        while any(not owner.background for _, owner in self.in_flight.values()):  # their results are not awaited
            self._next_result()
        if task.error is not None:
            raise task.error
        outcome: T = task.outcome  # type: ignore[assignment]  # done without an error
        return outcome

    def spawn(self, stream: TaskStream[T]) -> Task[T]:
        """Start a concurrent stream. Its first units are submitted at once."""
        task = Task(stream)
        self._start(task)
        return task

    def spawn_background(self, stream: TaskStream[T]) -> Task[T]:
        """Add a stream that runs on idle workers. The stream with the fewest units in flight goes first, then the
        earliest.

        Workers count as idle if all units of other streams are `LEAVES_WORKERS_IDLE`, and fewer of these are computed
        than there are workers. A single worker is never idle before `run_background`. CorruptError and LostInputError
        end only this task, without an outcome. A caller that needs the outcome runs the stream again.
        """
        task = Task(stream, background=True)
        self.background.append(task)
        return task

    def run_background(self) -> None:
        """Run all background streams to the end, after all other streams. Raises the errors of `run`."""
        self.alone = True
        self._submit_background()
        while self.in_flight:
            self._next_result()
            self._submit_background()
        assert not self.background, "a background stream waits for a result that will never come"

    def cancel(self) -> None:
        """Wait for all submitted units, and end all streams except background ones, whose units are queued again."""
        self.pool.cancel_pending()
        for unit, task in reversed(self.in_flight.values()):
            if task.background and task.lost is None:
                task.unsubmitted.appendleft(unit)
        self.in_flight.clear()
        for task in self.live:
            task.stream.close()
        self.live.clear()

    def _start(self, task: Task[Any]) -> None:
        self.live.add(task)
        self._resume(task)

    # -- results -----------------------------------------------------------------------------------------------------

    def _next_result(self) -> None:
        """Wait for one unit, and resume its stream if the batch is complete."""
        self._submit_background()
        assert self.in_flight, "a stream waits for a result that will never come"
        try:
            unit, result = self.pool.wait()
        except (CorruptError, LostInputError) as error:
            if error.unit not in self.in_flight:
                raise
            _, task = self.in_flight.pop(error.unit)
            task.lost = task.lost or error
            task.unsubmitted.clear()
        else:
            _, task = self.in_flight.pop(unit.key)
            if not task.background:
                self.observer.unit_done(unit, result)
            task.results[unit.key] = result
        if not task.background and self.in_flight.keys().isdisjoint(task.keys):
            self._end_batch(task)

    def _end_batch(self, task: Task[Any]) -> None:
        keys, results, lost = task.keys, task.results, task.lost
        task.keys, task.results, task.lost = (), {}, None
        self._resume(task, None if lost or not keys else [results[key] for key in keys], lost)

    # -- background streams ------------------------------------------------------------------------------------------

    def _submit_background(self) -> None:
        """Submit background units one at a time while workers are idle, from the stream with the fewest in flight."""
        while self.background and self._has_idle_worker():
            streams = [*self.background]
            task = next(filter(self._has_unit, sorted(streams, key=self._count_in_flight)), None)
            if task is not None:
                unit = task.unsubmitted.popleft()
                self.in_flight[unit.key] = unit, task
                self.pool.submit(unit)
            elif streams == self.background:  # otherwise a stream has ended, and another may have waited for it
                break

    def _has_unit(self, task: Task[Any]) -> bool:
        """Return True if a background stream has a unit to submit. Resume the stream if its batch is done."""
        if not (task.done or task.unsubmitted or task.awaited or self._count_in_flight(task)):
            self.background_begun = True
            self._end_batch(task)
        return bool(task.unsubmitted)

    def _count_in_flight(self, task: Task[Any]) -> int:
        return sum(key in self.in_flight for key in task.keys)

    def _has_idle_worker(self) -> bool:
        background = sum(task.background for _, task in self.in_flight.values())
        if self.alone:
            return background < BACKGROUND_DEPTH * max(1, self.pool.size)
        others = [unit for unit, task in self.in_flight.values() if not task.background]
        if self.pool.size < 2 or not all(isinstance(unit, LEAVES_WORKERS_IDLE) for unit in others):
            return False
        return background + sum(not isinstance(unit, ConcurrentUnit) for unit in others) < self.pool.size

    # -- streams -----------------------------------------------------------------------------------------------------

    def _resume(self, task: Task[Any], value: Any = None, error: Loss | None = None) -> None:
        """Run a stream until it waits for something, or ends."""
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
            elif step is NOTHING_DUE:
                assert task.background, "only background streams wait for work that is not due"
                return None
            elif step is UNTIL_WANTED:
                if not task.wanted:
                    task.paused = True
                    return None
            elif step:
                return self._submit(task, step)
            else:
                value = []

    def _submit(self, task: Task[Any], units: Sequence[Unit]) -> None:
        task.keys = tuple(unit.key for unit in units)
        if task.background:
            task.unsubmitted.extend(units)
            return
        for unit in units:
            assert unit.key not in self.in_flight, f"{unit.key} is submitted already"
            self.in_flight[unit.key] = unit, task
        for unit in units:
            self.pool.submit(unit)

    def _await(self, task: Task[Any], other: Task[Any], name: str) -> None:
        other.waiters.append((task, name))
        task.awaited = other
        if task.wanted:
            self._want(other)

    def _want(self, task: Task[Any] | None) -> None:
        """Mark a task, and the tasks that it waits for, as needed by the main stream."""
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
        if task.background:
            self.background.remove(task)
        self.live.discard(task)
        waiters, task.waiters = task.waiters, []
        for waiter, stage in waiters:
            waiter.awaited = None
            self._resume(waiter, None if stage else outcome, error)
