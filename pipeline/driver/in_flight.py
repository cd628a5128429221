"""Layers whose sums are still being reduced while shards pass the next layers.

A layer that commits hidden states is entered before the next layer starts from them. Unneeded hidden states are then
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from manifests.records import ArrayRecord
from pipeline.driver.reduction import LayerPass, Reductions
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.methods.method import Moment
from pipeline.units.units import Summable

AHEAD = 3  # workers for each further layer that may be reduced at the same time


def layers_ahead(workers: int) -> int:
    """Return how many layers' sums may still be reduced or stored while shards pass the next layer."""
    return 1 + workers // AHEAD


class LayersInFlight:
    """Enters layers in the order of the pass, as soon as their sums are stored."""

    def __init__(
        self, session: Session, enter: Callable[[int, LayerPass], Coroutine[Sequence[ArrayRecord] | None]]
    ) -> None:
        """`enter`: enters a layer. Its coroutine returns the stored hidden states that are still needed, or None if
        none can be dropped."""
        self.session = session
        self.reductions = Reductions(session)
        self.enter = enter
        self.passed: deque[tuple[int, LayerPass]] = deque()
        self.allowed = 0  # layers that may be unentered while shards pass the next one

    def run(
        self, layer: int, moments: Sequence[Moment], units: Callable[[], Sequence[Summable]], *, stores: bool
    ) -> Coroutine[None]:
        """Run the units of all shards of a layer.

        `units`: builds the units from the entries that exist when it is called. `stores`: the units store hidden
        states, so that this layer is entered before the next one starts.
        """
        choosing = self.reductions.choose(moments, units())
        needed = yield from self._enter_all_but(self.allowed)
        grids = yield choosing
        if needed is not None:
            self.session.cleaner.retain_activations(tuple(needed))
        if len(self.passed) > 1:  # a worker holds the sums of two layers at most
            yield from self.reductions.collected(self.passed[-2][1])
        result = yield from self.reductions.run(moments, units(), grids=grids)
        self.passed.append((layer, result))
        self.allowed = layers_ahead(self.session.pool.size) if moments and not stores else 0

    def finish(self) -> Coroutine[None]:
        """Enter the remaining layers."""
        yield from self._enter_all_but(0)

    def _enter_all_but(self, count: int) -> Coroutine[Sequence[ArrayRecord] | None]:
        needed: Sequence[ArrayRecord] | None = None
        while len(self.passed) > count:
            records = yield from self.enter(*self.passed.popleft())
            needed = needed if records is None else records
        return needed
