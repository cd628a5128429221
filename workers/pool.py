"""The pool of Ray actors: who gets which unit, and what happens when one dies, joins or is sent away.

Units wait here until a worker has room. A shard's forward units go to the worker that holds its hidden states; a worker
with nothing to do takes a shard over from one that has more. A lost worker's units wait again, and another is started:
at once, or after a pause when its node was short of memory (`workers.memory_pressure`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import (
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util import metrics

from manifests.errors import InputError, Interrupted, WorkerError
from manifests.schema import Workers
from pipeline.units.sums import Collect
from pipeline.units.units import BesideUnit, ShardUnit, Summable, Unit
from workers.actor import BESIDE, WorkerActor
from workers.cluster import declared_memory, watch_ray, why_unplaceable
from workers.config import WorkerConfig
from workers.deaths import Deaths, worker_name
from workers.failures import START, Failures, failure_key
from workers.hardware import differing, software_versions, thread_fault
from workers.memory_pressure import Pause, others_hold_most
from workers.metrics import PoolMeters, run_name
from workers.outcomes import Outcome, UnitAccounts, result_of, unit_kind
from workers.placement import Held, choose, held
from workers.shortage import Shortage
from workers.tensor_transfer import attach_handles, handle_count

DEPTH = 2  # units given to a worker at a time, so that it never waits for the driver
POLL_SECONDS = 0.5  # how soon a signal is noticed
FULL = (OutOfDiskError, ObjectStoreFullError)
LOST = (RayActorError, WorkerCrashedError, ObjectLostError, OutOfMemoryError, *FULL)
MEMORY_PAUSE_SECONDS = 5.0  # the first one before a worker is started where memory was short


@dataclass
class _Member:
    actor: Any
    ready: Any
    live: bool = False
    where: dict[str, Any] = field(default_factory=dict)
    shards: set[Held] = field(default_factory=set)
    running: dict[Any, Unit] = field(default_factory=dict)
    tensors: dict[Any, list[Any]] = field(default_factory=dict)  # what a running unit will leave behind
    given_at: dict[Any, float] = field(default_factory=dict)  # by the clock of `time.monotonic`
    leaving: bool = False  # gets nothing more, and ends when it is done with what it has
    sums: set[str] = field(default_factory=set)  # passes whose sums it keeps until they are collected

    @property
    def name(self) -> str:
        """The worker's own, once it is ready."""
        return str(self.where.get("worker", ""))

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do but what goes beside others."""
        return self.in_hand(beside=False) == 0

    def in_hand(self, beside: bool) -> int:
        """How many units it has that go beside the others, or how many others; without what it gives away."""
        running = (unit for unit in self.running.values() if not isinstance(unit, Collect))
        return sum(isinstance(unit, BesideUnit) == beside for unit in running)


class RayPool(UnitAccounts):
    """See `pipeline.driver.interfaces.Pool`."""

    def __init__(
        self, setup: WorkerConfig, workers: Workers, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        """Asks Ray for `workers.max` actors and returns when `workers.min` of them are ready.

        Args:
            stop: set by a signal handler; `wait` then raises Interrupted.
            note: takes lines for the log.

        Raises:
            WorkerError: workers cannot start.
        """
        super().__init__()
        self.watch = watch_ray(note)
        self.watch.check()  # Ray's core would end the process instead of putting anything
        self.setup = ray.put(setup)
        self.stop = stop
        self.note = note
        self.waiting: deque[Unit] = deque()
        self.failures = Failures(workers.max_failures)
        self.deaths = Deaths(note)
        self.shortage = Shortage(workers.start_timeout_s, note)
        self.finished: deque[tuple[Unit, Outcome]] = deque()
        self.workers = workers
        self.hardware: Mapping[str, str] = setup.hardware or {}
        self.versions = software_versions()
        self.pause = Pause(MEMORY_PAUSE_SECONDS, workers.start_timeout_s)
        self.most = setup.shards
        self.wanted = min(workers.max, self.most)
        self.members: list[_Member] = []
        self.meters = PoolMeters(metrics, run_name(setup))
        resources: dict[str, Any] = {"num_cpus": workers.cpus, "num_gpus": workers.gpus}
        self.memory_bytes = declared_memory(workers, setup.memory_bytes)
        if self.memory_bytes:
            resources["memory"] = self.memory_bytes
        elif setup.memory_bytes:
            note(f"workers are placed without regard to the {setup.memory_bytes / 2**30:.1f} GiB that the plan says")
        remote: Any = ray.remote
        actor = remote(concurrency_groups=BESIDE)(WorkerActor)
        self.actor_class: Any = actor.options(max_restarts=0, max_task_retries=0, **resources)
        try:
            self._await_members(min(workers.min, self.wanted))
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many workers are ready."""
        return len(self._ready())

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """Names of the workers that are ready, node by node."""
        found: dict[str, list[str]] = {}
        for member in self._ready():
            found.setdefault(str(member.where.get("node")), []).append(member.name)
        return list(found.values())

    def resize(self, workers: int) -> None:
        """Asks for another number of workers, from 1 to the number of shards; units in hand are finished first.

        May be called from another thread: `wait` sees to it.
        """
        self.wanted = min(max(1, workers), self.most)

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        """The next finished unit. See `pipeline.driver.interfaces.Pool.wait`."""
        while True:
            if self.stop.is_set():
                raise Interrupted("stopped by a signal; run the same command again to go on")
            if self.finished:
                unit, outcome = self.finished.popleft()
                return unit, result_of(unit, outcome)
            self._dispatch()
            if not self.finished:
                self._step(POLL_SECONDS)
                self._complain(1)

    def cancel_pending(self) -> None:
        """Waits for what runs, forgets everything submitted."""
        self.waiting.clear()
        while any(member.running for member in self.members):
            if self.stop.is_set():
                raise Interrupted("stopped by a signal; run the same command again to go on")
            self._step(POLL_SECONDS)
            self.waiting.clear()
        self.finished.clear()
        for member in self.members:
            member.sums.clear()

    def forget(self) -> None:
        """Lets workers forget all hidden states. Their next unit comes after it."""
        for member in self.members:
            member.shards.clear()
            member.actor.forget.remote()

    def busy(self) -> dict[str, str]:
        """Worker -> the unit it is at, for the status."""
        # From another thread: what was running may be done a moment later.
        running = {worker_name(member.where): list(member.running.values()) for member in list(self.members)}
        return {name: units[0].key for name, units in running.items() if units}

    def show(self, phase: str, done: int, units: int) -> None:
        """Tells Prometheus how far a phase is. May be called from another thread."""
        self.meters.progress(phase, done, units)

    def close(self) -> None:
        """Ends all workers."""
        for member in self.members:
            ray.kill(member.actor)
        self.members = []
        self.wanted = 0
        self.deaths.report({}, now=True)
        self.watch.close()

    # -- members -----------------------------------------------------------------------------------------------------

    def _start(self) -> _Member:
        actor = self.actor_class.remote(self.setup)
        return _Member(actor, actor.ready.remote())

    def _ready(self) -> list[_Member]:
        return [member for member in self.members if member.live and not member.leaving]

    def _await_members(self, count: int) -> None:
        # `wanted` may fall meanwhile: a worker of another kind is sent away, and none comes in its place.
        while self.size < min(count, self.wanted):
            if self.stop.is_set():
                raise Interrupted("stopped by a signal before any worker was ready")
            self._step(POLL_SECONDS)
            self._complain(min(count, self.wanted))

    def _complain(self, count: int) -> None:
        """Says so, now and then, while there are fewer workers than the job needs; see `Shortage.watch`."""
        self.shortage.watch(
            self.size,
            count,
            never=lambda: why_unplaceable(self.workers, self.memory_bytes),
            cluster=lambda: f"the cluster has {ray.cluster_resources()}, free {ray.available_resources()}",
        )

    def _fit(self) -> None:
        """Starts workers up to the number wanted; lets those go that are too many, the idlest first."""
        staying = [member for member in self.members if not member.leaving]
        for member in sorted(staying, key=lambda member: (member.live, len(member.shards)))[: -self.wanted]:
            member.leaving = True
            member.shards.clear()
            self.note(f"worker {worker_name(member.where)} is sent away: {self.wanted} are wanted")
        for member in [m for m in self.members if m.leaving and not m.running and not m.sums]:
            self.members.remove(member)
            ray.kill(member.actor)
        if not self.pause.is_active():
            self.members += [self._start() for _ in range(self.wanted - len(staying))]

    def _step(self, timeout_s: float) -> None:
        """Takes in whatever is ready: new members, finished units, deaths. Raises WorkerError when Ray has ended."""
        self.watch.check()
        self.deaths.report(Counter(str(member.where.get("node")) for member in self._ready()))
        self._fit()
        self.meters.state(self.size, self.wanted, len(self.waiting), self._longest_s())
        owners = {ref: member for member in self.members for ref in member.running}
        owners |= {member.ready: member for member in self.members if not member.live}
        if not owners:
            self.stop.wait(timeout_s)
            return
        done, _ = ray.wait(list(owners), num_returns=1, timeout=timeout_s, fetch_local=False)
        for ref in done:
            member = owners[ref]
            if member in self.members:
                self._take(member, ref)

    def _longest_s(self) -> float:
        given = [at for member in self.members for at in member.given_at.values()]
        return time.monotonic() - min(given) if given else 0.0

    def _take(self, member: _Member, ref: Any) -> None:
        try:
            value = ray.get(ref)
        except LOST as error:
            self._replace(member, error)
        except RayTaskError as error:
            unit = member.running.pop(ref, None)
            what = unit.key if unit else "starting a worker"
            raise WorkerError(f"{what}: {error}") from None
        else:
            if ref == member.ready:
                self._welcome(member, value)
                return
            unit = member.running.pop(ref)
            del member.given_at[ref]
            self.failures.forgive(failure_key(unit))
            self.pause.end()
            if isinstance(unit, Collect):
                member.sums.discard(unit.sums)
            self.account(worker_name(member.where), unit, value)
            result = attach_handles(unit, value.result, member.tensors.pop(ref))
            self.finished.append((unit, replace(value, result=result)))

    def _welcome(self, member: _Member, where: dict[str, Any]) -> None:
        """A worker is ready. One that would compute other bytes than the first, or has more threads than its node has
        cores, is sent away, and none in its place."""
        member.where = where
        if others := differing(self.versions, where["versions"]):
            raise InputError(
                f"the node of worker {worker_name(member.where)} has {others} (this command's); install the same there"
            )
        refused = self._refusal(member)
        if refused is None:
            self.hardware = self.hardware or where["hardware"]
            member.live = True
            self.failures.forgive(START)
            return
        self.members.remove(member)
        ray.kill(member.actor)
        if self.wanted == 1:
            raise InputError(refused)
        self.wanted -= 1
        self.note(f"{refused}; the job goes on with at most {self.wanted} workers")

    def _refusal(self, member: _Member) -> str | None:
        """Why a worker that is ready gets no units; None: it gets some."""
        name, where = worker_name(member.where), member.where
        if fault := thread_fault(self.workers.cpus, where["cores"], f"the node of worker {name}"):
            return fault
        if others := differing(self.hardware or where["hardware"], where["hardware"]):
            return (
                f"worker {name} has {others}, on which the job began: its bytes would differ; give it nodes of the "
                "first kind, or start over with --fresh"
            )
        return None

    def _replace(self, member: _Member, error: Exception) -> None:
        """Queues a dead worker's units again; another will be started for it."""
        self.members.remove(member)
        ray.kill(member.actor)  # only its result may be gone; its shards are somebody else's now
        lost = list(member.running.values())
        self.meters.worker_died(len(lost))
        if isinstance(error, OutOfMemoryError) and others_hold_most(str(error)):
            self._wait_for_memory(member, error)
        else:
            self.deaths.add(member.where, [unit.key for unit in lost], error)
            for key in [failure_key(unit) for unit in lost] + ([] if member.live else [START]):
                self.failures.count(key, error, member.where, disk_full=isinstance(error, FULL))
        self.waiting.extendleft(reversed([unit for unit in lost if not isinstance(unit, Collect)]))
        self._finish_gone([unit for unit in lost if isinstance(unit, Collect)])

    def _wait_for_memory(self, member: _Member, error: Exception) -> None:
        first = str(error).partition("\n")[0]
        if self.pause.begin():
            raise WorkerError(
                f"for {self.workers.start_timeout_s:g} s (workers.start_timeout_s) no unit was done: other processes "
                f"hold the memory that workers need ({first}); stop them, give nodes with more memory, or lower "
                "workers.max"
            )
        self.note(
            f"worker {worker_name(member.where)} was ended by Ray's memory monitor, as other processes hold most "
            f"of its node's memory ({first}); it goes on with {self.size} workers, the next is tried in "
            f"{self.pause.seconds:g} s"
        )

    # -- units -------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Gives units to the workers that have room, one each in turn, the least busy first."""
        self._dispatch_collects()
        live = self._ready()
        for beside in (False, True):
            given = True
            while given and self.waiting:
                given = False
                for member in sorted(live, key=lambda member: member.in_hand(beside)):
                    room = member.in_hand(beside) < DEPTH
                    index = choose(self.waiting, member, live, beside) if room else None
                    if index is not None:
                        self._give(member, live, index)
                        given = True

    def _dispatch_collects(self) -> None:
        """Gives each to the worker that it is for, who may be leaving; of one that is gone there is nothing to have."""
        for unit in [unit for unit in self.waiting if isinstance(unit, Collect)]:
            holder = next((member for member in self.members if member.where.get("worker") == unit.worker), None)
            if holder is None:
                self.waiting.remove(unit)
                self._finish_gone([unit])
            else:
                self._give(holder, [], self.waiting.index(unit))

    def _finish_gone(self, units: list[Collect]) -> None:
        self.finished.extend((unit, Outcome(None, None, 0.0, 0.0, 0)) for unit in units)

    def _give(self, member: _Member, live: list[_Member], index: int) -> None:
        unit = self.waiting[index]
        del self.waiting[index]
        if isinstance(unit, ShardUnit):
            for other in live:
                other.shards.discard(held(unit))
            member.shards.add(held(unit))
            if isinstance(unit, Summable) and unit.sums is not None:
                member.sums.add(unit.sums.name)
        count = handle_count(unit)
        asked: dict[str, Any] = {"num_returns": 1 + count, "name": f"lamina {unit_kind(unit)}"}
        if isinstance(unit, BesideUnit):
            asked["concurrency_group"] = "giving" if isinstance(unit, Collect) else "beside"
        returned = member.actor.execute.options(**asked).remote(unit)
        outcome, *tensors = returned if count else [returned]
        member.running[outcome] = unit
        member.tensors[outcome] = tensors
        member.given_at[outcome] = time.monotonic()
