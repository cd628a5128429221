"""Layers whose sums are still being reduced while shards pass the next layers.

A layer that commits hidden states is entered before the next layer starts from them. Unneeded hidden states are then
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from manifests.records import ArrayRecord
from pipeline.driver.forward_units import joined
from pipeline.driver.reduction import LayerPass, choose_grids, run_layer
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.methods.method import Moment
from pipeline.units.units import ShardDone, Summable

AHEAD = 3  # workers for each further layer that may be reduced at the same time
Enter = Callable[[int, list[ShardDone], Mapping[str, ArrayRecord]], Sequence[ArrayRecord] | None]


def layers_ahead(workers: int) -> int:
    """Return how many layers' sums may still be reduced or stored while shards pass the next layer."""
    return 1 + workers // AHEAD


class LayersInFlight:
    """Enters layers in the order of the pass, as soon as the sums of all their parts are stored."""

    def __init__(self, session: Session, enter: Enter) -> None:
        """`enter`: enters a layer, from the results of all shards and the records of its moments by key. It returns the
        stored hidden states that are still needed, or None if none can be dropped."""
        self.session = session
        self.enter = enter
        self.passed: deque[tuple[int, LayerPass, bool]] = deque()  # layer, a part of it, True for its last part
        self.allowed = 0  # parts that may be unstored while shards pass the next one
        self.done: list[list[ShardDone]] = []  # of the stored parts of the layer that is entered next
        self.statistics: dict[str, ArrayRecord] = {}  # of the same parts

    def run(
        self,
        layer: int,
        moments: Sequence[Moment],
        units: Callable[[], Sequence[Summable]],
        *,
        stores: bool,
        last: bool = True,
    ) -> Coroutine[None]:
        """Run the units of all shards of a layer, or of a part of it.

        `units`: builds the units from the entries that exist when it is called. `stores`: the units store hidden
        states, so that this layer is entered before the next one starts. `last`: no further part of the layer follows.
        """
        choosing = choose_grids(self.session, moments, units())
        needed = yield from self._enter_all_but(self.allowed)
        grids = yield choosing
        if needed is not None:
            self.session.cleaner.retain_activations(tuple(needed))
        if len(self.passed) > 1:  # a worker holds the sums of two layers at most
            yield from self.passed[-2][1].collected()
        result = yield from run_layer(self.session, moments, units(), grids=grids)
        self.passed.append((layer, result, last))
        self.allowed = layers_ahead(self.session.pool.size) if moments and not stores else 0

    def finish(self) -> Coroutine[None]:
        """Enter the remaining layers."""
        yield from self._enter_all_but(0)

    def _enter_all_but(self, count: int) -> Coroutine[Sequence[ArrayRecord] | None]:
        needed: Sequence[ArrayRecord] | None = None
        while len(self.passed) > count:
            layer, result, last = self.passed.popleft()
            self.statistics |= yield from result.stored()
            self.done.append(result.done)
            if last:
                records = self.enter(layer, joined(self.done), self.statistics)
                needed = needed if records is None else records
                self.done, self.statistics = [], {}
        return needed
