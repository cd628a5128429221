"""The units of a job, for the simulator: passes, sums, solves. See docs/plan.md."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.cost_model.phases import (
    START_SECONDS,
    PlannedPasses,
    add_seconds,
    collect_seconds,
    cross_seconds,
    digest_seconds,
    forward_seconds,
    grid_seconds,
    importance_seconds,
    moment_wait_seconds,
    pass_on_seconds,
    read_seconds,
    statistics_seconds,
    store_seconds,
)
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.cost_model.work import LayerWork
from tools.simulator.loss_units import (
    CORRECTED,
    Units,
    corrected_units,
    last_units,
    loss_units,
    refined_units,
    verify_unit,
)
from tools.simulator.simulator import Unit

PIECES = 8  # writes of a layer's sums


def job_units(work: LayerWork, rates: Rates, passes: PlannedPasses) -> Iterator[Unit]:
    """Yield the units of a job in the order of the driver.

    Each worker sums a layer's moments; the sums are added and stored while the next layers are computed.
    """
    yield Unit("digests", "digests", digest_seconds(work, rates, passes), on="start")
    yield Unit("start", "start", START_SECONDS, ("digests",), on="start")
    before: tuple[str, ...] = ("start",)
    if passes.compressed and passes.importance:
        for layer in range(passes.layers):
            yield from _reads("importance", layer, work, rates, passes, shared=True)
            seconds = importance_seconds(work, rates, passes)
            before = yield from _forward("importance", layer, seconds, before, rates, passes, None, passes.importance)
    stored: list[str] = []
    solving, summed = tuple[str, ...](), list[int]()  # layers solved in the pass: the last batch, and the next
    for layer in range(passes.layers):
        yield from _reads("statistics", layer, work, rates, passes, shared=not passes.compressed)
        added, collected = f"add {layer}", f"collected {layer}"
        seconds = statistics_seconds(work, rates, passes)
        if passes.in_pass and len(summed) > passes.workers:  # all but the last, which is still summed
            before = (*before, *solving)
            solving = yield from _solves_of(summed[:-1], work, rates, passes, before)
            summed = summed[-1:]
        summed.append(layer)
        if work.grid_flops:
            waits = (*before, f"read statistics {layer} 0")
            yield Unit(f"grids {layer}", "statistics", grid_seconds(work, rates), waits)
            before = (f"grids {layer}",)
        forward = yield from _forward("statistics", layer, seconds, before, rates, passes, added)
        collects = tuple(f"collect {layer} {worker}" for worker in range(passes.workers))
        for worker, name in enumerate(collects):
            yield Unit(name, "collect", collect_seconds(work, rates), forward, f"link {worker}")
        yield Unit(collected, "barrier", 0.0, collects, collected)
        yield from _adds(layer, added, collected, work, rates, passes)
        if passes.compressed:
            solved = yield from _solves(layer, work, rates, passes, (added,))
            before = (f"write {layer}",)
            if layer < passes.layers - 1:
                seconds = forward_seconds(work, rates, passes, packed=True)
                passed = yield from _forward("propagate", layer, seconds, solved, rates, passes, None)
                before = (*passed, *before)
        else:
            if passes.stores:
                stored.append(f"store {layer}")
                yield from _stores(
                    layer, store_seconds(work, rates, passes), added, f"disk {layer % passes.nodes(rates)}"
                )
            ahead = passes.ahead
            collects = (f"collected {layer - 1}",) if layer else ()
            entered = (stored[layer - ahead],) if passes.stores and layer >= ahead else ()
            before = (*forward, *collects, *entered)
    written = tuple(f"write {layer}" for layer in range(passes.layers))
    if passes.compressed:
        yield from last_units(work, rates, passes, written)
        return
    if passes.in_pass:
        yield from _solves_of(summed, work, rates, passes, before)
        yield from last_units(work, rates, passes, written)
        return
    ready = yield from loss_units(work, rates, passes, tuple(stored))
    if work.correction_flops:
        yield from corrected_units(work, rates, passes, ready)
        written = tuple(f"{write} {CORRECTED - 2}" for write in written)
    elif work.refinement.steps:
        yield from refined_units(work, rates, passes, ready)
    else:
        for layer in range(passes.layers):
            yield from _solves(layer, work, rates, passes, ready)
    yield from last_units(work, rates, passes, written)


def _forward(
    kind: str,
    layer: int,
    seconds: float,
    after: tuple[str, ...],
    rates: Rates,
    passes: PlannedPasses,
    summed: str | None,
    shards: int | None = None,
) -> Units:
    """Yield a layer's shards, or the first `shards` of them, and a barrier. Return the barrier."""
    names, shards = [], passes.shards if shards is None else shards
    read = "statistics" if kind == "propagate" else kind
    for shard in range(shards):
        node = shard % passes.workers // rates.workers_per_node
        waits = (*after, f"read {read} {layer} {node}")
        names.append(f"{kind} {layer} {shard}")
        yield Unit(names[-1], kind, seconds / shards, waits, shard=shard, summed=summed)
    barrier = f"{kind} {layer}"
    yield Unit(barrier, "barrier", 0.0, tuple(names), on=f"barrier {kind} {layer}")
    return (barrier,)


def _adds(
    layer: int, added: str, collected: str, work: LayerWork, rates: Rates, passes: PlannedPasses
) -> Iterator[Unit]:
    """Yield the addition of a layer's sums, on the workers' second threads, and the transfer that they wait for."""
    crossing = cross_seconds(work, rates, passes)
    before = (collected, f"add {layer - 1}") if crossing and layer else (collected,)
    here = f"add {layer} here" if crossing else added
    yield Unit(here, "add", add_seconds(work, rates, passes) - crossing, before, "lanes")
    if crossing:
        yield Unit(added, "cross", crossing, (here,), "network")


def _stores(layer: int, seconds: float, added: str, disk: str) -> Iterator[Unit]:
    """Yield the writes of a layer's sums, some rows at a time: other requests to the disk come between."""
    names = [f"store {layer} {piece}" for piece in range(PIECES - 1)] + [f"store {layer}"]
    for name, before in zip(names, (added, *names), strict=False):
        yield Unit(name, "store", seconds / PIECES, (before,), disk)


def _reads(
    kind: str, layer: int, work: LayerWork, rates: Rates, passes: PlannedPasses, *, shared: bool
) -> Iterator[Unit]:
    """Yield the reads of a layer by each node, while the layer before it is computed.

    `shared`: each node reads a part, a layer earlier, and passes it on. A source that the driver has just read for its
    digests is read from memory.
    """
    nodes = passes.nodes(rates)
    shared = shared and nodes > 1
    ahead = 3 if shared else 2
    after = (f"{kind} {layer - ahead}",) if layer >= ahead else ("start",)
    seconds = read_seconds(work, rates, passes, shared=shared)
    parts = tuple(f"read {kind} {layer} {node}" for node in range(nodes))
    for node, name in enumerate(parts):
        place = "memory" if passes.source_cached(rates) else "disk"
        yield Unit(f"{name} part" if shared else name, "read", seconds, after, f"{place} {node}")
    if shared:
        read = tuple(f"{name} part" for name in parts)
        yield Unit(f"pass on {kind} {layer}", "pass on", pass_on_seconds(work, rates, passes), read, "network")
        for name in parts:
            yield Unit(name, "barrier", 0.0, (f"pass on {kind} {layer}",), f"barrier {name}")


def _solves(layer: int, work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield a layer's solves, each by a worker that first fetches its moments, and its write. Return the solves."""
    getting = moment_wait_seconds(work, rates, passes)
    names = tuple(f"solve {layer} {number}" for number in range(len(work.solves)))
    for name, solve in zip(names, work.solves, strict=True):
        yield Unit(name, "solve", getting + solve_seconds(solve, rates), after)
    yield Unit(f"write {layer}", "write", work.written_bytes / rates.disk, names, f"disk {layer % passes.nodes(rates)}")
    yield verify_unit(layer, work, rates, f"write {layer}")
    return names


def _solves_of(
    layers: list[int], work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]
) -> Units:
    """Yield the solves of some layers once their sums are added, the first task of each layer first."""
    layer_units = [
        list(each) for each in (_solves(layer, work, rates, passes, (*after, f"add {layer}")) for layer in layers)
    ]
    of_tasks = [unit for units in layer_units for unit in units if unit.kind == "solve"]
    order = {f"solve {layer} {number}": number for layer in layers for number in range(len(work.solves))}
    yield from sorted(of_tasks, key=lambda unit: order[unit.name])
    yield from (unit for units in layer_units for unit in units if unit.kind != "solve")
    return tuple(order)
