"""The passes of a job through its layers, as the cost model counts them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.cost_model.planned_job import PlannedJob
from pipeline.driver.in_flight import layers_ahead
from pipeline.driver.job_spec import solves_in_pass


@dataclass(frozen=True)
class PlannedPasses:
    """The passes of a job through its layers.

    Attributes:
        importance: shards of a separate pass before the walk (`propagate: compressed` with ranks by importance), or 0.
        compressed: the inputs of a layer are the outputs of compressed layers.
        cached: data remains in the nodes' page cache until it is read again.
        in_pass: layers are solved during the dense pass, from memory (`pipeline.driver.dense_walk`).
        keep_statistics: a dense pass stores its moments even if layers are solved from memory.
        joined: held-out text passes the dense model together with both texts, before all other passes.
        every: layers between two commits of hidden states; 0: unknown, or so many that commits are cheap.
        gradient_shards, held_out_shards: shards of the backward pass's samples, and of held-out text.
        local_gradients: gradients are random at each layer's output, so that none are committed.
    """

    layers: int
    shards: int
    workers: int
    importance: int = 0
    compressed: bool = False
    cached: bool = False
    gradient_shards: int = 1
    held_out_shards: int = 1
    every: int = 0
    in_pass: bool = False
    keep_statistics: bool = True
    joined: bool = False
    local_gradients: bool = False

    @property
    def stores(self) -> bool:
        """Return True if the moments of all layers are stored."""
        return self.keep_statistics or not self.from_memory

    @property
    def held_out_models(self) -> int:
        """Return the number of models that held-out text passes in the phase of that name."""
        return 1 if self.joined else 2

    @property
    def ahead(self) -> int:
        """Return the number of layers whose sums may still be reduced or stored when the next layer starts."""
        return 1 + self.workers if self.in_pass else layers_ahead(self.workers)

    @property
    def in_flight(self) -> int:
        """Return the number of layers whose sums the workers exchange at the same time."""
        return 1 if self.compressed else 2 if self.in_pass else 1 + self.ahead

    @property
    def waiting(self) -> int:
        """Return the number of layers whose sums wait in memory to be solved during the pass."""
        return min(2 * self.workers, self.layers) if self.in_pass else 0

    @property
    def from_memory(self) -> bool:
        """Return True if layers are solved from moments in the workers' memory."""
        return self.compressed or self.in_pass

    @property
    def commits(self) -> int:
        """Return the number of layers whose hidden states are committed in a pass; 0 if commits are not counted."""
        return (self.layers - 1) // self.every if self.every else 0

    @property
    def rounds(self) -> float:
        """Return the busiest worker's share of all shards."""
        return self.rounds_of(self.shards)

    def rounds_of(self, shards: int) -> float:
        """Return the busiest worker's share of this number of shards."""
        return math.ceil(shards / self.workers) / shards


def planned_passes(job: PlannedJob) -> PlannedPasses:
    """Return the passes of a job."""
    manifest, geometry, passes = job.manifest, job.geometry, job.passes
    calibration = manifest.calibration
    shards = passes.shards if calibration else geometry.num_layers
    compressed = passes.propagate == "compressed"
    return PlannedPasses(
        geometry.num_layers,
        shards,
        min(manifest.workers.max, shards),
        len(passes.importance_shards) if compressed and "importance" in passes.scores else 0,
        compressed,
        every=manifest.resume.every if isinstance(manifest.resume.every, int) else 0,
        gradient_shards=max(1, len(passes.gradient_shards)),
        local_gradients=passes.gradient == "local",
        held_out_shards=max(1, min(shards, job.held_out_windows)),
        in_pass=solves_in_pass(passes.propagate, job.tasks, ranks_wait=bool(passes.scores or job.predicted)),
        keep_statistics=passes.keep_statistics,
        joined=calibration is not None and geometry.streams(manifest.workers.experts),
    )
