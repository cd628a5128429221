"""Units of a job that follows the loss, for the simulator: gradients, curves, corrections, held-out text.

As `pipeline.driver.backward_pass`, `curve_taking`, `correction` and `scoring` hand them out. docs/plan.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from pipeline.cost_model.phases import (
    THREADS,
    Pass,
    add_seconds,
    collect_seconds,
    compare_seconds,
    correction_seconds,
    gradient_grid_seconds,
    gradient_seconds,
    gradient_sums,
    held_out_seconds,
    pair_seconds,
    solve_seconds,
    store_seconds,
    verify_seconds,
)
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.solve_work import SolveWork
from pipeline.cost_model.work import LayerWork
from pipeline.driver.in_flight import AHEAD
from pipeline.units.scores import COMPARED_LAYERS

FORGOTTEN = 1_000_000  # more than there are shards: workers forget those of a model before the next is scored
CORRECTED = 5  # passes of both layers: to each of four points, and to the end


class Timed(NamedTuple):
    """As `tools.simulator.simulator.Unit`, which is made of it."""

    name: str
    kind: str
    seconds: float
    after: tuple[str, ...]
    on: str | None = None  # None: a worker
    shard: int | None = None
    aside: bool = False


Units = Generator[Timed, None, tuple[str, ...]]  # gives what comes after them to wait for


def loss_units(work: LayerWork, rates: Rates, way: Pass, after: tuple[str, ...]) -> Units:
    """Gradients and curves, between the dense pass and the solves."""
    if work.gradient_flops:
        after = yield from _gradients(work, rates, way, after)
    if work.curves:
        after = yield from _curves(work, rates, way, after)
    return after


def last_units(work: LayerWork, rates: Rates, way: Pass, written: Sequence[str]) -> Units:
    """What workers do that solves leave idle: both models side by side on a few tokens, and held-out text through the
    dense model and through each layer when it is `written`; one worker alone goes through one after the other."""
    if work.compare_flops:
        compared: tuple[str, ...] = ()
        for first in range(0, way.layers, COMPARED_LAYERS):
            some = tuple(written[first : first + COMPARED_LAYERS])
            seconds = len(some) * compare_seconds(work, rates, way)
            yield Timed(f"compare {first}", "compare", seconds, (*compared, *some), aside=True)
            compared = (f"compare {first}",)
    after: tuple[str, ...] = ("start",)
    ended: tuple[str, ...] = ()
    stored = {"dense": work.weight_bytes, "compressed": work.written_bytes}
    for model, flops in zip(stored, work.held_out_flops, strict=True) if any(work.held_out_flops) else ():
        kind, first = f"held-out {model}", FORGOTTEN * (1 + (model == "compressed"))
        if way.workers > 1:  # side by side
            ended, after = (*ended, *after), ("start",)
        for layer in range(way.layers):
            if model == "compressed":
                after = (*after, written[layer])
            yield from _reads(kind, layer, stored[model], rates, way, after)
            after = yield from _passes(
                kind,
                "held-out",
                layer,
                held_out_seconds(flops, work, rates, way),
                way.held_out_shards,
                after,
                rates,
                way,
                first=first,
                aside=True,
            )
    return (*ended, *after)


def verify_unit(layer: int, work: LayerWork, rates: Rates, after: str) -> Timed:
    """A staged layer held against its digest by one of the driver's threads, from its node's memory, as it was just
    written."""
    return Timed(f"verify {layer}", "verify", verify_seconds(work, rates), (after,), f"digest {layer % THREADS}")


def corrected_units(work: LayerWork, rates: Rates, way: Pass, after: tuple[str, ...]) -> Units:
    """Layer by layer: both models to a point, whose pairs are added, then what is solved there; at last both to
    the end."""
    seconds = correction_seconds(work, rates) / CORRECTED
    adding = pair_seconds(work, rates, way) / (CORRECTED - 1)
    for layer in range(way.layers):
        yield from _reads("correct", layer, work.weight_bytes, rates, way, after)
        for step in range(CORRECTED):
            kind = f"correct {step}"
            after = yield from _passes(kind, "correct", layer, seconds, way.shards, after, rates, way, "correct")
            if step < CORRECTED - 1:
                yield Timed(f"pair sum {layer} {step}", "reduce", adding, after)
                after = (f"pair sum {layer} {step}",)
                names = tuple(f"solve {layer} {step} {number}" for number in range(len(work.solves)))
                for name, solve in zip(names, work.solves, strict=True):
                    yield Timed(name, "solve", solve_seconds(solve, rates) / (CORRECTED - 1), after)
                yield Timed(f"write {layer} {step}", "write", work.written_bytes / rates.disk, names, "disk 0")
                after = (f"write {layer} {step}",)
        yield verify_unit(layer, work, rates, after[0])
    return after


def _gradients(work: LayerWork, rates: Rates, way: Pass, after: tuple[str, ...]) -> Units:
    """The layers in reverse; the sums of one are given away, added and stored while the next are gone through."""
    seconds, sums, ahead = gradient_seconds(work, rates), gradient_sums(work), 1 + way.workers // AHEAD
    stored: list[str] = []
    for layer in range(way.layers):  # counted from the last
        grids, added = f"gradient grids {layer}", f"gradient add {layer}"
        yield from _reads("gradient", layer, work.weight_bytes, rates, way, after)
        waits = (*after, f"read gradient {layer} 0")
        yield Timed(grids, "gradient", gradient_grid_seconds(work, rates), waits)
        passed = yield from _passes("gradient", "gradient", layer, seconds, way.gradient_shards, (grids,), rates, way)
        collects = tuple(f"gradient collect {layer} {worker}" for worker in range(way.workers))
        for worker, name in enumerate(collects):
            yield Timed(name, "collect", collect_seconds(sums, rates), passed, f"link {worker}")
        yield Timed(added, "add", add_seconds(sums, rates, way), collects, "lanes")
        stored.append(f"gradient store {layer}")
        yield Timed(stored[-1], "store", store_seconds(sums, rates, way), (added,), f"disk {layer % way.nodes(rates)}")
        after = (*passed, stored[layer - ahead]) if layer >= ahead else passed
    return tuple(stored)


def _curves(work: LayerWork, rates: Rates, way: Pass, after: tuple[str, ...]) -> Units:
    """As many layers at a time as there are workers; long curves are cut where workers would have none."""
    for first in range(0, way.layers, way.workers):
        layers = range(first, min(first + way.workers, way.layers))
        long = len(layers) * sum(curve.pieces > 1 for curve in work.curves)
        share = way.workers // long if long else 1
        joined: list[str] = []
        ordered = sorted(enumerate(work.curves), key=lambda curve: -curve[1].pieces)  # the long ones first
        for (number, curve), layer in itertools.product(ordered, layers):
            name, read = f"curve {layer} {number}", _reread(layer, work, rates, way)
            if share == 1 or curve.begun is None:
                yield from read(name, after)
                yield Timed(name, "curves", solve_seconds(curve, rates), (f"{name} reread",))
            else:
                yield from _cut(name, curve, min(share, curve.pieces), rates, after, read)
            joined.append(name)
        after = tuple(joined)
    return after


def _cut(
    name: str,
    curve: SolveWork,
    parts: int,
    rates: Rates,
    after: tuple[str, ...],
    read: Callable[[str, tuple[str, ...]], Iterator[Timed]],
) -> Iterator[Timed]:
    """What all pieces follow from, then a part of them for each of some workers."""
    assert curve.begun is not None
    begun, whole, again = (
        solve_seconds(curve.begun, rates),
        solve_seconds(curve, rates),
        curve.again_flops / rates.double,
    )
    yield from read(f"{name} begun", after)
    yield Timed(f"{name} begun", "curves", begun, (f"{name} begun reread",))
    names = tuple(f"{name} part {part}" for part in range(parts))
    for each in names:
        yield from read(each, (f"{name} begun",))
        yield Timed(each, "curves", (whole - begun) / parts + again, (f"{each} reread",))
    yield Timed(name, "barrier", 0.0, names, f"barrier {name}")


def _reread(layer: int, work: LayerWork, rates: Rates, way: Pass) -> Callable[[str, tuple[str, ...]], Iterator[Timed]]:
    """A task's moments, from a node's memory or its disk."""
    seconds = work.moment_bytes / max(1, len(work.curves)) / (rates.link if way.cached else rates.disk)

    def read(name: str, after: tuple[str, ...]) -> Iterator[Timed]:
        place = f"memory of {name}" if way.cached else f"disk {layer % way.nodes(rates)}"
        yield Timed(f"{name} reread", "reread", seconds, after, place)

    return read


def _reads(kind: str, layer: int, stored: int, rates: Rates, way: Pass, after: tuple[str, ...]) -> Iterator[Timed]:
    """Each node reads a layer while the one before is computed."""
    for node in range(way.nodes(rates)):
        waits = (f"{kind} barrier {layer - 2}",) if layer >= 2 and kind != "correct" else after
        place = f"memory of node {node}" if way.cached else f"disk {node}"
        yield Timed(
            f"read {kind} {layer} {node}", "read", stored / (rates.link if way.cached else rates.disk), waits, place
        )


def _passes(
    kind: str,
    phase: str,
    layer: int,
    seconds: float,
    shards: int,
    after: tuple[str, ...],
    rates: Rates,
    way: Pass,
    read: str | None = None,
    first: int = 0,
    aside: bool = False,
) -> Units:
    """All shards through a layer, and a barrier. `first`: by which shards of other hidden states are told apart."""
    names = tuple(f"{kind} {layer} {shard}" for shard in range(shards))
    for shard, name in enumerate(names):
        node = shard % way.workers // rates.workers_per_node
        waits = (*after, f"read {read or kind} {layer} {node}")
        yield Timed(name, phase, seconds / shards, waits, shard=first + shard, aside=aside)
    barrier = f"{kind} barrier {layer}"
    yield Timed(barrier, "barrier", 0.0, names, barrier)
    return (barrier,)
