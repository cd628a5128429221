"""A pool of simulated workers: they run the driver's units on a clock, and die and return at given times.

It assigns units as `workers.pool` does. The course of a unit (`tools.simulator.estimates`) takes its seconds, and
returns its result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.cost_model.prices import START_SECONDS
from pipeline.units.sums import Collect
from pipeline.units.units import ConcurrentUnit, Summable, Unit
from tools.simulator.clock import Clock, Course
from workers.placement import Shard, choose_unit, hold, release

DEPTH = 2  # units that a worker has at a time, as in `workers.pool`
FIRST, BESIDE, COLLECT = THREADS = ("first", "beside", "collect")  # of a worker, as in `workers.actor`


@dataclass(frozen=True)
class Failure:
    """The death of a worker at `at` seconds; another replaces it `away` seconds later. Ignored while it is dead."""

    at: float
    worker: int
    away: float = START_SECONDS


@dataclass(eq=False)
class Worker:
    """A simulated worker.

    Attributes:
        shards: the shards that the pool gives it.
        running: the units of each of its threads, the first of which runs.
        sums: pass -> the shards in its sums.
        refused: the state of the pool and of the worker at its last refusal, by thread.
        hidden: shard, and model or direction -> the layer whose inputs, or the gradients at them, it holds.
    """

    name: str
    node: int
    alive: bool = True
    shards: set[Shard] = field(default_factory=set)
    running: dict[str, deque[Unit]] = field(default_factory=lambda: {name: deque() for name in THREADS})
    sums: dict[str, list[int]] = field(default_factory=dict)
    hidden: dict[Shard, int] = field(default_factory=dict)
    refused: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """True if the worker runs no unit, or only `ConcurrentUnit`s."""
        return not self.running[FIRST]


def _thread(unit: Unit) -> str:
    return COLLECT if isinstance(unit, Collect) else BESIDE if isinstance(unit, ConcurrentUnit) else FIRST


class ClockPool:
    """Implements `pipeline.driver.interfaces.Pool` on a clock.

    Attributes:
        course: returns the course of a unit on a worker.
        done_again: the number of shards that passed a layer again, or began to.
    """

    def __init__(
        self,
        clock: Clock,
        course: Callable[[Unit, Worker], Course[Any]],
        workers: int,
        workers_per_node: int,
        failures: Sequence[Failure] = (),
    ) -> None:
        self.clock = clock
        self.course = course
        self.waiting: dict[str, deque[Unit]] = {name: deque() for name in THREADS}
        self.finished: deque[tuple[Unit, Any]] = deque()
        self.members = [Worker(f"worker-{slot}", slot // workers_per_node) for slot in range(workers)]
        self.begun: set[str] = set()
        self.done_again = 0
        self.offers = 0  # grows whenever a refused worker may get a unit
        for failure in failures:
            clock.after(failure.at - clock.now, partial(self._die, failure))

    @property
    def _live(self) -> list[Worker]:
        return [member for member in self.members if member.alive]

    @property
    def size(self) -> int:
        """The number of ready workers."""
        return len(self._live)

    @property
    def nodes(self) -> list[list[str]]:
        """The names of the ready workers, node by node."""
        names: dict[int, list[str]] = {}
        for member in self._live:
            names.setdefault(member.node, []).append(member.name)
        return [*names.values()]

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""
        self.waiting[_thread(unit)].append(unit)
        self.offers += 1

    def wait(self) -> tuple[Unit, Any]:
        """Advance the clock to the end of a unit. Return the unit and its result."""
        while not self.finished:
            self._dispatch()
            if not self.finished:
                self.clock.step()
        return self.finished.popleft()

    def cancel_pending(self) -> None:
        """Wait for all submitted units and discard their results."""
        self._clear()
        while any(queue for member in self._live for queue in member.running.values()):
            self.clock.step()
            self._clear()
        self.finished.clear()

    def _clear(self) -> None:
        for queue in self.waiting.values():
            queue.clear()

    def forget(self) -> None:
        """Make workers drop all hidden states."""
        for member in self.members:
            member.shards.clear()
            member.hidden.clear()

    def _dispatch(self) -> None:
        """Assign units to free workers in turn, the least busy first, as `workers.pool` does."""
        live = self._live
        while self.waiting[COLLECT]:
            unit = self.waiting[COLLECT].popleft()
            holder = next((member for member in live if isinstance(unit, Collect) and member.name == unit.worker), None)
            if holder is None:
                self.finished.append((unit, None))
            else:
                self._assign(holder, unit)
        for thread in (FIRST, BESIDE):
            waiting, assigned = self.waiting[thread], True
            while assigned and waiting:
                assigned = False
                for member in sorted(live, key=lambda member: len(member.running[thread])):
                    held = sum(len(other.shards) for other in live)
                    state = (self.offers, len(member.running[thread]), held)
                    if state[1] == DEPTH or member.refused.get(thread) == state:
                        continue
                    index = choose_unit(waiting, member, live, beside=thread == BESIDE)
                    if index is None:
                        member.refused[thread] = state
                    else:
                        unit = waiting[index]
                        del waiting[index]
                        self._assign(member, unit)
                        assigned = True

    def _assign(self, member: Worker, unit: Unit) -> None:
        hold(unit, member, self._live)
        queue = member.running[_thread(unit)]
        queue.append(unit)
        if len(queue) == 1:
            self._begin(member, queue)

    def _begin(self, member: Worker, queue: deque[Unit]) -> None:
        unit = queue[0]
        if isinstance(unit, Summable):
            self.done_again += unit.key in self.begun
            self.begun.add(unit.key)
        self.clock.run(self.course(unit, member), partial(self._end, member, queue), lambda: member.alive)

    def _end(self, member: Worker, queue: deque[Unit], result: Any) -> None:
        unit = queue.popleft()
        self.finished.append((unit, result))
        release(unit, member)
        if queue:
            self._begin(member, queue)

    def _die(self, failure: Failure) -> None:
        """Queue a worker's units again. Its sums and hidden states are lost, its other results are not."""
        member = self.members[failure.worker]
        if not member.alive:
            return
        member.alive = False
        self.offers += 1
        for thread in (FIRST, BESIDE):
            self.waiting[thread].extendleft(reversed(member.running[thread]))
        self.finished.extend((unit, None) for unit in member.running[COLLECT])
        self.clock.after(failure.away, partial(self._replace, failure.worker))

    def _replace(self, slot: int) -> None:
        dead = self.members[slot]
        self.offers += 1
        self.members[slot] = Worker(f"{dead.name}'", dead.node)
