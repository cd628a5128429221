"""Layers solved without a walk: each is written and entered while others are being solved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from manifests.records import StagedRecord
from pipeline.steps import Steps
from pipeline.units import Solve, SolveSizes, Write


class LayerSolves(NamedTuple):
    """What a layer takes.

    Attributes:
        units: solve its groups.
        writes: their results -> the units that write it, for one model or for several.
        enter: takes their results and the records of what is written, one for each of `writes`.
    """

    units: Sequence[Solve | SolveSizes]
    writes: Callable[[list[Any]], list[Write]]
    enter: Callable[[list[Any], list[StagedRecord]], None]


def solve_layers(
    steps: Steps,
    layers: Sequence[int],
    solves_of: Callable[[int], LayerSolves],
    entered: Callable[[Sequence[int]], None],
) -> None:
    """Solves, writes and enters layers in their order, one more than there are workers at a time.

    `entered`: told of the layers that are left, whenever one is entered.
    """
    pending, solving, writing = deque(layers), deque[tuple[int, LayerSolves]](), deque[_Written]()
    while pending or solving or writing:
        while pending and len(solving) <= steps.pool.size:
            layer = pending.popleft()
            solving.append((layer, solves_of(layer)))
            steps.begin(solving[-1][1].units)
        if solving:
            layer, solves = solving.popleft()
            writing.append(_Written(layer, solves, steps.results(solves.units)))
            steps.begin(solves.writes(writing[-1].solutions))
        while writing and (not solving or len(writing) > steps.pool.size):
            layer, solves, solutions = writing.popleft()
            records = steps.build_on(solutions, solves.units, solves.writes, begun=True)
            solves.enter(solutions, records)
            entered([*pending, *(layer for layer, _ in solving), *(written.layer for written in writing)])


class _Written(NamedTuple):
    layer: int
    solves: LayerSolves
    solutions: list[Any]
