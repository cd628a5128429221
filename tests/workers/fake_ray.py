"""Simulates the part of Ray that the pool uses, with simulated time: actors start, work and die."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorDiedError

from workers.hardware import software_versions
from workers.outcomes import Outcome

PENDING = object()


class Ref:
    """A reference to the future result of a call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.value: Any = PENDING


class Watch:
    """Stands in for `workers.liveness.RayWatch`."""

    fault: Exception | None = None
    closed = False

    def check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeActor:
    """An actor that does calls one after another, `ticks` each, from `ready_at` on, and dies at `dies_at`."""

    ray: FakeRay
    number: int
    ready_at: int
    ticks: int
    dies_at: int | None
    calls: list[Ref] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)  # units, in order
    spent: int = 0
    killed: bool = False
    most_in_hand: int = 0

    @property
    def ready(self) -> Any:
        return _Remote(lambda: self._call("ready"))

    @property
    def execute(self) -> Any:
        return _Remote(self._call, self.ray.groups)

    @property
    def forget(self) -> Any:
        return _Remote(lambda: self._call("forget"))

    def _call(self, call: Any) -> Ref:
        ref = Ref(call)
        self.calls.append(ref)
        self.most_in_hand = max(self.most_in_hand, len(self.calls))
        return ref

    def tick(self, now: int) -> None:
        if self.dies_at is not None and now >= self.dies_at:
            for ref in self.calls:
                ref.value = ActorDiedError()
            self.calls.clear()
        elif self.calls and not self.killed and now >= self.ready_at:
            self.spent += 1
            if self.spent >= (1 if self.calls[0].call == "ready" else self.ticks):
                self.spent = 0
                ref = self.calls.pop(0)
                ref.value = self._result(ref.call)

    def _result(self, call: Any) -> Any:
        if call == "ready" and self.ray.start_error is not None:
            return self.ray.start_error
        if call == "ready":
            hardware = self.ray.hardware.get(self.number, {"device": "CPU"})
            versions = self.ray.versions.get(self.number, software_versions())
            where = {
                "node": "fake",
                "pid": self.number,
                "worker": f"worker-{self.number}",
                "ray_folder": "/tmp/ray/fake",
            }
            cores = self.ray.cores.get(self.number, 4)
            return {**where, "hardware": hardware, "cores": cores, "versions": versions}
        self.done.append(call)
        if call == "forget":
            return None
        failure = self.ray.failures.pop(call.key, None)
        if failure is not None and not isinstance(failure, Outcome):
            return failure
        return failure or Outcome(call.key, None, seconds=2.0, compute_seconds=1.5, peak_bytes=1000 * self.number)


class _Remote:
    def __init__(self, function: Any, groups: list[str | None] | None = None) -> None:
        self.function = function
        self.groups = groups if groups is not None else []

    def options(self, num_returns: int, name: str, concurrency_group: str | None = None) -> _Remote:
        """Return a caller whose results are the handles of the unit, then its outcome."""
        self.groups.append(concurrency_group)
        left = [f"tensors {place}" for place in range(num_returns - 1)]
        return _Remote(lambda *call: [*left, self.function(*call)] if left else self.function(*call))

    def remote(self, *call: Any) -> Any:
        return self.function(*call)


class FakeRay:
    """Replaces the module `ray`. `plans`: (ready_at, ticks, dies_at) of the actors, in the order of starting.

    `ready_at` counts from an actor's start; the last plan is for all later actors. `on_wait`: called before time
    advances.
    """

    def __init__(self, *plans: tuple[int, int, int | None]) -> None:
        self.plans = plans or ((0, 1, None),)
        self.actors: list[FakeActor] = []
        self.failures: dict[str, Any] = {}
        self.hardware: dict[int, dict[str, str]] = {}  # by number of the actor, if it is another
        self.cores: dict[int, int] = {}  # of nodes, by number of the actor, if not 4
        self.start_error: Exception | None = None
        self.versions: dict[int, dict[str, str]] = {}
        self.now = 0
        self.options_given: dict[str, Any] = {}
        self.beside: dict[str, int] = {}
        self.groups: list[str | None] = []  # the concurrency groups of the units
        self.on_wait: Any = lambda: None

    def put(self, value: Any) -> Any:
        return value

    def remote(self, concurrency_groups: dict[str, int]) -> Any:
        self.beside = concurrency_groups
        return lambda _: self

    def options(self, **options: Any) -> Any:
        self.options_given = options
        return _Remote(self._start)

    def _start(self, setup: Any) -> FakeActor:
        assert setup is not None
        ready_at, ticks, dies_at = self.plans[min(len(self.actors), len(self.plans) - 1)]
        dies = None if dies_at is None else self.now + dies_at
        self.actors.append(FakeActor(self, len(self.actors), self.now + ready_at, ticks, dies))
        return self.actors[-1]

    def wait(
        self, refs: Sequence[Ref], num_returns: int, timeout: float, fetch_local: bool
    ) -> tuple[list[Ref], list[Ref]]:
        assert refs
        assert num_returns == 1
        self.on_wait()
        for _ in range(100):
            done = [ref for ref in refs if ref.value is not PENDING]
            if done:
                return done[:1], [ref for ref in refs if ref is not done[0]]
            self.now += 1
            for actor in self.actors:
                actor.tick(self.now)
        return [], list(refs)

    def get(self, ref: Ref) -> Any:
        assert ref.value is not PENDING
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: FakeActor) -> None:
        actor.killed = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def available_resources(self) -> dict[str, float]:
        return {}
