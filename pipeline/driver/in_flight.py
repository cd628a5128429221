"""Layers whose sums are still being reduced while shards go through the next layers.

If a layer commits hidden states, it is entered before the next layer starts from them. Hidden states that are no longer
read are then dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from manifests.records import ArrayRecord
from pipeline.driver.reduction import PassResult, Reductions
from pipeline.driver.scheduler import TaskStream
from pipeline.driver.session import Session
from pipeline.methods.method import Moment
from pipeline.units.units import Summable

AHEAD = 3  # one more layer may be reduced at a time for each so many workers


class LayersInFlight:
    """Enters layers in the order of the pass, as soon as their sums are stored."""

    def __init__(
        self, session: Session, enter: Callable[[int, PassResult], TaskStream[Sequence[ArrayRecord] | None]]
    ) -> None:
        """`enter`: enters a layer. Its stream returns the stored hidden states that are needed from then on, or None if
        these have not changed."""
        self.session = session
        self.reductions = Reductions(session)
        self.enter = enter
        self.passed: deque[tuple[int, PassResult]] = deque()
        self.allowed = 0  # layers that may still be open while shards go through the next

    def run(
        self, layer: int, moments: Sequence[Moment], units: Callable[[], Sequence[Summable]], *, stores: bool
    ) -> TaskStream[None]:
        """Runs the units of all shards of a layer.

        `units`: builds them from the entries that exist when it is called. `stores`: the units store the hidden states
        that the next layer starts from; this layer is then entered before the next one is passed.
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
        self.allowed = 1 + self.session.pool.size // AHEAD if moments and not stores else 0

    def finish(self) -> TaskStream[None]:
        """Enters the remaining layers."""
        yield from self._enter_all_but(0)

    def _enter_all_but(self, count: int) -> TaskStream[Sequence[ArrayRecord] | None]:
        needed: Sequence[ArrayRecord] | None = None
        while len(self.passed) > count:
            records = yield from self.enter(*self.passed.popleft())
            needed = needed if records is None else records
        return needed
