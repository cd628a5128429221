"""The seconds of a layer's steps, from its work and a worker's rates. docs/plan.md has the arithmetic.

Plan, remaining time and simulator use these prices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from manifests.schema import Manifest
from pipeline.cost_model.passes import PlannedPasses, planned_passes
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.rates import DIGEST_THREADS, Rates
from pipeline.cost_model.refinement_work import UNREFINED
from pipeline.cost_model.work import LayerWork, layer_work
from pipeline.units.scores import scorers

START_SECONDS = 5.0  # start of a local Ray and its workers, measured on a CPU
WORKERS_SECONDS = 3.0  # the workers' part of it, which is repeated for every evaluated model
ASSEMBLE_SECONDS = 0.5  # without the last layer
LAUNCHES = 40  # `Rates.step_s` per step of training
COPIES = 2  # a shard's hidden states are copied to the device and back


@dataclass(frozen=True)
class Prices:
    """The work of a layer, the rates of a worker, and the passes of a job through its layers."""

    work: LayerWork
    rates: Rates
    passes: PlannedPasses

    @property
    def nodes(self) -> int:
        """The number of nodes with workers."""
        return math.ceil(self.passes.workers / self.rates.workers_per_node)

    @property
    def workers_here(self) -> int:
        """The number of workers of a node."""
        return min(self.passes.workers, self.rates.workers_per_node)

    @property
    def source_cached(self) -> bool:
        """True if the source is in the page cache of all nodes, because the only node read it for digests."""
        return self.passes.cached and self.nodes == 1

    def of_layers_alone(self, manifest: Manifest) -> Prices:
        """Return the prices of the first solve of `budget.measure_layers`: without corrections and training, and
        without rounding if unrounded layers are measured."""
        rounding = {} if manifest.measures_unrounded else self.work.rounding
        work = replace(self.work, rounding=rounding, refinement=UNREFINED)
        return replace(self, work=replace(work, correction_flops=0.0, pair_bytes=(), pair_added_bytes=0.0))

    # -- passes through a layer --------------------------------------------------------------------------------------

    def forward_seconds(self, *, packed: bool = False) -> float:
        """Return the time of a forward pass of all tokens through a layer on one worker, beside its copies.

        `packed`: through the compressed layer.
        """
        work, rates, passes = self.work, self.rates, self.passes
        copied = COPIES * work.hidden_bytes / rates.link
        computed = (work.packed_flops if packed else work.forward_flops) / rates.products
        return max(computed, copied) + self.commit_seconds(passes.shards)

    def importance_seconds(self) -> float:
        """Return the time of a pass of the importance shards through a layer on one worker, with cosines, no
        moments."""
        share = self.passes.importance / self.passes.shards
        return self.forward_seconds() * share + self.work.cosine_bytes / self.rates.memory

    def commit_seconds(self, shards: int) -> float:
        """Return the time of a layer's commits of hidden states on one worker, without writing their bytes."""
        return shards * self.rates.commit_s / self.passes.every if self.passes.every else 0.0

    def held_out_seconds(self, flops: float) -> float:
        """Return the time of a pass of all held-out text through a layer on one worker. Every scorer builds the
        layer."""
        shards = self.passes.held_out_shards
        building = scorers(shards, self.passes.workers) * self.work.built_bytes / self.rates.memory
        return flops / self.rates.single + building + self.commit_seconds(shards)

    def statistics_seconds(self) -> float:
        """Return the time of all tokens' moments on one worker, with the part of the forward pass that they need."""
        work, rates = self.work, self.rates
        moments = work.moment_flops / rates.moments + work.added_bytes / rates.memory
        if self.passes.compressed:
            return work.statistics_flops / rates.products + moments
        return self.forward_seconds() + moments + work.cosine_bytes / rates.memory

    def grid_seconds(self) -> float:
        """Return the time to choose a layer's grids, before its shards go through it."""
        return self.work.grid_flops / self.rates.products

    def gradient_seconds(self) -> float:
        """Return the time of the backward pass of all samples through a layer on one worker, with their moments."""
        work, rates = self.work, self.rates
        moments = work.gradient_moment_flops / rates.single + work.gradient_moved_bytes / rates.memory
        return work.gradient_flops / rates.backward + moments

    def gradient_grid_seconds(self) -> float:
        """Return the time to choose the grids of a layer's gradients, before its backward pass."""
        return self.work.gradient_grid_flops / self.rates.backward

    def correction_seconds(self) -> float:
        """Return the time of all passes through both layers on one worker, with the sums of their pairs."""
        return self.work.correction_flops / self.rates.products + self.work.pair_added_bytes / self.rates.memory

    def training_seconds(self) -> float:
        """Return the time in which a worker trains a layer. Its targets are read from disk, or from the page cache."""
        training, rates = self.work.refinement, self.rates
        reading = training.read_bytes / (rates.link if self.passes.cached else rates.disk)
        computing = training.flops / rates.backward + training.descent / rates.single
        return computing + training.steps * LAUNCHES * rates.step_s + reading

    def refine_seconds(self) -> float:
        """Return the time to train all layers. Each worker writes its shards' targets to its node's disk."""
        training, rates, passes = self.work.refinement, self.rates, self.passes
        trainings = math.ceil(passes.layers / passes.workers) if training.independent else passes.layers
        writing = training.read_bytes / rates.disk
        passing = max(writing / self.nodes, passes.rounds * (training.passing_flops / rates.products + writing))
        return trainings * self.training_seconds() + passes.layers * passing

    def compare_seconds(self) -> float:
        """Return the time to compare a layer of both models on one worker. The dense layer is read ahead or cached."""
        work, rates, passes = self.work, self.rates, self.passes
        rate = rates.link if passes.cached else rates.disk
        shared = passes.workers > 1 and any(work.held_out_flops) and not passes.joined
        dense = work.weight_bytes / (rates.link if shared else rate)
        building = 2 * work.built_bytes / rates.memory
        return max(dense, work.written_bytes / rate + building + work.compare_flops / rates.single)

    # -- reading and writing -----------------------------------------------------------------------------------------

    def read_seconds(self, *, shared: bool = True) -> float:
        """Return the time in which a node reads a layer, or only its part of the tensors if reading is `shared`."""
        work = self.work
        part = max(work.weight_bytes / self.nodes, work.largest_bytes) if shared else work.weight_bytes
        return part / (self.rates.link if self.source_cached else self.rates.disk)

    def read_again_seconds(self) -> float:
        """Return the time in which a node reads a whole layer of the source again, 0 from the page cache."""
        return 0.0 if self.passes.cached else self.work.weight_bytes / self.rates.disk

    def pass_on_seconds(self) -> float:
        """Return the time to receive the parts of a layer that other nodes have read."""
        return self.cross_seconds(self.work.decoded_bytes)

    def moment_wait_seconds(self) -> float:
        """Return the time to load a task's moments from memory, or from the disk that a node's workers share."""
        rates, passes = self.rates, self.passes
        rate = rates.link if passes.from_memory or passes.cached else rates.disk / self.workers_here
        return self.work.moment_bytes / max(1, len(self.work.solves)) / rate

    def stored_seconds(self) -> float:
        """Return the time in which the nodes read a layer's stored moments for curves or solves, and the layer itself
        if its experts are streamed; 0 from the page cache.

        One worker of a node reads the layer, and finds it in the node's page cache when it visits the experts again.
        """
        if self.passes.cached:
            return 0.0
        layer = self.work.weight_bytes / self.nodes / self.rates.disk if self.passes.joined else 0.0
        return self.work.moment_bytes / self.nodes / self.rates.disk + layer

    def write_seconds(self) -> float:
        """Return the time in which a node writes a compressed layer."""
        return self.work.written_bytes / self.rates.disk

    def digest_seconds(self) -> float:
        """Return the time to compute the source's digests, before anything else starts."""
        return self.passes.layers * self.work.weight_bytes / min(self.rates.disk, self.rates.digest)

    def verify_seconds(self) -> float:
        """Return the time in which a thread of the driver verifies the last staged layer."""
        return self.work.written_bytes / (self.rates.digest / DIGEST_THREADS)

    # -- sums of `size` bytes ----------------------------------------------------------------------------------------

    def collect_seconds(self, size: float) -> float:
        """Return the time to copy a worker's sums from its device to the object store."""
        return size / self.rates.link

    def device_add_seconds(self, size: float, count: int) -> float:
        """Return the time to add `count` sums on a worker's device, which each enters and one leaves.

        Each addition reads two numbers and writes one. A single sum needs no addition.
        """
        if count == 1:
            return 0.0
        copying = (count + 1) / self.rates.link if self.rates.link < self.rates.memory else 0.0
        return size * (copying + 3 * (count - 1) / self.rates.memory)

    def add_seconds(self, size: float) -> float:
        """Return the time to add a layer's sums on each node and then across nodes, while the workers compute.

        Each worker of a node adds a part, and later each worker a part of the sums of all nodes.
        """
        here = self.workers_here
        across = self.device_add_seconds(size / self.passes.workers, self.nodes)
        return self.device_add_seconds(size / here, here) + across + self.cross_seconds(size)

    def sum_seconds(self, size: float) -> tuple[float, float, float]:
        """Return the times to collect, to add and to store a layer's sums."""
        return self.collect_seconds(size), self.add_seconds(size), self.store_seconds(size)

    def cross_seconds(self, size: float) -> float:
        """Return the time to receive the parts of other nodes."""
        return size * (1 - 1 / self.nodes) / self.rates.network

    def store_seconds(self, size: float) -> float:
        """Return the time in which one worker stores sums, with the parts from other nodes."""
        return max(size / self.rates.disk, self.cross_seconds(size))


def prices_of(job: PlannedJob, rates: Rates, keep: float = 1.0) -> Prices:
    """Return the prices of a job. `keep`: as in `layer_work`."""
    return Prices(layer_work(job, keep), rates, planned_passes(job))
