"""Simulate the time of a job: units on workers, transfers on nodes, failures. See docs/plan.md.

A worker does one unit at a time; a node's disk, network and each worker's link serve one transfer at a time, first
come, first served. Nothing is computed: a job of hours takes a second.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.cost_model.phases import START_SECONDS
from pipeline.units.scores import shards_per_worker

WORKER = "worker"
SHARDS_OF_A_MODEL = 1_000_000  # scored models number their shards from multiples of this, as they share none
LEAVE_WORKERS = {"solve", "write"}  # while the driver waits only for these, background units run
UNSEEN = {"read", "reread", "verify", "barrier"}  # the driver does not wait for these


@dataclass(frozen=True)
class Unit:
    """Work that takes time, once all of `after` are done.

    Attributes:
        on: WORKER, or the name of a device that transfers, such as `disk 0`.
        shard: the shard of the unit, which stays with its worker; None: any worker may do the unit.
        summed: the sum that a forward unit adds to; lost with its worker until the unit of this name is done.
        background: for workers without other units, while the driver waits only for `LEAVE_WORKERS`.
    """

    name: str
    kind: str
    seconds: float
    after: tuple[str, ...] = ()
    on: str = WORKER
    shard: int | None = None
    summed: str | None = None
    background: bool = False

    @property
    def of(self) -> int:
        """The model whose hidden states the unit needs: 0 for the samples, else the number of a scored model."""
        return 0 if self.shard is None else self.shard // SHARDS_OF_A_MODEL


@dataclass(frozen=True)
class Failure:
    """The death of a worker at `at` seconds; another replaces it `away` seconds later. Ignored while it is dead."""

    at: float
    worker: int
    away: float = START_SECONDS


@dataclass
class Simulated:
    """The result: total seconds, busy seconds of workers by kind of unit and of devices, and the end of each kind."""

    seconds: float = 0.0
    workers: int = 1
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: dict[str, float] = field(default_factory=dict)
    done_again: int = 0

    @property
    def idle_share(self) -> float:
        """The share of the workers' time after the start that they are idle."""
        seconds = self.seconds - self.transfers.get("start", 0.0)
        return 1.0 - sum(self.busy.values()) / (self.workers * seconds) if seconds else 0.0


def simulate(units: Sequence[Unit], workers: int, failures: Sequence[Failure] = ()) -> Simulated:
    """Simulate the units. Raises ValueError if units wait for each other, or for a unit that does not exist."""
    return _Run(units, workers, failures).result


class _Run:
    def __init__(self, units: Sequence[Unit], workers: int, failures: Sequence[Failure]) -> None:
        self.units = {unit.name: unit for unit in units}
        self.order = {name: place for place, name in enumerate(self.units)}
        self.waits = {unit.name: {name for name in unit.after if name != unit.name} for unit in units}
        self.readers: dict[str, list[str]] = defaultdict(list)
        for unit in units:
            for name in unit.after:
                self.readers[name].append(unit.name)
        self.ready: list[tuple[int, str]] = []
        self.ready_background: list[tuple[int, str]] = []
        self.seen = Counter(unit.kind for unit in units if not unit.background and unit.kind not in UNSEEN)  # not done
        self.waited_for: Counter[str] = Counter()  # of these, those that run or are ready
        self.queues: dict[str, deque[str]] = defaultdict(deque)
        self.serving: set[str] = set()
        self.holder: dict[int, int] = {}  # shard -> worker
        self.held: Counter[tuple[int, int]] = Counter()  # (worker, of which hidden states) -> shards
        self.scored = Counter(unit.of for unit in units if unit.background and unit.of)  # of each model: not done
        shards = Counter(unit.of for unit in {unit.shard: unit for unit in units if unit.of}.values())
        self.most = {of: shards_per_worker(count, workers) for of, count in shards.items()}  # of a model, on a worker
        self.running: dict[int, tuple[str, float]] = {}
        self.idle = set(range(workers))
        self.sums: dict[int, set[str]] = defaultdict(set)
        self.done: set[str] = set()
        self.events: list[tuple[float, int, str, int | str]] = []
        self.result = Simulated(workers=workers)
        self._go(failures)

    def _go(self, failures: Sequence[Failure]) -> None:
        back: dict[int, float] = {}  # when a dead worker is replaced
        for failure in sorted(failures, key=lambda failure: failure.at):
            if failure.at > back.get(failure.worker, -1.0):
                back[failure.worker] = failure.at + failure.away
                heapq.heappush(self.events, (failure.at, 0, "fail", failure.worker))
                heapq.heappush(self.events, (back[failure.worker], 1, "join", failure.worker))
        for name, waits in self.waits.items():
            if not waits:
                self._release(name)
        self._start(0.0)
        while self.events and len(self.done) < len(self.units):
            now, _, what, which = heapq.heappop(self.events)
            if what == "fail":
                self._fail(int(which))
            elif what == "join":
                self.idle.add(int(which))
            elif what == "worker":
                self._finish_worker(int(which), now)
            else:
                self.serving.discard(str(which))
                name = self.queues[str(which)].popleft()
                if not self.queues[str(which)]:
                    del self.queues[str(which)]  # only devices with something to do are visited
                self._finish(name, now)
            self._start(now)
        if missing := self.units.keys() - self.done:
            raise ValueError(f"{len(missing)} units wait forever, such as {min(missing, key=self.order.__getitem__)}")

    def _release(self, name: str) -> None:
        unit = self.units[name]
        if not unit.background:
            self.waited_for[unit.kind] += 1
        if unit.on == WORKER:
            insort(self.ready_background if unit.background else self.ready, (self.order[name], name))
        else:
            self.queues[unit.on].append(name)

    def _start(self, now: float) -> None:
        for place, queue in self.queues.items():
            if place not in self.serving:
                self.serving.add(place)
                seconds = self.units[queue[0]].seconds
                self.result.transfers[place] += seconds
                heapq.heappush(self.events, (now + seconds, 2, "transfer", place))
        for worker in sorted(self.idle):
            if (name := self._choose(worker)) is not None:
                unit = self.units[name]
                self.idle.discard(worker)
                if unit.shard is not None:
                    if unit.shard in self.holder:
                        self.held[self.holder[unit.shard], unit.of] -= 1
                    self.holder[unit.shard] = worker
                    self.held[worker, unit.of] += 1
                self.running[worker] = (name, now + unit.seconds)
                heapq.heappush(self.events, (now + unit.seconds, 2, "worker", worker))

    def _choose(self, worker: int) -> str | None:
        """Choose a unit for a worker as the pool does.

        First units of its own shards or without one; then free shards, of its own model first; then shards of a worker
        that holds more.
        """
        chosen = self._choose_of(self.ready, worker)
        return self._choose_of(self.ready_background, worker) if chosen is None and self._leaves_workers() else chosen

    def _leaves_workers(self) -> bool:
        if not self.ready_background or (self.result.workers == 1 and any(self.seen.values())):
            return False
        waited_for = {kind for kind, count in self.waited_for.items() if count and kind not in UNSEEN}
        return waited_for <= LEAVE_WORKERS and (bool(waited_for) or not any(self.seen.values()))

    def _choose_of(self, ready: list[tuple[int, str]], worker: int) -> str | None:
        fits: list[tuple[tuple[int, int], int]] = []
        for place, (_, name) in enumerate(ready):
            if (fit := self._fit(worker, self.units[name])) is not None:
                fits.append((fit, place))
            if fit == (0, 0):
                break
        return ready.pop(min(fits)[1])[1] if fits else None

    def _fit(self, worker: int, unit: Unit) -> tuple[int, int] | None:
        """Return how badly a unit fits a worker, by the order of `workers.placement`; None: not at all."""
        of, holder = unit.of, worker if unit.shard is None else self.holder.get(unit.shard)
        if holder == worker:
            return 0, 0
        if holder is not None:  # windows are taken over when they are of the last model, whose states are committed
            movable = self.held[holder, of] > self.held[worker, of] + 1 and (of == 0 or len(+self.scored) == 1)
            return (4, 0) if movable else None
        if of == 0:
            return 1, 0
        if self.held[worker, of]:
            return (1, 0) if self.held[worker, of] < self.most[of] else None
        having = {(who, windows) for (who, windows), count in self.held.items() if count > 0 < windows}
        return 2 + any(who == worker for who, _ in having), sum(windows == of for _, windows in having)

    def _finish_worker(self, worker: int, now: float) -> None:
        name, until = self.running.get(worker, ("", -1.0))
        if until != now:
            return  # the worker is dead
        del self.running[worker]
        self.idle.add(worker)
        unit = self.units[name]
        self.result.busy[unit.kind] += unit.seconds
        if unit.summed is not None:
            self.sums[worker].add(name)
        self._finish(name, now)

    def _finish(self, name: str, now: float) -> None:
        self.done.add(name)
        unit = self.units[name]
        self.scored[unit.of] -= unit.background
        if not unit.background:
            self.waited_for[unit.kind] -= 1
            self.seen[unit.kind] -= unit.kind not in UNSEEN
        self.result.seconds = self.result.ended[unit.kind] = now
        for members in self.sums.values():
            members -= {member for member in members if self.units[member].summed == name}
        for reader in self.readers[name]:
            self.waits[reader].discard(name)
            if not self.waits[reader] and reader not in self.done:
                self._release(reader)

    def _fail(self, worker: int) -> None:
        """Release the worker's unit, the units in its running sums, and its shards."""
        self.idle.discard(worker)
        self.holder = {shard: other for shard, other in self.holder.items() if other != worker}
        self.held = Counter({(other, of): count for (other, of), count in self.held.items() if other != worker})
        again = self.sums.pop(worker, set())
        for name in again:
            self.seen[self.units[name].kind] += 1
        if worker in self.running:
            again.add(running := self.running.pop(worker)[0])
            self.waited_for[self.units[running].kind] -= not self.units[running].background
        for name in again:
            self.done.discard(name)
            for reader in self.readers[name]:
                if reader not in self.done:
                    self.waits[reader].add(name)
            self._release(name)
        for _, name in [entry for entry in self.ready if self.waits[entry[1]]]:
            self.waited_for[self.units[name].kind] -= 1
        self.ready = [entry for entry in self.ready if not self.waits[entry[1]]]
        self.result.done_again += len(again)
