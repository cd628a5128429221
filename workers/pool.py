"""The pool of Ray actors: assigns units to workers, and handles workers that die, join or leave.

Units wait here until a worker is free. A shard's forward units go to the worker that holds its hidden states. A worker
without units takes over a shard from one that has more. If a worker dies, its units are queued again and another worker
is started: at once, or after a pause if its node was short of memory (`workers.pool_health.Pause`).
"""

from __future__ import annotations

import pickle
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
from pipeline.units.units import ConcurrentUnit, Summable, Unit
from workers.actor import BESIDE, WorkerActor
from workers.cluster import declared_memory, watch_ray, why_unplaceable
from workers.config import WorkerConfig
from workers.hardware import differing, software_versions, thread_fault
from workers.metrics import PoolMeters, run_name
from workers.outcomes import Outcome, UnitAccounts, result_of, unit_kind
from workers.placement import Shard, choose_unit, hold, release
from workers.pool_health import START, Deaths, Failures, Pause, Shortage, failure_key, others_hold_most, worker_name
from workers.tensor_transfer import attach_handles

DEPTH = 2  # units that a worker has at a time, so that it never waits for the driver
POLL_SECONDS = 0.5  # how soon a signal is noticed
FULL = (OutOfDiskError, ObjectStoreFullError)
LOST = (RayActorError, WorkerCrashedError, ObjectLostError, OutOfMemoryError, *FULL)
MEMORY_PAUSE_SECONDS = 5.0  # the first pause before a worker starts again after a lack of memory


@dataclass
class Member:
    """A worker of the pool.

    `ready`: the reference whose value the actor returns when it has started.
    """

    actor: Any
    ready: Any
    live: bool = False
    where: dict[str, Any] = field(default_factory=dict)
    shards: set[Shard] = field(default_factory=set)
    running: dict[Any, Unit] = field(default_factory=dict)
    tensors: dict[Any, list[Any]] = field(default_factory=dict)  # the tensors that a running unit will return
    started_at: dict[Any, float] = field(default_factory=dict)  # by the clock of `time.monotonic`
    leaving: bool = False  # receives no more units, and ends after its last
    sums: set[str] = field(default_factory=set)  # passes whose sums it holds until they are collected

    @property
    def name(self) -> str:
        """The worker's name, once it is ready."""
        return str(self.where.get("worker", ""))

    @property
    def idle(self) -> bool:
        """True if the worker runs no unit, or only `ConcurrentUnit`s."""
        return self.unit_count(beside=False) == 0

    def unit_count(self, beside: bool) -> int:
        """Return how many `ConcurrentUnit`s, or how many other units, the worker has; `Collect` units do not count."""
        running = (unit for unit in self.running.values() if not isinstance(unit, Collect))
        return sum(isinstance(unit, ConcurrentUnit) == beside for unit in running)


class RayPool(UnitAccounts):
    """Implements `pipeline.driver.interfaces.Pool` by Ray actors."""

    def __init__(
        self, setup: WorkerConfig, workers: Workers, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        """Start `workers.max` actors, and return when `workers.min` of them are ready.

        Args:
            stop: set by a signal handler; `wait` then raises Interrupted.
            note: writes a line to the log.

        Raises:
            WorkerError: workers cannot start.
        """
        super().__init__()
        self.watch = watch_ray(note)
        self.watch.check()  # without Ray, `ray.put` would end the process
        self.pickled_setup = ray.put(pickle.dumps(setup))
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
        self.members: list[Member] = []
        self.meters = PoolMeters(metrics, run_name(setup))
        resources: dict[str, Any] = {"num_cpus": workers.cpus, "num_gpus": workers.gpus}
        self.memory_bytes = declared_memory(workers, setup.memory_bytes)
        if self.memory_bytes:
            resources["memory"] = self.memory_bytes
        elif setup.memory_bytes:
            note(f"workers are placed without reserving the planned {setup.memory_bytes / 2**30:.1f} GiB of memory")
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
        """The number of ready workers."""
        return len(self._ready())

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """The names of the ready workers, for each node."""
        names: dict[str, list[str]] = {}
        for member in self._ready():
            names.setdefault(str(member.where.get("node")), []).append(member.name)
        return list(names.values())

    def resize(self, workers: int) -> None:
        """Change the number of workers, from 1 to the number of shards; running units finish first.

        May be called from another thread: `wait` starts and ends the workers.
        """
        self.wanted = min(max(1, workers), self.most)

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        """Return the next finished unit and its result. See `pipeline.driver.interfaces.Pool.wait`."""
        while True:
            if self.stop.is_set():
                raise Interrupted("stopped by a signal; run the same command again to resume")
            if self.finished:
                unit, outcome = self.finished.popleft()
                return unit, result_of(unit, outcome)
            self._dispatch()
            if not self.finished:
                self._step(POLL_SECONDS)
                self._complain(1)

    def cancel_pending(self) -> None:
        """Discard all submitted units, and wait for the running ones."""
        self.waiting.clear()
        while any(member.running for member in self.members):
            if self.stop.is_set():
                raise Interrupted("stopped by a signal; run the same command again to resume")
            self._step(POLL_SECONDS)
            self.waiting.clear()
        self.finished.clear()
        for member in self.members:
            member.sums.clear()

    def forget(self) -> None:
        """Make workers discard all hidden states before their next unit."""
        for member in self.members:
            member.shards.clear()
            member.actor.forget.remote()

    def busy(self) -> dict[str, str]:
        """Return the running unit of each worker, for the status. May be called from another thread."""
        running = {worker_name(member.where): list(member.running.values()) for member in list(self.members)}
        return {name: units[0].key for name, units in running.items() if units}

    def show(self, phase: str, finished: int, units: int) -> None:
        """Report a phase's progress to Prometheus. May be called from another thread."""
        self.meters.progress(phase, finished, units)

    def close(self) -> None:
        """End all workers."""
        for member in self.members:
            ray.kill(member.actor)
        self.members = []
        self.wanted = 0
        self.deaths.report({}, now=True)
        self.watch.close()

    # -- members -----------------------------------------------------------------------------------------------------

    def _start(self) -> Member:
        actor = self.actor_class.remote(self.pickled_setup)
        return Member(actor, actor.ready.remote())

    def _ready(self) -> list[Member]:
        return [member for member in self.members if member.live and not member.leaving]

    def _await_members(self, count: int) -> None:
        # `wanted` falls if a worker with other hardware is rejected.
        while self.size < min(count, self.wanted):
            if self.stop.is_set():
                raise Interrupted("stopped by a signal before any worker was ready")
            self._step(POLL_SECONDS)
            self._complain(min(count, self.wanted))

    def _complain(self, count: int) -> None:
        """Log at intervals that the job has too few workers; see `Shortage.watch`."""
        self.shortage.watch(
            self.size,
            count,
            never=lambda: why_unplaceable(self.workers, self.memory_bytes),
            cluster=lambda: f"the cluster has {ray.cluster_resources()}, free {ray.available_resources()}",
        )

    def _fit(self) -> None:
        """Start workers up to `wanted`, or dismiss excess workers, those with the fewest shards first."""
        staying = [member for member in self.members if not member.leaving]
        for member in sorted(staying, key=lambda member: (member.live, len(member.shards)))[: -self.wanted]:
            member.leaving = True
            member.shards.clear()
            self.note(f"worker {worker_name(member.where)} is dismissed: the job needs only {self.wanted}")
        for member in [m for m in self.members if m.leaving and not m.running and not m.sums]:
            self.members.remove(member)
            ray.kill(member.actor)
        if not self.pause.is_active():
            self.members += [self._start() for _ in range(self.wanted - len(staying))]

    def _step(self, timeout_s: float) -> None:
        """Process new members, finished units and deaths. Raise WorkerError if Ray has ended."""
        self.watch.check()
        self.deaths.report(Counter(str(member.where.get("node")) for member in self._ready()))
        self._fit()
        self.meters.state(self.size, self.wanted, len(self.waiting), self._longest_s())
        owners = {ref: member for member in self.members for ref in member.running}
        owners |= {member.ready: member for member in self.members if not member.live}
        if not owners:
            self.stop.wait(timeout_s)
            return
        finished, _ = ray.wait(list(owners), num_returns=1, timeout=timeout_s, fetch_local=False)
        for ref in finished:
            member = owners[ref]
            if member in self.members:
                self._take(member, ref)

    def _longest_s(self) -> float:
        starts = [at for member in self.members for at in member.started_at.values()]
        return time.monotonic() - min(starts) if starts else 0.0

    def _take(self, member: Member, ref: Any) -> None:
        try:
            value = ray.get(ref)
        except LOST as error:
            self._replace(member, error)
        except RayTaskError as error:
            unit = member.running.pop(ref, None)
            action = unit.key if unit else "starting a worker"
            raise WorkerError(f"{action}: {error}") from None
        else:
            if ref == member.ready:
                self._welcome(member, value)
                return
            unit = member.running.pop(ref)
            del member.started_at[ref]
            self.failures.forgive(failure_key(unit))
            self.pause.end()
            if isinstance(unit, Collect):
                member.sums.discard(unit.sums)
            release(unit, member)
            self.account(worker_name(member.where), unit, value)
            result = attach_handles(unit, value.result, member.tensors.pop(ref))
            self.finished.append((unit, replace(value, result=result)))

    def _welcome(self, member: Member, where: dict[str, Any]) -> None:
        """Accept a worker that is ready.

        A worker that would compute other bytes than the first, or has more threads than its node has cores, is rejected
        and not replaced.
        """
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
        self.note(f"{refused}; the job continues with at most {self.wanted} workers")

    def _refusal(self, member: Member) -> str | None:
        """Return why a worker that is ready is rejected, or None."""
        name, where = worker_name(member.where), member.where
        if fault := thread_fault(self.workers.cpus, where["cores"], f"the node of worker {name}"):
            return fault
        if others := differing(self.hardware or where["hardware"], where["hardware"]):
            return (
                f"worker {name} has {others}, on which the job began: its bytes would differ; give it nodes of the "
                "first kind, or start over with --fresh"
            )
        return None

    def _replace(self, member: Member, error: Exception) -> None:
        """Queue a dead worker's units again; `_fit` starts another worker."""
        self.members.remove(member)
        ray.kill(member.actor)  # it may still live, if only its result was lost, but other workers take its shards
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

    def _wait_for_memory(self, member: Member, error: Exception) -> None:
        first = str(error).partition("\n")[0]
        if self.pause.begin():
            raise WorkerError(
                f"for {self.workers.start_timeout_s:g} s (workers.start_timeout_s) no unit was done: other processes "
                f"hold the memory that workers need ({first}); stop them, give nodes with more memory, or lower "
                "workers.max"
            )
        self.note(
            f"worker {worker_name(member.where)} was ended by Ray's memory monitor, as other processes hold most "
            f"of its node's memory ({first}); the job continues with {self.size} workers, the next is tried in "
            f"{self.pause.seconds:g} s"
        )

    # -- units -------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Assign units to free workers in turn, the least busy first."""
        self._dispatch_collects()
        live = self._ready()
        for beside in (False, True):
            assigned = True
            while assigned and self.waiting:
                assigned = False
                for member in sorted(live, key=lambda member: member.unit_count(beside)):
                    room = member.unit_count(beside) < DEPTH
                    index = choose_unit(self.waiting, member, live, beside) if room else None
                    if index is not None:
                        self._assign(member, live, index)
                        assigned = True

    def _dispatch_collects(self) -> None:
        """Assign each `Collect` to its worker, which may be leaving. If the worker has died, the result is empty."""
        for unit in [unit for unit in self.waiting if isinstance(unit, Collect)]:
            holder = next((member for member in self.members if member.where.get("worker") == unit.worker), None)
            if holder is None:
                self.waiting.remove(unit)
                self._finish_gone([unit])
            else:
                self._assign(holder, [], self.waiting.index(unit))

    def _finish_gone(self, units: list[Collect]) -> None:
        self.finished.extend((unit, Outcome(None, None, 0.0, 0.0, 0)) for unit in units)

    def _assign(self, member: Member, live: list[Member], index: int) -> None:
        unit = self.waiting[index]
        del self.waiting[index]
        hold(unit, member, live)
        if isinstance(unit, Summable) and unit.sums is not None:
            member.sums.add(unit.sums.name)
        count = unit.handles
        options: dict[str, Any] = {"num_returns": 1 + count, "name": f"lamina {unit_kind(unit)}"}
        if isinstance(unit, ConcurrentUnit):
            options["concurrency_group"] = "collect" if isinstance(unit, Collect) else "beside"
        returned = member.actor.execute.options(**options).remote(unit)
        *tensors, outcome = returned if count else [returned]
        member.running[outcome] = unit
        member.tensors[outcome] = tensors
        member.started_at[outcome] = time.monotonic()
