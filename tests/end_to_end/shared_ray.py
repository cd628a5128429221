"""Shares one local Ray and one set of worker processes among all jobs of a test session.

The cluster, the actors and their object store are real, but processes import torch only
once: when a job ends, the next job gets its actors.
"""

from __future__ import annotations

from typing import Any

import ray

from workers.actor import BESIDE, WorkerActor
from workers.pool import Member, RayPool

SECONDS = 20.0


class KeptActor(WorkerActor):
    """A `WorkerActor` whose process outlives the job."""

    def __init__(self) -> None:
        """Do nothing; `begin` creates the worker."""

    def begin(self, pickled_setup: bytes) -> dict[str, Any]:
        """Do the work of `WorkerActor.__init__`."""
        super().__init__(pickled_setup)
        return self.ready()


class KeptPool(RayPool):
    """A `RayPool` that reuses idle actors."""

    idle: list[Any]

    def _start(self) -> Member:
        beside: Any = ray.remote(concurrency_groups=BESIDE)
        actor_class = beside(KeptActor)
        actor = self.idle.pop() if self.idle else actor_class.options(num_cpus=1).remote()
        return Member(actor, actor.begin.remote(self.pickled_setup))

    def close(self) -> None:
        """Keep the living idle actors."""
        for member in self.members:
            pending = [member.ready, *member.running]
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=SECONDS)
            if len(done) < len(pending):
                ray.kill(member.actor)
            else:
                self.idle.append(member.actor)
        self.members = []
        self.watch.close()
