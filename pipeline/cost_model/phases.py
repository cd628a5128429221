"""Seconds by phase, in closed form: what `plan` says. docs/plan.md holds the arithmetic; the simulator checks it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.cost_model.rates import Rates
from pipeline.cost_model.rounding_work import round_seconds
from pipeline.cost_model.solve_work import SolveWork
from pipeline.cost_model.work import LayerWork
from pipeline.driver.in_flight import AHEAD
from pipeline.units.scores import scorers, shards_each

START_SECONDS = 5.0  # of a local Ray and its workers, as measured on a CPU
WORKERS_SECONDS = 3.0  # of these, the workers': again for each model that is evaluated
ASSEMBLE_SECONDS = 0.5  # besides the last layer: the rest; what counts decoding's costs is imported before
COMMIT_SHARE = 0.05  # of the time of a pass, for writing its hidden states
REPEATED_SECONDS = 600.0  # of work that is lost at most between two commits
THREADS = 16  # of the driver, that take digests
READ_FOR_ALL = 3  # layers: the one at hand, and two ahead (`pipeline.driver.layer_reading`)
BYTES_OF_READING = 2  # a shard's hidden states go in and out


@dataclass(frozen=True)
class Pass:
    """How a job goes through its layers.

    Attributes:
        importance: shards of a pass of its own before the walk (`propagate: compressed` with ranks by importance); 0:
            there is none.
        compressed: whether layers go on with the compressed one's outputs.
        offload: whether hidden states leave the device between layers.
        cached: whether what was read or stored once is still in the nodes' memory (page cache) when it is read again.
        in_pass: whether layers of a dense pass are solved while it goes on, from memory (`pipeline.driver.dense_walk`).
        kept: whether a dense pass stores its moments though layers are solved from memory.
        every: layers between two commits of hidden states; 0: not known yet, or so many that they take little.
        gradient_shards, held_out_shards: those of the backward pass's samples, and of held-out text.
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
    kept: bool = True

    @property
    def stores(self) -> bool:
        """Whether a dense pass stores its moments."""
        return self.kept or not self.in_pass

    @property
    def ahead(self) -> int:
        """Layers of a dense pass whose sums may be on their way to the store when another is begun."""
        return 1 + (self.workers if self.in_pass else self.workers // AHEAD)

    @property
    def from_memory(self) -> bool:
        """Whether layers are solved from what workers have in memory of their moments."""
        return self.compressed or self.in_pass

    @property
    def rounds(self) -> float:
        """How often each worker does a shard, as a multiple of its even part of the tokens."""
        return self.rounds_of(self.shards)

    def rounds_of(self, shards: int) -> float:
        """The same of other shards than the calibration samples'."""
        return math.ceil(shards / self.workers) / shards

    def nodes(self, rates: Rates) -> int:
        """That the workers fill."""
        return math.ceil(self.workers / rates.workers_per_node)

    def source_cached(self, rates: Rates) -> bool:
        """Whether the source is in the nodes' memory: the driver has read it all for its digests, on one node."""
        return self.cached and self.nodes(rates) == 1


def forward_seconds(work: LayerWork, rates: Rates, way: Pass, *, packed: bool = False) -> float:
    """A whole forward pass of all tokens on one worker; hidden states are copied meanwhile.

    `packed`: through what has become of the layer.
    """
    copied = BYTES_OF_READING * work.hidden_bytes / rates.link if way.offload else 0.0
    computed = (work.packed_flops if packed else work.forward_flops) / rates.products
    return max(computed, copied) + commit_seconds(rates, way, way.shards)


def importance_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """A pass that takes cosines alone through a layer, all of its shards on one worker."""
    return forward_seconds(work, rates, way) * way.importance / way.shards + work.cosine_bytes / rates.memory


def commit_seconds(rates: Rates, way: Pass, shards: int) -> float:
    """Of all commits of hidden states at a layer, on one worker, but for their bytes."""
    return shards * rates.commit_s / way.every if way.every else 0.0


def held_out_seconds(flops: float, work: LayerWork, rates: Rates, way: Pass) -> float:
    """All held-out text through a layer on one worker, or as much on several, each of which builds it."""
    building = scorers(way.held_out_shards, way.workers) * work.built_bytes / rates.memory
    return flops / rates.single + building + commit_seconds(rates, way, way.held_out_shards)


def statistics_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """The moments of all tokens on one worker, with the part of the forward pass that they need."""
    moments = work.moment_flops / rates.moments + work.added_bytes / rates.memory
    if way.compressed:
        return work.statistics_flops / rates.products + moments
    return forward_seconds(work, rates, way) + moments + work.cosine_bytes / rates.memory


def grid_seconds(work: LayerWork, rates: Rates) -> float:
    """Until a layer's grids are chosen, before its shards go through it."""
    return work.grid_flops / rates.products


def gradient_seconds(work: LayerWork, rates: Rates) -> float:
    """All samples back through a layer on one worker, and their moments."""
    moments = work.gradient_moment_flops / rates.single + work.gradient_moved_bytes / rates.memory
    return work.gradient_flops / rates.backward + moments


def gradient_grid_seconds(work: LayerWork, rates: Rates) -> float:
    """Until the grids of a layer's gradients are chosen, before its samples go back through it."""
    return work.gradient_grid_flops / rates.backward


def gradient_sums(work: LayerWork) -> LayerWork:
    """The same layer, its sums those of gradients: for the seconds in which these are given away, added and stored."""
    return replace(work, moment_bytes=work.gradient_bytes)


def correction_seconds(work: LayerWork, rates: Rates) -> float:
    """All passes of both layers on one worker, and the adding of their pairs."""
    return work.correction_flops / rates.products + work.pair_added_bytes / rates.memory


def pair_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """What is waited for at the points of a corrected layer, in all: grids, by one micro-batch through both models, and
    the sums on their way to where they are solved from, as those of moments."""
    given = replace(work, moment_bytes=sum(work.pair_bytes))
    summing = collect_seconds(given, rates) + add_seconds(given, rates, way)
    return 2 * len(work.pair_bytes) * grid_seconds(work, rates) + summing + given.moment_bytes / rates.link


def solve_seconds(solve: SolveWork, rates: Rates) -> float:
    """One task on one worker."""
    products = solve.flops - solve.eigen_flops - solve.factor_flops
    seconds = products / rates.double + solve.eigen_flops / rates.eigen + solve.factor_flops / rates.factors
    seconds += solve.moved_bytes / rates.memory
    return seconds + solve.sample_flops / rates.products + solve.steps * rates.step_s


def read_seconds(work: LayerWork, rates: Rates, way: Pass, *, shared: bool = True) -> float:
    """A layer by each node; `shared`: as in a dense pass, its part of the tensors, of which none is cut."""
    part = max(work.weight_bytes / way.nodes(rates), work.largest_bytes) if shared else work.weight_bytes
    return part / (rates.link if way.source_cached(rates) else rates.disk)


def pass_on_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """The parts of a layer that other nodes have read, over the network to each node."""
    return work.weight_bytes * (1 - 1 / way.nodes(rates)) / rates.network


def collect_seconds(work: LayerWork, rates: Rates) -> float:
    """A worker's sums of a layer from its device to where workers pass tensors on."""
    return work.moment_bytes / rates.link


def add_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """Until a layer's sums are added, part by part, on each node and then across them, beside what the workers compute.

    A worker takes a part of all sums of its node to its device, where numbers are read twice and written once, and
    gives one sum back; what another node has summed comes over the network.
    """
    here, nodes = min(way.workers, rates.workers_per_node), way.nodes(rates)
    seconds = 0.0
    for given, share in zip((here, nodes), (1 / here, 1 / way.workers), strict=True):
        if given > 1:
            crossing = (given + 1) * share / rates.link if rates.link < rates.memory else 0.0
            seconds += work.moment_bytes * (crossing + 3 * (given - 1) * share / rates.memory)
    return seconds + cross_seconds(work, rates, way)


def cross_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """What other nodes have summed of a layer, over the network to each node."""
    return work.moment_bytes * (1 - 1 / way.nodes(rates)) / rates.network


def store_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """A layer's sums, by one worker, the parts from other nodes included."""
    return max(work.moment_bytes / rates.disk, work.moment_bytes * (1 - 1 / way.nodes(rates)) / rates.network)


def fetch_seconds(work: LayerWork, rates: Rates) -> float:
    """What a task waits for its moments, which are in memory, on their way from the workers."""
    return work.moment_bytes / max(1, len(work.solves)) / rates.link


def phase_seconds(work: LayerWork, rates: Rates, way: Pass) -> dict[str, float]:
    """Phase -> seconds of the whole job, in the order in which they come."""
    nodes, layers = way.nodes(rates), way.layers
    reading = read_seconds(work, rates, way, shared=False)  # each node reads each layer
    shared, passing_on = read_seconds(work, rates, way), pass_on_seconds(work, rates, way)
    statistics = statistics_seconds(work, rates, way) * way.rounds + grid_seconds(work, rates)
    solves = [solve_seconds(solve, rates) for solve in work.solves]
    collecting, adding = collect_seconds(work, rates), add_seconds(work, rates, way)
    getting = getting_seconds(work, rates, way)
    found = {"digests": digest_seconds(work, rates, way), "start": START_SECONDS}
    if way.compressed:
        if way.importance:
            seconds = importance_seconds(work, rates, way) * way.rounds_of(way.importance)
            found["importance"] = layers * max(seconds, shared, passing_on)
        found["statistics"] = layers * max(statistics, reading)
        found["reduce"] = layers * (collecting + adding)
        found["solve"] = layers * _spread([seconds + getting for seconds in solves], way.workers)
        onward = forward_seconds(work, rates, way, packed=True) * way.rounds
        found["propagate"] = (layers - 1) * max(onward, work.written_bytes / rates.disk)
    else:
        # Sums are given away, added and stored, and a layer written, while others are computed.
        storing = store_seconds(work, rates, way) if way.stores else 0.0
        reads_disk = 0.0 if way.source_cached(rates) else shared
        through = (statistics + collecting + adding + storing) / (1 + way.ahead)  # so many under way at once
        spread = _spread([seconds + getting for seconds in solves for _ in range(layers)], way.workers)
        writing = work.written_bytes / nodes / rates.disk
        on_disk = reads_disk + storing / nodes
        beside = max(collecting, adding, cross_seconds(work, rates, way) + passing_on)
        found["statistics"] = layers * max(statistics, beside, through, on_disk)
        if way.in_pass:  # what is written, too, but for the last layers: they are written when they are solved
            last = min(layers, way.workers + 1)
            waits = layers * (on_disk + writing) - found["statistics"] - spread
            found["statistics"] += max(0.0, waits)
            found["solve"] = max(spread, layers * _spread(solves, way.workers) / way.workers) + last * writing
        else:
            from_disk = 0.0 if way.cached else work.moment_bytes
            found["solve"] = max(spread, layers * (from_disk / nodes / rates.disk + writing))
        found["reduce"] = collecting + adding
    again = 0.0 if way.cached else work.weight_bytes / rates.disk
    if work.correction_flops:  # a layer at a time, and what has become of it written at each point
        found["solve"] = layers * (_spread(solves, way.workers) + 4 * work.written_bytes / rates.disk)
    if work.gradient_flops:
        computing = gradient_seconds(work, rates) * way.rounds_of(way.gradient_shards)
        computing += gradient_grid_seconds(work, rates)
        sums = gradient_sums(work)
        collecting, adding = collect_seconds(sums, rates), add_seconds(sums, rates, way)
        storing = store_seconds(sums, rates, way)
        through = (computing + collecting + adding + storing) / (2 + way.workers // AHEAD)
        found["gradient"] = layers * max(computing, again + storing / nodes, collecting, adding, through)
    if work.curves:
        found["curves"] = _spread([solve_seconds(curve, rates) for curve in work.curves] * layers, way.workers)
    if work.rounding:
        found["round"] = _spread([round_seconds(task, rates) for task in work.rounding], way.workers)
    if work.correction_flops:
        found["correct"] = layers * (correction_seconds(work, rates) * way.rounds + pair_seconds(work, rates, way))
    written = 0.0 if way.cached else work.written_bytes / rates.disk
    windows, by = way.held_out_shards, scorers(way.held_out_shards, way.workers)
    share = by * shards_each(windows, way.workers) / windows / way.workers
    through = share * sum(held_out_seconds(flops, work, rates, way) for flops in work.held_out_flops)
    # Workers that solves leave idle go through held-out text, and one of them through both models side by side.
    comparing = layers * compare_seconds(work, rates, way) if work.compare_flops else 0.0
    held_out = layers * max(through, again + written) if any(work.held_out_flops) else 0.0
    every = sum(solves) + (0.0 if work.correction_flops else len(solves) * getting)
    idle = max(0.0, found["solve"] - layers * every / way.workers) if way.workers > 1 else 0.0
    left = max(0.0, held_out + (comparing / way.workers if way.workers > 1 else 0.0) - idle)
    if comparing:
        found["compare"] = comparing if way.workers == 1 else max(0.0, comparing - found["solve"] - left)
    found["verify"] = verify_seconds(work, rates)
    if held_out:
        found["held-out"] = left
    found["assemble"] = ASSEMBLE_SECONDS + work.written_bytes / rates.disk
    return found


def evaluate_seconds(flops: float, rates: Rates, workers: int) -> float:
    """To score a model, by its operations on the whole text, in float32."""
    return flops / rates.single / workers


def getting_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """What a task waits for its moments."""
    return fetch_seconds(work, rates) if way.from_memory else reread_seconds(work, rates, way)


def reread_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """What a task of a dense pass waits for its moments, which the workers of a node read at once."""
    rate = rates.link if way.cached else rates.disk / min(way.workers, rates.workers_per_node)
    return work.moment_bytes / max(1, len(work.solves)) / rate


def digest_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """Of the source, by the driver, before anything starts."""
    return way.layers * work.weight_bytes / min(rates.disk, rates.digest)


def verify_seconds(work: LayerWork, rates: Rates) -> float:
    """Until one of the driver's threads has held a staged layer against its digest: the last one's is waited for."""
    return work.written_bytes / (rates.digest / THREADS)


def compare_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """A layer of both models on one worker, which reads the dense one ahead, or has it where others just read it."""
    rate = rates.link if way.cached else rates.disk
    shared = way.workers > 1 and any(work.held_out_flops)
    dense = work.weight_bytes / (rates.link if shared else rate)
    building = 2 * work.built_bytes / rates.memory
    return max(dense, work.written_bytes / rate + building + work.compare_flops / rates.single)


def committing_seconds(work: LayerWork, rates: Rates, way: Pass) -> float:
    """What one commit of all hidden states keeps workers from: its bytes, its files; in a dense pass the layer's sums,
    which are entered with it, are waited for."""
    waiting = 0.0
    if not way.compressed:
        waiting = collect_seconds(work, rates) + add_seconds(work, rates, way) + store_seconds(work, rates, way)
    return work.hidden_bytes / way.nodes(rates) / rates.disk + way.rounds * way.shards * rates.commit_s + waiting


def layers_per_commit(work: LayerWork, rates: Rates, way: Pass) -> int:
    """How many layers pass between two commits of hidden states: `resume.every: auto`.

    The fewest with which every pass takes `COMMIT_SHARE` of its time or less for them; fewer, at least one, where a
    kill would cost more than `REPEATED_SECONDS`.
    """
    phases = phase_seconds(work, rates, way)
    walk = sum(phases.get(name, 0.0) for name in ("statistics", "reduce", "propagate"))
    walk += phases["solve"] if way.from_memory else 0.0  # else layers are solved when the pass is over
    # Importance alone commits no more of the hidden states than it makes: as if it went through all of them.
    alone = phases.get("importance", 0.0) * way.shards / max(1, way.importance)
    passes = [seconds / way.layers for seconds in (alone, walk) if seconds]
    if not passes:
        return 1
    rare = math.ceil(committing_seconds(work, rates, way) / (COMMIT_SHARE * min(passes)))
    return max(1, min(rare, way.layers, int(REPEATED_SECONDS / max(passes))))


def committed_bytes(work: LayerWork, way: Pass, every: int) -> int:
    """Of hidden states, over the whole job: every so many layers, but not what leaves the last."""
    commits = (way.layers - 1) // every
    return commits * work.hidden_bytes + commits * work.hidden_bytes * way.importance // way.shards


def object_store_bytes(work: LayerWork, rates: Rates, way: Pass) -> int:
    """At most at a time on a node, of what workers pass on to one another through Ray's object store.

    By phase: the sums of the layers that are on their way to the store, each worker's, the node's and all nodes', with
    the samples, and layers that are read for all nodes; where layers are solved in that pass, the added sums of those
    that wait for it, and the factors of as many; those of gradients alike; the sums of a correction's
    pair; the factors of layers that are being solved and written.
    """
    here, nodes = min(way.workers, rates.workers_per_node), way.nodes(rates)
    sums = here + (here > 1) + (nodes > 1)  # each worker's, the node's, all nodes'
    under_way = 1 if way.compressed else 2 if way.in_pass else 1 + way.ahead
    passing = under_way * sums * work.moment_bytes + work.sample_bytes
    gradients = (2 + way.workers // AHEAD) * sums * work.gradient_bytes
    read = READ_FOR_ALL * work.weight_bytes if nodes > 1 else 0
    pairs = sums * max(work.pair_bytes, default=0)
    in_hand = 1 if way.compressed or work.pair_bytes else math.ceil(2 * (way.workers + 1) / nodes)
    if way.in_pass:
        waiting = math.ceil(min(2 * way.workers, way.layers) / nodes)
        return passing + read + waiting * work.moment_bytes + in_hand * work.written_bytes
    return max(passing + read, gradients, pairs, in_hand * work.written_bytes)


def _spread(seconds: Sequence[float], workers: int) -> float:
    """The longest first, each to whoever is done first."""
    busy = [0.0] * workers
    for amount in sorted(seconds, reverse=True):
        first = busy.index(min(busy))
        busy[first] += amount
    return max(busy)
