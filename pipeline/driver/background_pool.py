"""Task streams that run in the background, on workers that the main work leaves idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from manifests.errors import CorruptError, LaminaError, LostInputError
from pipeline.driver.pool_proxy import BusyPool, PoolProxy
from pipeline.driver.scheduler import NOTHING_DUE, TaskStream
from pipeline.units.units import BesideUnit, SolveUnit, Unit, Write

LEAVES_WORKERS = SolveUnit | Write  # few at a time, and longer than background units
DEPTH = 2  # background units for each worker, when there is no main work
T = TypeVar("T")


class BackgroundStream(Generic[T]):
    """A task stream in the background. Its return value is in `outcome` when it is done.

    CorruptError and LostInputError end it without an outcome: the caller who needs one runs the stream again.
    """

    def __init__(self, stream: TaskStream[T]) -> None:
        self.stream = stream
        self.outcome: T | None = None
        self.live = True
        self.begun = False
        self.batch: Sequence[Unit] = ()
        self.waiting: deque[Unit] = deque()
        self.in_flight: dict[str, Unit] = {}
        self.found: dict[str, Any] = {}

    def next_unit(self) -> Unit | None:
        """Takes the next unit to submit; None while there is none."""
        if self.live and not self.waiting and not self.in_flight:
            self._advance()
        if not self.waiting:
            return None
        unit = self.waiting.popleft()
        self.in_flight[unit.key] = unit
        return unit

    def end(self) -> None:
        """Ends the stream. Results of submitted units are ignored."""
        self.live = False
        self.waiting.clear()
        self.stream.close()

    def begin_again(self) -> None:
        """Queues submitted units again, as their results will not come."""
        lost = [*self.in_flight.values()] if self.live else []
        self.waiting.extendleft(reversed(lost))
        self.in_flight.clear()

    def _advance(self) -> None:
        results = [self.found.pop(unit.key) for unit in self.batch]
        try:
            step = self.stream.send(results) if self.begun else next(self.stream)
            self.batch = () if step is NOTHING_DUE else step
        except StopIteration as done:
            self.outcome, self.live, self.batch = done.value, False, ()
        except (CorruptError, LostInputError):
            self.live, self.batch = False, ()
        self.begun = True
        self.waiting.extend(self.batch)


class BackgroundPool(PoolProxy):
    """A pool that also runs background streams while the units submitted to it leave workers idle.

    That is while all submitted units are `LEAVES_WORKERS`, and fewer of them compute than there are workers. A pool of
    one worker runs background streams only in `finish`.
    """

    def __init__(self, whole: BusyPool) -> None:
        super().__init__(whole)
        self.streams: list[BackgroundStream[Any]] = []
        self.others: dict[str, Unit] = {}  # of the main work, in flight
        self.alone = False

    def add(self, stream: TaskStream[T]) -> BackgroundStream[T]:
        """Adds a stream. At equal numbers of submitted units, earlier streams come first."""
        background = BackgroundStream(stream)
        self.streams.append(background)
        return background

    @property
    def begun(self) -> bool:
        """Whether any background stream has begun."""
        return any(background.begun for background in self.streams)

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""
        self.others[unit.key] = unit
        self.whole.submit(unit)

    def wait(self) -> tuple[Unit, Any]:
        """Waits for the next finished unit of the main work. Raises the error of that unit."""
        while True:
            self._fill()
            if (done := self._next()) is not None:
                return done

    def finish(self) -> None:
        """Runs all background streams to their end, when the main work is done. Raises errors of their units, except
        those that end a stream."""
        self.alone = True
        self._fill()
        while any(background.in_flight for background in self.streams):
            self._next()
            self._fill()
        assert not any(background.live for background in self.streams), "a stream waits for something that never comes"

    def cancel_pending(self) -> None:
        """Waits for everything submitted and forgets the results; background units are queued again."""
        self.whole.cancel_pending()
        self.others.clear()
        for background in self.streams:
            background.begin_again()

    def forget(self) -> None:
        """Makes workers forget all hidden states, after waiting for the background units in flight."""
        while any(background.in_flight for background in self.streams):
            self._next()
        self.whole.forget()

    def _next(self) -> tuple[Unit, Any] | None:
        """Waits for the next finished unit. Returns it if it belongs to the main work."""
        try:
            unit, result = self.whole.wait()
        except LaminaError as error:
            self.others.pop(error.unit, None)
            background = self._owner(error.unit)
            if background is None:
                raise
            del background.in_flight[error.unit]
            if not isinstance(error, CorruptError | LostInputError):
                raise
            background.end()
            return None
        background = self._owner(unit.key)
        if background is None:
            self.others.pop(unit.key, None)
            return unit, result
        del background.in_flight[unit.key]
        background.found[unit.key] = result
        return None

    def _owner(self, key: str) -> BackgroundStream[Any] | None:
        return next((background for background in self.streams if key in background.in_flight), None)

    def _fill(self) -> None:
        """Submits background units one at a time, from the stream with the fewest in flight."""
        while self._room():
            live = self._live()
            units = (background.next_unit() for background in sorted(live, key=lambda stream: len(stream.in_flight)))
            if due := next((unit for unit in units if unit is not None), None):
                self.whole.submit(due)
            elif live == self._live():  # else one has ended, for which another may have waited
                break

    def _live(self) -> list[BackgroundStream[Any]]:
        return [background for background in self.streams if background.live]

    def _room(self) -> bool:
        """Whether a worker is idle."""
        mine = sum(len(background.in_flight) for background in self.streams)
        if self.alone:
            return mine < DEPTH * max(1, self.size)
        if self.size < 2 or not all(isinstance(unit, LEAVES_WORKERS) for unit in self.others.values()):
            return False
        return mine + sum(not isinstance(unit, BesideUnit) for unit in self.others.values()) < self.size
