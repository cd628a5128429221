"""Seconds of a job by phase, in closed form. docs/plan.md has the arithmetic; a simulator in `tools` checks it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.cost_model.rates import Rates
from pipeline.cost_model.rounding_work import round_seconds
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.cost_model.work import LayerWork
from pipeline.driver.in_flight import AHEAD
from pipeline.driver.layer_reading import LAYERS_AHEAD
from pipeline.driver.layer_solving import layers_written_together
from pipeline.units.scores import scorers, shards_per_worker

START_SECONDS = 5.0  # start of a local Ray and its workers, measured on a CPU
WORKERS_SECONDS = 3.0  # the workers' part of it, which is repeated for every evaluated model
ASSEMBLE_SECONDS = 0.5  # without the last layer
DIGEST_THREADS = 16  # as `stores.threads`
COPIES = 2  # a shard's hidden states are copied to the device and back


@dataclass(frozen=True)
class PlannedPasses:
    """The passes of a job through its layers.

    Attributes:
        importance: shards of a separate pass before the walk (`propagate: compressed` with ranks by importance), or 0.
        compressed: the inputs of a layer are the outputs of compressed layers.
        offload: hidden states leave the device between layers.
        cached: data remains in the nodes' page cache until it is read again.
        in_pass: layers are solved during the dense pass, from memory (`pipeline.driver.dense_walk`).
        keep_statistics: a dense pass stores its moments even if layers are solved from memory.
        joined: held-out text passes the dense model together with both texts, before all other passes.
        every: layers between two commits of hidden states; 0: unknown, or so many that commits are cheap.
        gradient_shards, held_out_shards: shards of the backward pass's samples, and of held-out text.
    """

    layers: int
    shards: int
    workers: int
    importance: int
    compressed: bool
    offload: bool = False
    cached: bool = False
    gradient_shards: int = 1
    held_out_shards: int = 1
    every: int = 0
    in_pass: bool = False
    keep_statistics: bool = True
    joined: bool = False

    @property
    def stores(self) -> bool:
        """Return True if a dense pass stores its moments."""
        return self.keep_statistics or not self.in_pass

    @property
    def held_out_models(self) -> int:
        """Return the number of models that held-out text passes in the phase of that name."""
        return 1 if self.joined else 2

    @property
    def ahead(self) -> int:
        """Return the number of layers whose sums may still be reduced or stored when the next layer starts."""
        return 1 + (self.workers if self.in_pass else self.workers // AHEAD)

    @property
    def from_memory(self) -> bool:
        """Return True if layers are solved from moments in the workers' memory."""
        return self.compressed or self.in_pass

    @property
    def rounds(self) -> float:
        """Return the busiest worker's share of all shards."""
        return self.rounds_of(self.shards)

    def rounds_of(self, shards: int) -> float:
        """Return the busiest worker's share of this number of shards."""
        return math.ceil(shards / self.workers) / shards

    def nodes(self, rates: Rates) -> int:
        """Return the number of nodes with workers."""
        return math.ceil(self.workers / rates.workers_per_node)

    def source_cached(self, rates: Rates) -> bool:
        """Return True if the source is in the page cache of all nodes, because the only node read it for digests."""
        return self.cached and self.nodes(rates) == 1


def forward_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses, *, packed: bool = False) -> float:
    """Return the time of a forward pass of all tokens through a layer on one worker, while hidden states are copied.

    `packed`: through the compressed layer.
    """
    copied = COPIES * work.hidden_bytes / rates.link if passes.offload else 0.0
    computed = (work.packed_flops if packed else work.forward_flops) / rates.products
    return max(computed, copied) + commit_seconds(rates, passes, passes.shards)


def importance_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time of a pass of the importance shards through a layer on one worker, with cosines, no moments."""
    return forward_seconds(work, rates, passes) * passes.importance / passes.shards + work.cosine_bytes / rates.memory


def commit_seconds(rates: Rates, passes: PlannedPasses, shards: int) -> float:
    """Return the time of a layer's commits of hidden states on one worker, without writing their bytes."""
    return shards * rates.commit_s / passes.every if passes.every else 0.0


def held_out_seconds(flops: float, work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time of a pass of all held-out text through a layer on one worker. Every scorer builds the layer."""
    building = scorers(passes.held_out_shards, passes.workers) * work.built_bytes / rates.memory
    return flops / rates.single + building + commit_seconds(rates, passes, passes.held_out_shards)


def statistics_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time of all tokens' moments on one worker, with the part of the forward pass that they need."""
    moments = work.moment_flops / rates.moments + work.added_bytes / rates.memory
    if passes.compressed:
        return work.statistics_flops / rates.products + moments
    return forward_seconds(work, rates, passes) + moments + work.cosine_bytes / rates.memory


def grid_seconds(work: LayerWork, rates: Rates) -> float:
    """Return the time to choose a layer's grids, before its shards go through it."""
    return work.grid_flops / rates.products


def gradient_seconds(work: LayerWork, rates: Rates) -> float:
    """Return the time of the backward pass of all samples through a layer on one worker, with their moments."""
    moments = work.gradient_moment_flops / rates.single + work.gradient_moved_bytes / rates.memory
    return work.gradient_flops / rates.backward + moments


def gradient_grid_seconds(work: LayerWork, rates: Rates) -> float:
    """Return the time to choose the grids of a layer's gradients, before its backward pass."""
    return work.gradient_grid_flops / rates.backward


def gradient_sums(work: LayerWork) -> LayerWork:
    """Return the work of a layer with the sums of gradients in place of moments, to be collected, added and stored."""
    return replace(work, moment_bytes=work.gradient_bytes)


def correction_seconds(work: LayerWork, rates: Rates) -> float:
    """Return the time of all passes through both layers on one worker, with the sums of their pairs."""
    return work.correction_flops / rates.products + work.pair_added_bytes / rates.memory


def pair_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the waiting time at all points of a corrected layer: for grids, from a micro-batch through both models,
    and for sums, which are reduced like moments."""
    pairs = replace(work, moment_bytes=sum(work.pair_bytes))
    summing = collect_seconds(pairs, rates) + add_seconds(pairs, rates, passes)
    return 2 * len(work.pair_bytes) * grid_seconds(work, rates) + summing + pairs.moment_bytes / rates.link


def read_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses, *, shared: bool = True) -> float:
    """Return the time in which a node reads a layer, or only its part of the tensors if reading is `shared`."""
    part = max(work.weight_bytes / passes.nodes(rates), work.largest_bytes) if shared else work.weight_bytes
    return part / (rates.link if passes.source_cached(rates) else rates.disk)


def pass_on_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to receive the parts of a layer that other nodes have read."""
    return work.decoded_bytes * (1 - 1 / passes.nodes(rates)) / rates.network


def collect_seconds(work: LayerWork, rates: Rates) -> float:
    """Return the time to copy a worker's sums of a layer from its device to the object store."""
    return work.moment_bytes / rates.link


def add_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to add a layer's sums on each node and then across nodes, while the workers compute.

    A worker copies its part of all sums of its node to its device, where each addition reads two numbers and writes
    one, and copies one sum back. The sums of other nodes come over the network.
    """
    here, nodes = min(passes.workers, rates.workers_per_node), passes.nodes(rates)
    seconds = 0.0
    for count, share in zip((here, nodes), (1 / here, 1 / passes.workers), strict=True):
        if count > 1:
            copying = (count + 1) * share / rates.link if rates.link < rates.memory else 0.0
            seconds += work.moment_bytes * (copying + 3 * (count - 1) * share / rates.memory)
    return seconds + cross_seconds(work, rates, passes)


def cross_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to receive the sums of other nodes."""
    return work.moment_bytes * (1 - 1 / passes.nodes(rates)) / rates.network


def store_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time in which one worker stores a layer's sums, with the parts from other nodes."""
    return max(work.moment_bytes / rates.disk, work.moment_bytes * (1 - 1 / passes.nodes(rates)) / rates.network)


def phase_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> dict[str, float]:
    """Return the seconds of each phase of the job, in order."""
    layers = passes.layers
    phases = {"digests": digest_seconds(work, rates, passes), "start": START_SECONDS}
    phases |= (_compressed_phases if passes.compressed else _dense_phases)(work, rates, passes)
    if work.correction_flops or work.refinement.steps:  # one layer at a time, written at four points and when trained
        solves = [solve_seconds(solve, rates) for solve in work.solves]
        written = (4 if work.correction_flops else 1) + (work.refinement.steps > 0)
        together = (
            min(layers, passes.workers) if work.refinement.independent else 1
        )  # layers that are solved side by side
        solving = layers / together * _spread(solves * together, passes.workers)
        phases["solve"] = solving + layers * written * work.written_bytes / rates.disk
    if work.gradient_flops:
        phases["gradient"] = layers * _gradient_layer_seconds(work, rates, passes)
    if work.curves:
        phases["curves"] = _spread([solve_seconds(curve, rates) for curve in work.curves] * layers, passes.workers)
        phases["curves"] = max(phases["curves"], layers * streamed_seconds(work, rates, passes))
    if work.rounding:
        phases["round"] = _spread([round_seconds(task, rates) for task in work.rounding], passes.workers)
        if work.curves:
            phases["curves"] += work.trials * phases["round"]
    if work.correction_flops:
        seconds = correction_seconds(work, rates) * passes.rounds + pair_seconds(work, rates, passes)
        phases["correct"] = layers * seconds
    if work.refinement.steps:
        phases["refine"] = work.refinement.seconds(
            rates, passes.rounds, passes.cached, layers, passes.workers, passes.nodes(rates)
        )
    phases |= _scoring_phases(work, rates, passes, phases["solve"])
    phases["assemble"] = ASSEMBLE_SECONDS + work.written_bytes / rates.disk
    return phases


def _compressed_phases(work: LayerWork, rates: Rates, passes: PlannedPasses) -> dict[str, float]:
    """Return the phases of a walk behind compressed layers, one layer after another."""
    layers, phases = passes.layers, {}
    if passes.importance:
        seconds = importance_seconds(work, rates, passes) * passes.rounds_of(passes.importance)
        reading = max(read_seconds(work, rates, passes), pass_on_seconds(work, rates, passes))
        phases["importance"] = layers * max(seconds, reading)
    statistics = statistics_seconds(work, rates, passes) * passes.rounds + grid_seconds(work, rates)
    phases["statistics"] = layers * max(statistics, read_seconds(work, rates, passes, shared=False))
    phases["reduce"] = layers * (collect_seconds(work, rates) + add_seconds(work, rates, passes))
    waiting = moment_wait_seconds(work, rates, passes)
    solves = [solve_seconds(solve, rates) + waiting for solve in work.solves]
    phases["solve"] = layers * _spread(solves, passes.workers)
    onward = forward_seconds(work, rates, passes, packed=True) * passes.rounds
    phases["propagate"] = (layers - 1) * max(onward, work.written_bytes / rates.disk)
    return phases


def _dense_phases(work: LayerWork, rates: Rates, passes: PlannedPasses) -> dict[str, float]:
    """Return the phases of a dense pass, which computes layers while others are summed, stored and written."""
    nodes, layers = passes.nodes(rates), passes.layers
    inputs = work.gradient_input_bytes / rates.disk
    statistics = (statistics_seconds(work, rates, passes) + inputs) * passes.rounds + grid_seconds(work, rates)
    statistics += work.sample_bytes / rates.disk  # the pass waits until they are stored
    collecting, adding = collect_seconds(work, rates), add_seconds(work, rates, passes)
    storing = store_seconds(work, rates, passes) if passes.stores else 0.0
    reading = 0.0 if passes.source_cached(rates) else read_seconds(work, rates, passes)
    on_disk = reading + (storing + inputs) / nodes + work.sample_bytes / rates.disk
    latency = (statistics + collecting + adding + storing) / (1 + passes.ahead)  # several layers at once
    network = cross_seconds(work, rates, passes) + pass_on_seconds(work, rates, passes)
    passing = layers * max(statistics, collecting, adding, network, latency, on_disk)
    solves, waiting = [solve_seconds(solve, rates) for solve in work.solves], moment_wait_seconds(work, rates, passes)
    solving = _spread([seconds + waiting for seconds in solves for _ in range(layers)], passes.workers)
    writing = work.written_bytes / nodes / rates.disk
    if passes.in_pass:  # layers are written during the pass, except the last ones
        last = min(layers, passes.workers + 1)
        disk_wait = layers * (on_disk + writing) - passing - solving
        passing += max(0.0, disk_wait)
        solving = max(solving, layers * _spread(solves, passes.workers) / passes.workers) + last * writing
    else:
        from_disk = 0.0 if passes.cached else work.moment_bytes / nodes / rates.disk
        solving = max(solving, layers * (from_disk + streamed_seconds(work, rates, passes) + writing))
    return {"statistics": passing, "solve": solving, "reduce": collecting + adding}


def _gradient_layer_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the seconds of a layer of the backward pass. Its sums are added and stored while others are computed."""
    computing = gradient_seconds(work, rates) * passes.rounds_of(passes.gradient_shards)
    computing += gradient_grid_seconds(work, rates)
    sums = gradient_sums(work)
    collecting, adding = collect_seconds(sums, rates), add_seconds(sums, rates, passes)
    storing = store_seconds(sums, rates, passes)
    latency = (computing + collecting + adding + storing) / (2 + passes.workers // AHEAD)
    reading = 0.0 if passes.cached else work.weight_bytes / rates.disk
    return max(computing, reading + storing / passes.nodes(rates), collecting, adding, latency)


def _scoring_phases(work: LayerWork, rates: Rates, passes: PlannedPasses, solve: float) -> dict[str, float]:
    """Return the phases after the solves. Workers that are idle during the solves do some of this work then."""
    layers, workers, phases = passes.layers, passes.workers, {}
    reading = 0.0 if passes.cached or passes.joined else work.weight_bytes / rates.disk
    written = 0.0 if passes.cached else work.written_bytes / rates.disk
    windows, by = passes.held_out_shards, scorers(passes.held_out_shards, workers)
    share = by * shards_per_worker(windows, workers) / windows / workers
    models = work.held_out_flops[-passes.held_out_models :]
    scoring = share * sum(held_out_seconds(flops, work, rates, passes) for flops in models)
    held_out = layers * max(scoring, reading + written) if any(work.held_out_flops) else 0.0
    comparing = layers * compare_seconds(work, rates, passes) if work.compare_flops else 0.0
    busy = sum(solve_seconds(each, rates) for each in work.solves)
    busy += 0.0 if work.correction_flops else len(work.solves) * moment_wait_seconds(work, rates, passes)
    idle = max(0.0, solve - layers * busy / workers) if workers > 1 else 0.0
    reads = passes.joined and not passes.cached  # solves keep the disk busy, too
    after = held_out if reads else max(0.0, held_out + (comparing / workers if workers > 1 else 0.0) - idle)
    if comparing:
        phases["compare"] = comparing if workers == 1 or reads else max(0.0, comparing - solve - after)
    phases["verify"] = verify_seconds(work, rates)
    if held_out:
        phases["held-out"] = after
    return phases


def evaluate_seconds(flops: float, rates: Rates, workers: int) -> float:
    """Return the time to score a model. `flops`: operations for the whole text, in float32."""
    return flops / rates.single / workers


def moment_wait_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to load a task's moments from memory, or from the disk that a node's workers share."""
    rate = (
        rates.link if passes.from_memory or passes.cached else rates.disk / min(passes.workers, rates.workers_per_node)
    )
    return work.moment_bytes / max(1, len(work.solves)) / rate


def streamed_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to read a layer with streamed experts for a curve or a solve, 0 without any.

    One worker of a node reads it, and finds it in the node's page cache when it visits the experts again.
    """
    return work.weight_bytes / passes.nodes(rates) / rates.disk if passes.joined and not passes.cached else 0.0


def digest_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to compute the source's digests, before anything else starts."""
    return passes.layers * work.weight_bytes / min(rates.disk, rates.digest)


def verify_seconds(work: LayerWork, rates: Rates) -> float:
    """Return the time in which a thread of the driver verifies the last staged layer."""
    return work.written_bytes / (rates.digest / DIGEST_THREADS)


def compare_seconds(work: LayerWork, rates: Rates, passes: PlannedPasses) -> float:
    """Return the time to compare a layer of both models on one worker. The dense layer is read ahead or cached."""
    rate = rates.link if passes.cached else rates.disk
    shared = passes.workers > 1 and any(work.held_out_flops) and not passes.joined
    dense = work.weight_bytes / (rates.link if shared else rate)
    building = 2 * work.built_bytes / rates.memory
    return max(dense, work.written_bytes / rate + building + work.compare_flops / rates.single)


def object_store_bytes(work: LayerWork, rates: Rates, passes: PlannedPasses) -> int:
    """Return the peak size of Ray's object store on a node.

    It is the maximum over the phases: the pass (sums that are being reduced, samples, layers that are read for all
    nodes and, if layers are solved in the pass, their sums and factors in flight), the backward pass, the pairs of a
    correction, and the factors of layers that are solved and written.
    """
    here, nodes = min(passes.workers, rates.workers_per_node), passes.nodes(rates)
    sums = here + (here > 1) + (nodes > 1)  # each worker's, the node's, all nodes'
    in_flight = 1 if passes.compressed else 2 if passes.in_pass else 1 + passes.ahead
    passing = in_flight * sums * work.moment_bytes + work.sample_bytes
    gradients = (2 + passes.workers // AHEAD) * sums * work.gradient_bytes
    read = (1 + LAYERS_AHEAD) * work.decoded_bytes if nodes > 1 else 0
    pairs = sums * max(work.pair_bytes, default=0)
    in_hand = passes.workers if passes.in_pass else layers_written_together(passes.workers, len(work.solves))
    solved = 1 if passes.compressed or work.pair_bytes else math.ceil(2 * (in_hand + 1) / nodes)
    if passes.in_pass:
        waiting = math.ceil(min(2 * passes.workers, passes.layers) / nodes)
        return passing + read + waiting * work.moment_bytes + solved * work.written_bytes
    return max(passing + read, gradients, pairs, solved * work.written_bytes)


def _spread(seconds: Sequence[float], workers: int) -> float:
    """Return the time for all tasks if each idle worker starts the longest pending one."""
    busy = [0.0] * workers
    for amount in sorted(seconds, reverse=True):
        first = busy.index(min(busy))
        busy[first] += amount
    return max(busy)
