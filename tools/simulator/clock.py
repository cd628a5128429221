"""A simulated clock. It runs *courses*: generators that yield what they wait for, as those of SimPy do.

A course yields a number of seconds, or a `Transfer`. A place, such as a node's disk, serves one transfer at a time, in
turn.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Transfer:
    """Bytes that move at a place for some seconds. Other transfers come between its `pieces`."""

    place: str
    seconds: float
    pieces: int = 1
    done: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)


Course = Generator[float | Transfer, None, T]


class Clock:
    """Simulated time. `busy`: place -> the seconds that it has transferred."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.busy: dict[str, float] = defaultdict(float)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._queues: dict[str, deque[tuple[Transfer, int]]] = defaultdict(deque)  # with the pieces that are left

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function some seconds later. Calls for the same time come in the order in which they were asked."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call))

    def step(self) -> None:
        """Advance to the next event. Raises RuntimeError if there is none."""
        if not self._events:
            raise RuntimeError("every course waits for another")
        self.now, _, call = heapq.heappop(self._events)
        call()

    def transfer(self, place: str, seconds: float, pieces: int = 1) -> Transfer:
        """Start a transfer, or queue it at its place."""
        transfer, queue = Transfer(place, seconds, pieces), self._queues[place]
        queue.append((transfer, pieces))
        if len(queue) == 1:
            self._serve(place)
        return transfer

    def run(self, course: Course[Any], ended: Callable[[Any], None], alive: Callable[[], bool] = lambda: True) -> None:
        """Run a course, and call `ended` with its result. Drop the course once it is not `alive`."""
        while alive():
            try:
                step = next(course)
            except StopIteration as end:
                return ended(end.value)
            if not isinstance(step, Transfer):
                return self.after(step, lambda: self.run(course, ended, alive))
            if not step.done:
                return step.waiters.append(lambda: self.run(course, ended, alive))

    def _serve(self, place: str) -> None:
        transfer, _ = self._queues[place][0]
        seconds = transfer.seconds / transfer.pieces
        self.busy[place] += seconds
        self.after(seconds, lambda: self._served(place))

    def _served(self, place: str) -> None:
        queue = self._queues[place]
        transfer, pieces = queue.popleft()
        if pieces > 1:
            queue.append((transfer, pieces - 1))
        if queue:
            self._serve(place)
        if pieces == 1:
            transfer.done = True
            for waiter in transfer.waiters:
                waiter()
