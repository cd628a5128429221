"""A job on a clock: units on workers, transfers on nodes, failures. docs/plan.md.

A worker does one unit at a time; a node's disk, network and each worker's link serve one transfer at a time, in the
order in which they come. Nothing is computed and nothing is waited for: a job of hours takes a second.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.plan.loss_units import (
    CORRECTED,
    FORGOTTEN,
    Timed,
    Units,
    corrected_units,
    last_units,
    loss_units,
    verify_unit,
)
from pipeline.plan.phases import (
    AHEAD,
    START_SECONDS,
    Pass,
    add_seconds,
    collect_seconds,
    cross_seconds,
    digest_seconds,
    fetch_seconds,
    forward_seconds,
    grid_seconds,
    pass_on_seconds,
    read_seconds,
    reread_seconds,
    solve_seconds,
    statistics_seconds,
    store_seconds,
)
from pipeline.plan.rates import Rates
from pipeline.plan.work import LayerWork

WORKER = "worker"
LEAVE_WORKERS = {"solve", "write"}  # while the driver waits for these alone, other courses go on (`pipeline.job.aside`)
UNSEEN = {"read", "reread", "verify", "barrier"}  # what the driver does not wait for
PIECES = 8  # of a layer's sums, as a disk sees them


@dataclass(frozen=True)
class Unit:
    """Something that takes time, once all of `after` are done.

    Attributes:
        on: WORKER, or the name of what transfers, such as `disk 0`.
        shard: a worker goes on with the shards that it holds; None: anybody's.
        summed: what a forward unit adds to; lost with its worker until the unit of this name is done.
        aside: done by a worker that nothing else keeps busy, while the driver waits for `LEAVE_WORKERS` alone.
    """

    name: str
    kind: str
    seconds: float
    after: tuple[str, ...] = ()
    on: str = WORKER
    shard: int | None = None
    summed: str | None = None
    aside: bool = False


@dataclass(frozen=True)
class Failure:
    """A worker that is gone at `at` seconds, and there again `away` seconds later."""

    at: float
    worker: int
    away: float = START_SECONDS


@dataclass
class Simulated:
    """What came of it: seconds in all, of workers by kind of unit, of transfers by where, and when the last unit of a
    kind was done."""

    seconds: float = 0.0
    workers: int = 1
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: dict[str, float] = field(default_factory=dict)
    done_again: int = 0

    @property
    def idle_share(self) -> float:
        """Of the workers' time after the start."""
        seconds = self.seconds - self.transfers.get("start", 0.0)
        return 1.0 - sum(self.busy.values()) / (self.workers * seconds) if seconds else 0.0


def simulate(units: Sequence[Unit], workers: int, failures: Sequence[Failure] = ()) -> Simulated:
    """Runs the units. Raises ValueError where they wait for one another, or for what there is not."""
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
        self.ready_aside: list[tuple[int, str]] = []
        self.seen = Counter(unit.kind for unit in units if not unit.aside and unit.kind not in UNSEEN)  # not done
        self.waited_for: Counter[str] = Counter()  # of these, those that are under way
        self.queues: dict[str, deque[str]] = defaultdict(deque)
        self.serving: set[str] = set()
        self.holder: dict[int, int] = {}  # shard -> worker
        self.held: Counter[tuple[int, int]] = Counter()  # (worker, of which hidden states) -> shards
        self.running: dict[int, tuple[str, float]] = {}
        self.idle = set(range(workers))
        self.sums: dict[int, set[str]] = defaultdict(set)
        self.done: set[str] = set()
        self.events: list[tuple[float, int, str, int | str]] = []
        self.result = Simulated(workers=workers)
        self._go(failures)

    def _go(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            heapq.heappush(self.events, (failure.at, 0, "fail", failure.worker))
            heapq.heappush(self.events, (failure.at + failure.away, 1, "join", failure.worker))
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
                done = self.queues[str(which)].popleft()
                if not self.queues[str(which)]:
                    del self.queues[str(which)]  # places come and go; only those with something to do are looked at
                self._finish(done, now)
            self._start(now)
        if missing := self.units.keys() - self.done:
            raise ValueError(f"{len(missing)} units wait for ever, such as {min(missing, key=self.order.__getitem__)}")

    def _release(self, name: str) -> None:
        unit = self.units[name]
        if not unit.aside:
            self.waited_for[unit.kind] += 1
        if unit.on == WORKER:
            insort(self.ready_aside if unit.aside else self.ready, (self.order[name], name))
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
                    of = unit.shard // FORGOTTEN
                    if unit.shard in self.holder:
                        self.held[self.holder[unit.shard], of] -= 1
                    self.holder[unit.shard] = worker
                    self.held[worker, of] += 1
                self.running[worker] = (name, now + unit.seconds)
                heapq.heappush(self.events, (now + unit.seconds, 2, "worker", worker))

    def _choose(self, worker: int) -> str | None:
        """As the pool does: a unit of its own shards or of none; of a shard nobody holds; of one who holds more."""
        chosen = self._choose_of(self.ready, worker)
        return self._choose_of(self.ready_aside, worker) if chosen is None and self._leaves_workers() else chosen

    def _leaves_workers(self) -> bool:
        if not self.ready_aside or (self.result.workers == 1 and any(self.seen.values())):
            return False
        waited_for = {kind for kind, count in self.waited_for.items() if count and kind not in UNSEEN}
        return waited_for <= LEAVE_WORKERS and (bool(waited_for) or not any(self.seen.values()))

    def _choose_of(self, ready: list[tuple[int, str]], worker: int) -> str | None:
        chosen = None
        for place, (_, name) in enumerate(ready):
            shard = self.units[name].shard
            holder = worker if shard is None else self.holder.get(shard)
            if holder == worker:
                chosen = place
                break
            of = 0 if shard is None else shard // FORGOTTEN
            more = holder is not None and self.held[holder, of] > self.held[worker, of] + 1
            if chosen is None and (holder is None or more):
                chosen = place
        return None if chosen is None else ready.pop(chosen)[1]

    def _finish_worker(self, worker: int, now: float) -> None:
        name, until = self.running.get(worker, ("", -1.0))
        if until != now:
            return  # of a worker that is gone
        del self.running[worker]
        self.idle.add(worker)
        unit = self.units[name]
        self.result.busy[unit.kind] += unit.seconds
        if unit.summed is not None:
            self.sums[worker].add(name)
        self._finish(name, now)

    def _finish(self, name: str, now: float) -> None:
        self.done.add(name)
        if not (unit := self.units[name]).aside:
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
        """Its unit is done again, and what its running sums held; its shards are anybody's."""
        self.idle.discard(worker)
        self.holder = {shard: other for shard, other in self.holder.items() if other != worker}
        self.held = Counter({(other, of): count for (other, of), count in self.held.items() if other != worker})
        again = self.sums.pop(worker, set())
        for name in again:
            self.seen[self.units[name].kind] += 1
        if worker in self.running:
            again.add(running := self.running.pop(worker)[0])
            self.waited_for[self.units[running].kind] -= not self.units[running].aside
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


def job_units(work: LayerWork, rates: Rates, way: Pass) -> Iterator[Unit]:
    """The units of a job as the driver hands them out: running sums, each worker's given away once per
    layer, added and stored while the next are computed."""
    yield Unit("digests", "digests", digest_seconds(work, rates, way), on="start")
    yield Unit("start", "start", START_SECONDS, ("digests",), on="start")
    before: tuple[str, ...] = ("start",)
    if way.compressed and way.importance:
        cosine = work.cosine_bytes / rates.memory
        for layer in range(way.layers):
            yield from _reads("importance", layer, work, rates, way, shared=True)
            seconds = forward_seconds(work, rates, way) + cosine
            before = yield from _forward("importance", layer, seconds, before, rates, way, None)
    stored: list[str] = []
    for layer in range(way.layers):
        yield from _reads("statistics", layer, work, rates, way, shared=not way.compressed)
        added, collected = f"add {layer}", f"collected {layer}"
        seconds = statistics_seconds(work, rates, way)
        if work.grid_flops:
            waits = (*before, f"read statistics {layer} 0")
            yield Unit(f"grids {layer}", "statistics", grid_seconds(work, rates), waits)
            before = (f"grids {layer}",)
        forward = yield from _forward("statistics", layer, seconds, before, rates, way, added)
        collects = tuple(f"collect {layer} {worker}" for worker in range(way.workers))
        for worker, name in enumerate(collects):
            yield Unit(name, "collect", collect_seconds(work, rates), forward, f"link {worker}")
        yield Unit(collected, "barrier", 0.0, collects, collected)
        yield from _adds(layer, added, collected, work, rates, way)
        if way.compressed:
            solved = yield from _solves(layer, work, rates, way, (added,))
            before = (f"write {layer}",)
            if layer < way.layers - 1:
                seconds = forward_seconds(work, rates, way, packed=True)
                gone = yield from _forward("propagate", layer, seconds, solved, rates, way, None)
                before = (*gone, *before)
        else:
            stored.append(f"store {layer}")
            yield from _stores(layer, store_seconds(work, rates, way), added, f"disk {layer % way.nodes(rates)}")
            ahead = 1 + way.workers // AHEAD
            given = (f"collected {layer - 1}",) if layer else ()
            before = (*forward, *given, stored[layer - ahead]) if layer >= ahead else (*forward, *given)
    written = tuple(f"write {layer}" for layer in range(way.layers))
    if way.compressed:
        yield from _timed(last_units(work, rates, way, written))
        return
    ready = yield from _timed(loss_units(work, rates, way, tuple(stored)))
    if work.correction_flops:
        yield from _timed(corrected_units(work, rates, way, ready))
        written = tuple(f"{write} {CORRECTED - 2}" for write in written)
    else:
        for layer in range(way.layers):
            yield from _solves(layer, work, rates, way, ready)
    yield from _timed(last_units(work, rates, way, written))


def _timed(units: Units) -> Generator[Unit, None, tuple[str, ...]]:
    while True:
        try:
            yield _unit(next(units))
        except StopIteration as end:
            last: tuple[str, ...] = end.value
            return last


def _unit(timed: Timed) -> Unit:
    name, kind, seconds, after, place, shard, aside = timed
    return Unit(name, kind, seconds, after, place or WORKER, shard, aside=aside)


def _forward(
    kind: str, layer: int, seconds: float, after: tuple[str, ...], rates: Rates, way: Pass, given: str | None
) -> Generator[Unit, None, tuple[str, ...]]:
    """A layer's shards, and what is done when all of them are."""
    names = []
    read = "statistics" if kind == "propagate" else kind
    for shard in range(way.shards):
        node = shard % way.workers // rates.workers_per_node
        waits = (*after, f"read {read} {layer} {node}")
        names.append(f"{kind} {layer} {shard}")
        yield Unit(names[-1], kind, seconds / way.shards, waits, shard=shard, summed=given)
    barrier = f"{kind} {layer}"
    yield Unit(barrier, "barrier", 0.0, tuple(names), on=f"barrier {kind} {layer}")
    return (barrier,)


def _adds(layer: int, added: str, collected: str, work: LayerWork, rates: Rates, way: Pass) -> Iterator[Unit]:
    """A layer's sums: on the workers' second threads, which wait for what comes over the network, too."""
    crossing = cross_seconds(work, rates, way)
    before = (collected, f"add {layer - 1}") if crossing and layer else (collected,)
    here = f"add {layer} here" if crossing else added
    yield Unit(here, "add", add_seconds(work, rates, way) - crossing, before, "lanes")
    if crossing:
        yield Unit(added, "cross", crossing, (here,), "network")


def _stores(layer: int, seconds: float, added: str, disk: str) -> Iterator[Unit]:
    """A layer's sums, some rows at a time: what else the disk is asked for comes in between."""
    names = [f"store {layer} {piece}" for piece in range(PIECES - 1)] + [f"store {layer}"]
    for name, before in zip(names, (added, *names), strict=False):
        yield Unit(name, "store", seconds / PIECES, (before,), disk)


def _reads(kind: str, layer: int, work: LayerWork, rates: Rates, way: Pass, *, shared: bool) -> Iterator[Unit]:
    """Each node reads a layer while the one before is computed; if `shared`, its part of it, two layers before.

    From its memory where the driver, who took the source's digests, has just read it there.
    """
    nodes = way.nodes(rates)
    shared = shared and nodes > 1
    ahead = 3 if shared else 2
    after = (f"{kind} {layer - ahead}",) if layer >= ahead else ("start",)
    seconds = read_seconds(work, rates, way, shared=shared)
    parts = tuple(f"read {kind} {layer} {node}" for node in range(nodes))
    for node, name in enumerate(parts):
        place = "memory" if way.source_cached(rates) else "disk"
        yield Unit(f"{name} part" if shared else name, "read", seconds, after, f"{place} {node}")
    if shared:
        there = tuple(f"{name} part" for name in parts)
        yield Unit(f"pass on {kind} {layer}", "pass on", pass_on_seconds(work, rates, way), there, "network")
        for name in parts:
            yield Unit(name, "barrier", 0.0, (f"pass on {kind} {layer}",), f"barrier {name}")


def _solves(
    layer: int, work: LayerWork, rates: Rates, way: Pass, after: tuple[str, ...]
) -> Generator[Unit, None, tuple[str, ...]]:
    """A layer's tasks, whose names are returned, each by one worker that first gets its moments; and writing it."""
    getting = fetch_seconds(work, rates) if way.compressed else reread_seconds(work, rates, way)
    names = tuple(f"solve {layer} {number}" for number in range(len(work.solves)))
    for name, solve in zip(names, work.solves, strict=True):
        yield Unit(name, "solve", getting + solve_seconds(solve, rates), after)
    yield Unit(f"write {layer}", "write", work.written_bytes / rates.disk, names, f"disk {layer % way.nodes(rates)}")
    yield _unit(verify_unit(layer, work, rates, f"write {layer}"))
    return names
