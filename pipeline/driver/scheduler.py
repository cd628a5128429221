"""Runs coroutines: generators that yield units of work and receive their results. A *fiber* is a coroutine that the
scheduler runs.

A coroutine yields what it waits for, and receives:

- a sequence of units: their results in the same order.
- a `Fiber`: the return value of that fiber's coroutine.
- a `Stage` of a fiber: None, once the fiber has announced it.
- `Reached(name)`: None, at once. It announces a stage of the coroutine's own fiber.
- `UNTIL_WANTED`: None, once the main fiber waits for this one, directly or indirectly.
- `NOTHING_DUE`: None, when a worker is idle again. Only background fibers may yield this.

CorruptError and LostInputError of a unit or a fiber are raised at the coroutine's `yield`, after the other units of the
batch are done. Any other error ends the whole run. The scheduler has no I/O and no threads: it waits only for the pool.

The units of a batch are submitted together. Units of a background fiber are submitted one at a time, to idle workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from manifests.errors import CorruptError, LostInputError
from pipeline.driver.interfaces import Observer, Pool
from pipeline.units.units import ConcurrentUnit, SolveUnit, Unit, Write

LEAVES_WORKERS_IDLE = SolveUnit | Write  # few run at a time, and they take longer than background units
BACKGROUND_DEPTH = 2  # background units per worker, when there is no other work
T = TypeVar("T")


class Waiting(Enum):
    """Reasons for a coroutine to wait for something other than units."""

    UNTIL_WANTED = "until wanted"
    NOTHING_DUE = "nothing due"


UNTIL_WANTED, NOTHING_DUE = Waiting.UNTIL_WANTED, Waiting.NOTHING_DUE


@dataclass(frozen=True)
class Reached:
    """Announces a stage of the coroutine that yields it."""

    name: str


@dataclass(frozen=True)
class Stage:
    """A point of a fiber's progress that other fibers can wait for. It is reached when the fiber ends, or before."""

    fiber: Fiber[Any]
    name: str


Coroutine = Generator[Any, Any, T]
Loss = CorruptError | LostInputError


class Fiber(Generic[T]):
    """A coroutine that a scheduler runs.

    Attributes:
        background: its units are submitted only to idle workers.
        wanted: the main fiber waits for it, directly or indirectly.
        waiters: the fibers that wait for it, each with the name of a stage, or "" for the outcome.
        keys: the keys of the batch of units that it waits for.
        unsubmitted: units of the batch that wait for an idle worker.
        lost: the first error of a unit of the batch.
    """

    def __init__(self, coroutine: Coroutine[T], background: bool = False) -> None:
        self.coroutine = coroutine
        self.background = background
        self.done = False
        self.outcome: T | None = None
        self.error: Loss | None = None
        self.wanted = False
        self.paused = False
        self.stages: set[str] = set()
        self.awaited: Fiber[Any] | None = None
        self.waiters: list[tuple[Fiber[Any], str]] = []
        self.keys: tuple[str, ...] = ()
        self.unsubmitted: deque[Unit] = deque()
        self.results: dict[str, Any] = {}
        self.lost: Loss | None = None

    def stage(self, name: str) -> Stage:
        """Return a point to wait for."""
        return Stage(self, name)


def batch(units: Sequence[Unit]) -> Coroutine[list[Any]]:
    """Run some units. Return their results, in order."""
    results: list[Any] = yield units
    return results


class Scheduler:
    """Runs coroutines on a pool, and sends each result to the one that yielded the unit.

    Attributes:
        in_flight: the submitted units, each with its fiber, by key.
        background: the unfinished background fibers, in the order in which they were added.
        alone: only background fibers are left.
    """

    def __init__(self, pool: Pool, observer: Observer) -> None:
        self.pool = pool
        self.observer = observer
        self.in_flight: dict[str, tuple[Unit, Fiber[Any]]] = {}
        self.live: set[Fiber[Any]] = set()
        self.background: list[Fiber[Any]] = []
        self.background_begun = False
        self.alone = False

    def run(self, coroutine: Coroutine[T]) -> T:
        """Run a coroutine, and the fibers that it spawns, to the end. Return its return value.

        Raises:
            CorruptError, LostInputError: the coroutine did not handle the error.
            LaminaError: a unit or a coroutine raised it.
        """
        fiber = Fiber(coroutine)
        fiber.wanted = True
        self._start(fiber)
        while not fiber.done:
            self._next_result()
        while any(not owner.background for _, owner in self.in_flight.values()):  # their results are not awaited
            self._next_result()
        if fiber.error is not None:
            raise fiber.error
        outcome: T = fiber.outcome  # type: ignore[assignment]  # done without an error
        return outcome

    def spawn(self, coroutine: Coroutine[T]) -> Fiber[T]:
        """Start a concurrent fiber. Its first units are submitted at once."""
        fiber = Fiber(coroutine)
        self._start(fiber)
        return fiber

    def spawn_background(self, coroutine: Coroutine[T]) -> Fiber[T]:
        """Add a fiber that runs on idle workers. The fiber with the fewest units in flight goes first, then the
        earliest.

        Workers count as idle if all units of other fibers are `LEAVES_WORKERS_IDLE`, and fewer of these are computed
        than there are workers. A single worker is never idle before `run_background`. CorruptError and LostInputError
        end only this fiber, without an outcome. A caller that needs the outcome runs the coroutine again.
        """
        fiber = Fiber(coroutine, background=True)
        self.background.append(fiber)
        return fiber

    def run_background(self) -> None:
        """Run all background fibers to the end, after all others. Raises the errors of `run`."""
        self.alone = True
        self._submit_background()
        while self.in_flight:
            self._next_result()
            self._submit_background()
        assert not self.background, "a background fiber waits for a result that will never come"

    def cancel(self) -> None:
        """Wait for all submitted units, and end all fibers except background ones, whose units are queued again."""
        self.pool.cancel_pending()
        for unit, fiber in reversed(self.in_flight.values()):
            if fiber.background and fiber.lost is None:
                fiber.unsubmitted.appendleft(unit)
        self.in_flight.clear()
        for fiber in self.live:
            fiber.coroutine.close()
        self.live.clear()

    def _start(self, fiber: Fiber[Any]) -> None:
        self.live.add(fiber)
        self._resume(fiber)

    # -- results -----------------------------------------------------------------------------------------------------

    def _next_result(self) -> None:
        """Wait for one unit, and resume its fiber if the batch is complete."""
        self._submit_background()
        assert self.in_flight, "a fiber waits for a result that will never come"
        try:
            unit, result = self.pool.wait()
        except (CorruptError, LostInputError) as error:
            if error.unit not in self.in_flight:
                raise
            _, fiber = self.in_flight.pop(error.unit)
            fiber.lost = fiber.lost or error
            fiber.unsubmitted.clear()
        else:
            _, fiber = self.in_flight.pop(unit.key)
            if not fiber.background:
                self.observer.unit_done(unit, result)
            fiber.results[unit.key] = result
        if not fiber.background and self.in_flight.keys().isdisjoint(fiber.keys):
            self._end_batch(fiber)

    def _end_batch(self, fiber: Fiber[Any]) -> None:
        keys, results, lost = fiber.keys, fiber.results, fiber.lost
        fiber.keys, fiber.results, fiber.lost = (), {}, None
        self._resume(fiber, None if lost or not keys else [results[key] for key in keys], lost)

    # -- background fibers -------------------------------------------------------------------------------------------

    def _submit_background(self) -> None:
        """Submit background units one at a time while workers are idle, from the fiber with the fewest in flight."""
        while self.background and self._has_idle_worker():
            fibers = [*self.background]
            fiber = next(filter(self._has_unit, sorted(fibers, key=self._count_in_flight)), None)
            if fiber is not None:
                unit = fiber.unsubmitted.popleft()
                self.in_flight[unit.key] = unit, fiber
                self.pool.submit(unit)
            elif fibers == self.background:  # otherwise a fiber has ended, and another may have waited for it
                break

    def _has_unit(self, fiber: Fiber[Any]) -> bool:
        """Return True if a background fiber has a unit to submit. Resume the fiber if its batch is done."""
        if not (fiber.done or fiber.unsubmitted or fiber.awaited or self._count_in_flight(fiber)):
            self.background_begun = True
            self._end_batch(fiber)
        return bool(fiber.unsubmitted)

    def _count_in_flight(self, fiber: Fiber[Any]) -> int:
        return sum(key in self.in_flight for key in fiber.keys)

    def _has_idle_worker(self) -> bool:
        background = sum(fiber.background for _, fiber in self.in_flight.values())
        if self.alone:
            return background < BACKGROUND_DEPTH * max(1, self.pool.size)
        others = [unit for unit, fiber in self.in_flight.values() if not fiber.background]
        if self.pool.size < 2 or not all(isinstance(unit, LEAVES_WORKERS_IDLE) for unit in others):
            return False
        return background + sum(not isinstance(unit, ConcurrentUnit) for unit in others) < self.pool.size

    # -- fibers ------------------------------------------------------------------------------------------------------

    def _resume(self, fiber: Fiber[Any], value: Any = None, error: Loss | None = None) -> None:
        """Run a fiber until it waits for something, or ends."""
        while True:
            try:
                step = fiber.coroutine.throw(error) if error is not None else fiber.coroutine.send(value)
            except StopIteration as end:
                return self._end(fiber, end.value, None)
            except (CorruptError, LostInputError) as lost:
                return self._end(fiber, None, lost)
            value, error = None, None
            if isinstance(step, Fiber | Stage):
                other, name = (step, "") if isinstance(step, Fiber) else (step.fiber, step.name)
                if not other.done and name not in other.stages:
                    return self._await(fiber, other, name)
                value, error = (None, other.error) if name or other.error else (other.outcome, None)
            elif isinstance(step, Reached):
                self._reach(fiber, step.name)
            elif step is NOTHING_DUE:
                assert fiber.background, "only background fibers wait for work that is not due"
                return None
            elif step is UNTIL_WANTED:
                if not fiber.wanted:
                    fiber.paused = True
                    return None
            elif step:
                return self._submit(fiber, step)
            else:
                value = []

    def _submit(self, fiber: Fiber[Any], units: Sequence[Unit]) -> None:
        fiber.keys = tuple(unit.key for unit in units)
        if fiber.background:
            fiber.unsubmitted.extend(units)
            return
        for unit in units:
            assert unit.key not in self.in_flight, f"{unit.key} is submitted already"
            self.in_flight[unit.key] = unit, fiber
        for unit in units:
            self.pool.submit(unit)

    def _await(self, fiber: Fiber[Any], other: Fiber[Any], name: str) -> None:
        other.waiters.append((fiber, name))
        fiber.awaited = other
        if fiber.wanted:
            self._want(other)

    def _want(self, fiber: Fiber[Any] | None) -> None:
        """Mark a fiber, and the fibers that it waits for, as needed by the main fiber."""
        while fiber is not None and not fiber.wanted:
            fiber.wanted = True
            if fiber.paused:
                fiber.paused = False
                self._resume(fiber)
            fiber = fiber.awaited

    def _reach(self, fiber: Fiber[Any], name: str) -> None:
        fiber.stages.add(name)
        ready = [waiter for waiter, stage in fiber.waiters if stage == name]
        fiber.waiters = [(waiter, stage) for waiter, stage in fiber.waiters if stage != name]
        for waiter in ready:
            waiter.awaited = None
            self._resume(waiter)

    def _end(self, fiber: Fiber[Any], outcome: Any, error: Loss | None) -> None:
        fiber.done, fiber.outcome, fiber.error, fiber.awaited = True, outcome, error, None
        if fiber.background:
            self.background.remove(fiber)
        self.live.discard(fiber)
        waiters, fiber.waiters = fiber.waiters, []
        for waiter, stage in waiters:
            waiter.awaited = None
            self._resume(waiter, None if stage else outcome, error)
