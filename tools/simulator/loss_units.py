"""Units of a job that follows the loss, for the simulator: gradients, curves, corrections, held-out text.

They come in the order in which the modules of `pipeline.driver` schedule them. See docs/plan.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

from pipeline.cost_model.phases import (
    DIGEST_THREADS,
    PlannedPasses,
    add_seconds,
    collect_seconds,
    compare_seconds,
    correction_seconds,
    gradient_grid_seconds,
    gradient_seconds,
    gradient_sums,
    held_out_seconds,
    pair_seconds,
    store_seconds,
    verify_seconds,
)
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.cost_model.work import LayerWork
from pipeline.driver.in_flight import AHEAD
from pipeline.methods.work import Work
from pipeline.units.scores import COMPARED_LAYERS
from tools.simulator.simulator import SHARDS_OF_A_MODEL, Unit

CORRECTED = 5  # passes of both layers: to each of four points, and to the end


Units = Generator[Unit, None, tuple[str, ...]]  # returns the names that later units wait for


def loss_units(work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield gradients and curves, between the dense pass and the solves."""
    if work.gradient_flops:
        after = yield from _gradients(work, rates, passes, after)
    if work.curves:
        after = yield from _curves(work, rates, passes, after)
    return after


def last_units(work: LayerWork, rates: Rates, passes: PlannedPasses, written: Sequence[str]) -> Units:
    """Yield the background units, for workers that solves leave idle.

    They compare both models on a few tokens, and score held-out text by the dense model and by each layer once it is
    `written`. A single worker scores one model after the other.
    """
    if work.compare_flops:
        compared: tuple[str, ...] = ()
        for first in range(0, passes.layers, COMPARED_LAYERS):
            some = tuple(written[first : first + COMPARED_LAYERS])
            seconds = len(some) * compare_seconds(work, rates, passes)
            yield Unit(f"compare {first}", "compare", seconds, (*compared, *some), background=True)
            compared = (f"compare {first}",)
    after: tuple[str, ...] = ("start",)
    ended: tuple[str, ...] = ()
    stored = {"dense": work.weight_bytes, "compressed": work.written_bytes}
    for model, flops in zip(stored, work.held_out_flops, strict=True) if any(work.held_out_flops) else ():
        kind, first = f"held-out {model}", SHARDS_OF_A_MODEL * (1 + (model == "compressed"))
        if passes.workers > 1:  # side by side
            ended, after = (*ended, *after), ("start",)
        for layer in range(passes.layers):
            if model == "compressed":
                after = (*after, written[layer])
            yield from _reads(kind, layer, stored[model], rates, passes, after)
            after = yield from _passes(
                kind,
                "held-out",
                layer,
                held_out_seconds(flops, work, rates, passes),
                passes.held_out_shards,
                after,
                rates,
                passes,
                first=first,
                background=True,
            )
    return (*ended, *after)


def verify_unit(layer: int, work: LayerWork, rates: Rates, after: str) -> Unit:
    """Return the check of a staged layer against its digest, by a thread of the driver and from its node's memory."""
    return Unit(f"verify {layer}", "verify", verify_seconds(work, rates), (after,), f"digest {layer % DIGEST_THREADS}")


def corrected_units(work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield corrections, layer by layer:

    passes of both models to each point, sums of pairs, solves, and a last pass.
    """
    seconds = correction_seconds(work, rates) / CORRECTED
    adding = pair_seconds(work, rates, passes) / (CORRECTED - 1)
    for layer in range(passes.layers):
        yield from _reads("correct", layer, work.weight_bytes, rates, passes, after)
        for step in range(CORRECTED):
            kind = f"correct {step}"
            after = yield from _passes(kind, "correct", layer, seconds, passes.shards, after, rates, passes, "correct")
            if step < CORRECTED - 1:
                yield Unit(f"pair sum {layer} {step}", "reduce", adding, after)
                after = (f"pair sum {layer} {step}",)
                names = tuple(f"solve {layer} {step} {number}" for number in range(len(work.solves)))
                for name, solve in zip(names, work.solves, strict=True):
                    yield Unit(name, "solve", solve_seconds(solve, rates) / (CORRECTED - 1), after)
                yield Unit(f"write {layer} {step}", "write", work.written_bytes / rates.disk, names, "disk 0")
                after = (f"write {layer} {step}",)
        yield verify_unit(layer, work, rates, after[0])
    return after


def refined_units(work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield refinements, layer by layer: solves, a pass that stores targets, a training, and a pass to the end."""
    if work.refinement.independent:
        return (yield from _apart_units(work, rates, passes, after))
    seconds = work.refinement.passes / rates.products / 2
    for layer in range(passes.layers):
        yield from _reads("correct", layer, work.weight_bytes, rates, passes, after)
        names = tuple(f"solve {layer} {number}" for number in range(len(work.solves)))
        for name, solve in zip(names, work.solves, strict=True):
            yield Unit(name, "solve", solve_seconds(solve, rates), after)
        yield Unit(f"write {layer} draft", "write", work.written_bytes / rates.disk, names, "disk 0")
        after = (f"write {layer} draft",)
        after = yield from _passes("targets", "refine", layer, seconds, passes.shards, after, rates, passes, "correct")
        yield Unit(f"refine {layer}", "refine", work.refinement.training_seconds(rates, passes.cached), after)
        yield Unit(f"write {layer}", "write", work.written_bytes / rates.disk, (f"refine {layer}",), "disk 0")
        yield verify_unit(layer, work, rates, f"write {layer}")
        after = (f"write {layer}",)
        after = yield from _passes("onward", "refine", layer, seconds, passes.shards, after, rates, passes, "correct")
    return after


def _apart_units(work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield refinements of as many layers at a time as there are workers: solves side by side, passes that store
    targets, and trainings side by side."""
    seconds = work.refinement.passes / rates.products
    for first in range(0, passes.layers, passes.workers):
        some, ended = range(first, min(first + passes.workers, passes.layers)), list[str]()
        for number, solve in enumerate(work.solves):
            for layer in some:
                yield Unit(f"solve {layer} {number}", "solve", solve_seconds(solve, rates), after)
        for layer in some:
            names = tuple(f"solve {layer} {number}" for number in range(len(work.solves)))
            yield Unit(f"write {layer} draft", "write", work.written_bytes / rates.disk, names, "disk 0")
        after = tuple(f"write {layer} draft" for layer in some)
        for layer in some:
            yield from _reads("correct", layer, work.weight_bytes, rates, passes, after)
            after = yield from _passes(
                "targets", "refine", layer, seconds, passes.shards, after, rates, passes, "correct"
            )
        for layer in some:
            training = work.refinement.training_seconds(rates, passes.cached)
            yield Unit(f"refine {layer}", "refine", training, after)
            yield Unit(f"write {layer}", "write", work.written_bytes / rates.disk, (f"refine {layer}",), "disk 0")
            yield verify_unit(layer, work, rates, f"write {layer}")
            ended.append(f"write {layer}")
        after = tuple(ended)
    return after


def _gradients(work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield gradients of the layers in reverse; sums of one are added and stored while the next are computed."""
    seconds, sums, ahead = gradient_seconds(work, rates), gradient_sums(work), 1 + passes.workers // AHEAD
    stored: list[str] = []
    for layer in range(passes.layers):  # counted from the last
        grids, added = f"gradient grids {layer}", f"gradient add {layer}"
        yield from _reads("gradient", layer, work.weight_bytes, rates, passes, after)
        waits = (*after, f"read gradient {layer} 0")
        yield Unit(grids, "gradient", gradient_grid_seconds(work, rates), waits)
        passed = yield from _passes(
            "gradient", "gradient", layer, seconds, passes.gradient_shards, (grids,), rates, passes
        )
        collects = tuple(f"gradient collect {layer} {worker}" for worker in range(passes.workers))
        for worker, name in enumerate(collects):
            yield Unit(name, "collect", collect_seconds(sums, rates), passed, f"link {worker}")
        yield Unit(added, "add", add_seconds(sums, rates, passes), collects, "lanes")
        stored.append(f"gradient store {layer}")
        yield Unit(
            stored[-1], "store", store_seconds(sums, rates, passes), (added,), f"disk {layer % passes.nodes(rates)}"
        )
        after = (*passed, stored[layer - ahead]) if layer >= ahead else passed
    return tuple(stored)


def _curves(work: LayerWork, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]) -> Units:
    """Yield curves of as many layers at a time as there are workers; long ones are cut where workers would be idle."""
    for first in range(0, passes.layers, passes.workers):
        layers = range(first, min(first + passes.workers, passes.layers))
        long = len(layers) * sum(curve.pieces > 1 for curve in work.curves)
        share = passes.workers // long if long else 1
        joined: list[str] = []
        ordered = sorted(enumerate(work.curves), key=lambda curve: -curve[1].pieces)  # the long ones first
        for (number, curve), layer in itertools.product(ordered, layers):
            name, read = f"curve {layer} {number}", _reread(layer, work, rates, passes)
            if share == 1 or curve.shared is None:
                yield from read(name, after)
                yield Unit(name, "curves", solve_seconds(curve, rates), (f"{name} reread",))
            else:
                yield from _cut(name, curve, min(share, curve.pieces), rates, after, read)
            joined.append(name)
        after = tuple(joined)
    return after


def _cut(
    name: str,
    curve: Work,
    parts: int,
    rates: Rates,
    after: tuple[str, ...],
    read: Callable[[str, tuple[str, ...]], Iterator[Unit]],
) -> Iterator[Unit]:
    """Yield the common start of a curve, then a part of its pieces for each of some workers."""
    assert curve.shared is not None
    begun, whole, again = (
        solve_seconds(curve.shared, rates),
        solve_seconds(curve, rates),
        curve.repeated / rates.double,
    )
    yield from read(f"{name} begun", after)
    yield Unit(f"{name} begun", "curves", begun, (f"{name} begun reread",))
    names = tuple(f"{name} part {part}" for part in range(parts))
    for each in names:
        yield from read(each, (f"{name} begun",))
        yield Unit(each, "curves", (whole - begun) / parts + again, (f"{each} reread",))
    yield Unit(name, "barrier", 0.0, names, f"barrier {name}")


def _reread(
    layer: int, work: LayerWork, rates: Rates, passes: PlannedPasses
) -> Callable[[str, tuple[str, ...]], Iterator[Unit]]:
    """Return a function that yields the read of a task's moments, from a node's memory or its disk."""
    seconds = work.moment_bytes / max(1, len(work.curves)) / (rates.link if passes.cached else rates.disk)

    def read(name: str, after: tuple[str, ...]) -> Iterator[Unit]:
        place = f"memory of {name}" if passes.cached else f"disk {layer % passes.nodes(rates)}"
        yield Unit(f"{name} reread", "reread", seconds, after, place)

    return read


def _reads(
    kind: str, layer: int, stored: int, rates: Rates, passes: PlannedPasses, after: tuple[str, ...]
) -> Iterator[Unit]:
    """Yield the reads of a layer by each node, while the layer before is computed."""
    for node in range(passes.nodes(rates)):
        waits = (f"{kind} barrier {layer - 2}",) if layer >= 2 and kind != "correct" else after
        place = f"memory of node {node}" if passes.cached else f"disk {node}"
        yield Unit(
            f"read {kind} {layer} {node}", "read", stored / (rates.link if passes.cached else rates.disk), waits, place
        )


def _passes(
    kind: str,
    phase: str,
    layer: int,
    seconds: float,
    shards: int,
    after: tuple[str, ...],
    rates: Rates,
    passes: PlannedPasses,
    read: str | None = None,
    first: int = 0,
    background: bool = False,
) -> Units:
    """Yield all shards of a layer, numbered from `first`, and a barrier."""
    names = tuple(f"{kind} {layer} {shard}" for shard in range(shards))
    for shard, name in enumerate(names):
        node = shard % passes.workers // rates.workers_per_node
        waits = (*after, f"read {read or kind} {layer} {node}")
        yield Unit(name, phase, seconds / shards, waits, shard=first + shard, background=background)
    barrier = f"{kind} barrier {layer}"
    yield Unit(barrier, "barrier", 0.0, names, barrier)
    return (barrier,)
