"""Work that is done while another's leaves workers idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from manifests.errors import CorruptError, LaminaError, LostInputError
from pipeline.driver.pool_proxy import BusyPool, PoolAround
from pipeline.driver.scheduler import Course
from pipeline.units.units import BesideUnit, SolveUnit, Unit, Write

LEAVES_WORKERS = SolveUnit | Write  # few at a time, and longer than what is done aside
DEPTH = 2  # units of its own for each worker, when nothing else is under way
T = TypeVar("T")


class Coursing(Generic[T]):
    """A course on its way: what came of it is in `outcome`, when it is done.

    What is damaged or lost ends it without one: who needs that does it again, and mends it.
    """

    def __init__(self, course: Course[T]) -> None:
        self.course = course
        self.outcome: T | None = None
        self.live = True
        self.begun = False
        self.batch: Sequence[Unit] = ()
        self.waiting: deque[Unit] = deque()
        self.under_way: dict[str, Unit] = {}
        self.found: dict[str, Any] = {}

    def next_unit(self) -> Unit | None:
        """A unit that is due, which is under way then."""
        if self.live and not self.waiting and not self.under_way:
            self._advance()
        if not self.waiting:
            return None
        unit = self.waiting.popleft()
        self.under_way[unit.key] = unit
        return unit

    def end(self) -> None:
        """Gives up; what is under way is waited for, and forgotten."""
        self.live = False
        self.waiting.clear()
        self.course.close()

    def begin_again(self) -> None:
        """What was under way is due once more: its results will not come."""
        lost = [*self.under_way.values()] if self.live else []
        self.waiting.extendleft(reversed(lost))
        self.under_way.clear()

    def _advance(self) -> None:
        results = [self.found.pop(unit.key) for unit in self.batch]
        try:
            self.batch = self.course.send(results) if self.begun else next(self.course)
        except StopIteration as done:
            self.outcome, self.live, self.batch = done.value, False, ()
        except (CorruptError, LostInputError):
            self.live, self.batch = False, ()
        self.begun = True
        self.waiting.extend(self.batch)


class Aside(PoolAround):
    """A pool whose workers do units of other courses while those that it is given leave some of them idle.

    That is while none is waited for but `LEAVES_WORKERS`, and fewer of them compute than there are workers; one alone
    is left to its own.
    """

    def __init__(self, whole: BusyPool) -> None:
        super().__init__(whole)
        self.courses: list[Coursing[Any]] = []
        self.others: dict[str, Unit] = {}  # that are under way
        self.alone = False

    def add(self, course: Course[T]) -> Coursing[T]:
        """A course, whose units come after those of the ones before."""
        coursing = Coursing(course)
        self.courses.append(coursing)
        return coursing

    @property
    def begun(self) -> bool:
        """Whether anything of a course has been."""
        return any(coursing.begun for coursing in self.courses)

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""
        self.others[unit.key] = unit
        self.whole.submit(unit)

    def wait(self) -> tuple[Unit, Any]:
        """The next finished unit but those of the courses, and its result. Raises what it raised."""
        while True:
            self._fill()
            if (done := self._next()) is not None:
                return done

    def finish(self) -> None:
        """Waits for all courses: nothing else will come. Raises what their units do, but for what ends a course."""
        self.alone = True
        self._fill()
        while any(coursing.under_way for coursing in self.courses):
            self._next()
            self._fill()
        assert not any(coursing.live for coursing in self.courses), "a course waits for what never comes"

    def cancel_pending(self) -> None:
        """Waits for everything submitted and forgets the results; what was aside is begun again."""
        self.whole.cancel_pending()
        self.others.clear()
        for coursing in self.courses:
            coursing.begin_again()

    def forget(self) -> None:
        """Lets workers forget all hidden states, when nothing of the courses is under way either."""
        while any(coursing.under_way for coursing in self.courses):
            self._next()
        self.whole.forget()

    def _next(self) -> tuple[Unit, Any] | None:
        """Takes in what is next; gives it if it is of no course."""
        try:
            unit, result = self.whole.wait()
        except LaminaError as error:
            self.others.pop(error.unit, None)
            coursing = self._owner(error.unit)
            if coursing is None:
                raise
            del coursing.under_way[error.unit]
            if not isinstance(error, CorruptError | LostInputError):
                raise
            coursing.end()
            return None
        coursing = self._owner(unit.key)
        if coursing is None:
            self.others.pop(unit.key, None)
            return unit, result
        del coursing.under_way[unit.key]
        coursing.found[unit.key] = result
        return None

    def _owner(self, key: str) -> Coursing[Any] | None:
        return next((coursing for coursing in self.courses if key in coursing.under_way), None)

    def _fill(self) -> None:
        """A unit at a time, of the course that has the fewest under way."""
        while self._room():
            live = self._live()
            units = (coursing.next_unit() for coursing in sorted(live, key=lambda coursing: len(coursing.under_way)))
            if due := next((unit for unit in units if unit is not None), None):
                self.whole.submit(due)
            elif live == self._live():  # else one has ended, for which another may have waited
                break

    def _live(self) -> list[Coursing[Any]]:
        return [coursing for coursing in self.courses if coursing.live]

    def _room(self) -> bool:
        """Whether a worker has nothing else to do."""
        mine = sum(len(coursing.under_way) for coursing in self.courses)
        if self.alone:
            return mine < DEPTH * max(1, self.size)
        if self.size < 2 or not all(isinstance(unit, LEAVES_WORKERS) for unit in self.others.values()):
            return False
        return mine + sum(not isinstance(unit, BesideUnit) for unit in self.others.values()) < self.size
