"""Seconds of a job by phase, in closed form. docs/plan.md has the arithmetic; a simulator in `tools` checks it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.prices import ASSEMBLE_SECONDS, START_SECONDS, Prices
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.driver.in_flight import layers_ahead
from pipeline.driver.layer_reading import LAYERS_AHEAD
from pipeline.driver.layer_solving import layers_written_together
from pipeline.units.scores import scorers, shards_per_worker

SOLVING = ("solve", "round", "correct", "refine")  # what the driver calls `compress` or `correct`
WALK = ("statistics", "reduce", "solve", "round", "propagate")  # what the driver calls `walk`


def phase_seconds(prices: Prices) -> dict[str, float]:
    """Return the seconds of each phase of the job, in order."""
    work, rates, passes = prices.work, prices.rates, prices.passes
    layers = passes.layers
    phases = {"digests": prices.digest_seconds(), "start": START_SECONDS}
    phases |= (_compressed_phases if passes.compressed else _dense_phases)(prices)
    if work.correction_flops or work.refinement.steps:  # one layer at a time, written at four points and when trained
        solves = [solve_seconds(solve, rates) for solve in work.solves]
        written = (4 if work.correction_flops else 1) + (work.refinement.steps > 0)
        together = min(layers, passes.workers) if work.refinement.independent else 1  # solved side by side
        solving = layers / together * _makespan(solves * together, passes.workers)
        phases["solve"] = solving + layers * written * prices.write_seconds()
    if work.gradient_flops:
        phases["gradient"] = _gradient_seconds(prices)
    if work.curves:
        waiting = prices.moment_wait_seconds()
        curves = _makespan([solve_seconds(curve, rates) + waiting for curve in work.curves] * layers, passes.workers)
        phases["curves"] = max(curves, layers * prices.stored_seconds())
    if work.rounding:
        phases["round"] = _makespan([solve_seconds(task, rates) for task in work.rounding.values()], passes.workers)
        if work.curves:
            phases["curves"] += work.trials * phases["round"]
    if work.correction_flops:
        phases["correct"] = layers * (prices.correction_seconds() * passes.rounds + pair_seconds(prices))
    if work.refinement.steps:
        phases["refine"] = prices.refine_seconds()
    phases |= _scoring_phases(prices, phases["solve"])
    phases["assemble"] = ASSEMBLE_SECONDS + prices.write_seconds()
    return phases


def solving_seconds(phases: Mapping[str, float]) -> float:
    """Return the seconds to solve all layers, with their rounding, corrections and training."""
    return sum(phases.get(name, 0.0) for name in SOLVING)


def scored_seconds(phases: Mapping[str, float], passes: PlannedPasses) -> float:
    """Return the seconds to score one model on held-out text."""
    return phases.get("held-out", 0.0) / passes.held_out_models


def pair_seconds(prices: Prices) -> float:
    """Return the waiting time at all points of a corrected layer: for grids, from a micro-batch through both models,
    and for sums, which are reduced like moments."""
    points, size = len(prices.work.pair_bytes), sum(prices.work.pair_bytes)
    summing = prices.collect_seconds(size) + prices.add_seconds(size)
    return 2 * points * prices.grid_seconds() + summing + size / prices.rates.link


def _compressed_phases(prices: Prices) -> dict[str, float]:
    """Return the phases of a walk behind compressed layers, one layer after another."""
    work, passes, phases = prices.work, prices.passes, dict[str, float]()
    layers = passes.layers
    if passes.importance:
        seconds = prices.importance_seconds() * passes.rounds_of(passes.importance)
        each = max(seconds, prices.read_seconds(), prices.pass_on_seconds())
        size = work.hidden_bytes * passes.importance / passes.shards
        phases["importance"] = layers * each + passes.commits * _commit_wait(prices, each, seconds, size)
    statistics = prices.statistics_seconds() * passes.rounds + prices.grid_seconds()
    phases["statistics"] = layers * max(statistics, prices.read_seconds(shared=False))
    phases["reduce"] = layers * (prices.collect_seconds(work.moment_bytes) + prices.add_seconds(work.moment_bytes))
    waiting = prices.moment_wait_seconds()
    solves = [solve_seconds(solve, prices.rates) + waiting for solve in work.solves]
    phases["solve"] = layers * _makespan(solves, passes.workers)
    onward = prices.forward_seconds(packed=True) * passes.rounds
    each = max(onward, prices.write_seconds())
    commits = passes.commits * _commit_wait(prices, each, onward, work.hidden_bytes)
    phases["propagate"] = (layers - 1) * each + commits
    return phases


def _dense_phases(prices: Prices) -> dict[str, float]:
    """Return the phases of a dense pass, which computes layers while others are summed, stored and written."""
    work, rates, passes = prices.work, prices.rates, prices.passes
    nodes, layers = prices.nodes, passes.layers
    inputs = work.gradient_input_bytes / rates.disk
    statistics = (prices.statistics_seconds() + inputs) * passes.rounds + prices.grid_seconds()
    statistics += work.sample_bytes / rates.disk  # the pass waits until they are stored
    collecting, adding, storing = prices.sum_seconds(work.moment_bytes)
    storing = storing if passes.stores else 0.0
    reading = 0.0 if prices.source_cached else prices.read_seconds()
    on_disk = reading + (storing + inputs) / nodes + work.sample_bytes / rates.disk
    latency = (statistics + collecting + adding + storing) / (1 + passes.ahead)  # several layers at once
    network = prices.cross_seconds(work.moment_bytes) + prices.pass_on_seconds()
    each = max(statistics, collecting, adding, network, latency, on_disk)
    passing = layers * each if work.statistics_flops else 0.0
    if passing and passes.stores:  # otherwise layers are solved before their inputs are dropped, and commits are rare
        size = work.hidden_bytes + work.gradient_input_bytes + work.sample_bytes
        passing += passes.commits * _commit_wait(prices, each, statistics, size, collecting + adding + storing)
    solves, waiting = [solve_seconds(solve, rates) for solve in work.solves], prices.moment_wait_seconds()
    solving = _makespan([seconds + waiting for seconds in solves for _ in range(layers)], passes.workers)
    writing = prices.write_seconds() / nodes
    if passes.in_pass:  # layers are written during the pass, except the last ones
        last = min(layers, passes.workers + 1)
        disk_wait = layers * (on_disk + writing) - passing - solving
        passing += max(0.0, disk_wait)
        solving = max(solving, layers * _makespan(solves, passes.workers) / passes.workers) + last * writing
    else:
        solving = max(solving, layers * (prices.stored_seconds() + writing))
    return {"statistics": passing, "solve": solving, "reduce": collecting + adding}


def _gradient_seconds(prices: Prices) -> float:
    """Return the seconds of the backward pass. Sums of a layer are added and stored while others are computed."""
    work, rates, passes = prices.work, prices.rates, prices.passes
    computing = prices.gradient_seconds() * passes.rounds_of(passes.gradient_shards) + prices.gradient_grid_seconds()
    collecting, adding, storing = prices.sum_seconds(work.gradient_bytes)
    latency = (computing + collecting + adding + storing) / (1 + layers_ahead(passes.workers))
    each = max(computing, prices.read_again_seconds() + storing / prices.nodes, collecting, adding, latency)
    busy = computing + rates.commit_s * passes.gradient_shards * passes.rounds_of(passes.gradient_shards)
    wait = _commit_wait(prices, each, busy, work.gradient_input_bytes, collecting + adding + storing)
    return passes.layers * each + (0 if passes.local_gradients else passes.commits * wait)


def _commit_wait(prices: Prices, each: float, busy: float, size: float, reducing: float = 0.0) -> float:
    """Return the additional seconds of a layer that commits `size` bytes of hidden states. docs/plan.md#commits.

    A layer without a commit takes `each` seconds. A worker computes for `busy` seconds; the workers of a node write to
    one disk, and then wait `reducing` seconds until the layer's sums are stored.
    """
    writing = size / prices.nodes / prices.rates.disk
    computing = busy + writing / prices.workers_here
    return max(0.0, max(computing, writing) + reducing - each)


def _scoring_phases(prices: Prices, solve: float) -> dict[str, float]:
    """Return the phases after the solves. Workers that are idle during the solves do some of this work then."""
    work, rates, passes = prices.work, prices.rates, prices.passes
    layers, workers, phases = passes.layers, passes.workers, dict[str, float]()
    reading = 0.0 if passes.joined else prices.read_again_seconds()
    written = 0.0 if passes.cached else prices.write_seconds()
    windows, by = passes.held_out_shards, scorers(passes.held_out_shards, workers)
    share = by * shards_per_worker(windows, workers) / windows / workers
    scoring = share * sum(map(prices.held_out_seconds, work.held_out_flops[-passes.held_out_models :]))
    held_out = layers * max(scoring, reading + written) if any(work.held_out_flops) else 0.0
    comparing = layers * prices.compare_seconds() if work.compare_flops else 0.0
    busy = sum(solve_seconds(each, rates) for each in work.solves)
    busy += 0.0 if work.correction_flops else len(work.solves) * prices.moment_wait_seconds()
    idle = max(0.0, solve - layers * busy / workers) if workers > 1 else 0.0
    reads = passes.joined and not passes.cached  # solves keep the disk busy, too
    after = held_out if reads else max(0.0, held_out + (comparing / workers if workers > 1 else 0.0) - idle)
    if comparing:
        phases["compare"] = comparing if workers == 1 or reads else max(0.0, comparing - solve - after)
    phases["verify"] = prices.verify_seconds()
    if held_out:
        phases["held-out"] = after
    return phases


def object_store_bytes(prices: Prices) -> int:
    """Return the peak size of Ray's object store on a node.

    It is the maximum over the phases: the pass (sums that are being reduced, samples, layers that are read for all
    nodes and, if layers are solved in the pass, their sums and factors in flight), the backward pass, the pairs of a
    correction, and the factors of layers that are solved and written.
    """
    work, passes = prices.work, prices.passes
    here, nodes = prices.workers_here, prices.nodes
    sums = here + (here > 1) + (nodes > 1)  # each worker's, the node's, all nodes'
    passing = passes.in_flight * sums * work.moment_bytes + work.sample_bytes
    gradients = (1 + layers_ahead(passes.workers)) * sums * work.gradient_bytes
    read = (1 + LAYERS_AHEAD) * work.decoded_bytes if nodes > 1 else 0
    pairs = sums * max(work.pair_bytes, default=0)
    in_hand = passes.workers if passes.in_pass else layers_written_together(passes.workers, len(work.solves))
    solved = 1 if passes.compressed or work.pair_bytes else math.ceil(2 * (in_hand + 1) / nodes)
    if passes.in_pass:
        return passing + read + math.ceil(passes.waiting / nodes) * work.moment_bytes + solved * work.written_bytes
    return max(passing + read, gradients, pairs, solved * work.written_bytes)


def _makespan(seconds: Sequence[float], workers: int) -> float:
    """Return the time for all tasks if each idle worker starts the longest pending one."""
    busy = [0.0] * workers
    for amount in sorted(seconds, reverse=True):
        first = busy.index(min(busy))
        busy[first] += amount
    return max(busy)
