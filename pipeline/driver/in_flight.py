"""Layers that shards have passed, and whose sums are on their way to the store while the next are passed.

What a layer's units commit is entered before the next are begun from it, and what these were begun from before is
dropped when nothing reads it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from manifests.records import ArrayRecord
from pipeline.driver.interfaces import Cleaner
from pipeline.driver.reduction import Summing, Taken
from pipeline.methods.method import Moment
from pipeline.units.units import Summable

AHEAD = 3  # for every so many workers, the sums of one more layer may be on their way to the store


class UnderWay:
    """Enters layers in the order in which they are taken, when their sums are stored."""

    def __init__(
        self, summing: Summing, cleaner: Cleaner, enter: Callable[[int, Taken], Sequence[ArrayRecord] | None]
    ) -> None:
        """`enter`: is given a layer, and what was taken of it; it gives the stored hidden states that are needed from
        there on, None: as many as before."""
        self.summing = summing
        self.cleaner = cleaner
        self.enter = enter
        self.taken: deque[tuple[int, Taken]] = deque()
        self.waiting = 0  # layers that need not be entered before the next is taken

    def take(
        self,
        layer: int,
        moments: Sequence[Moment],
        units: Callable[[], Sequence[Summable]],
        *,
        stores: bool,
    ) -> None:
        """Does a layer's units of all shards. `stores`: these commit what the next are begun from, and it is entered
        before anything is made of it. `units`: gives them, from what is entered by then.
        """
        choosing = self.summing.choose(moments, units())
        needed = self._enter_all_but(self.waiting)
        grids = self.summing.chosen(choosing)
        if needed is not None:
            self.cleaner.retain_activations(tuple(needed))
        if len(self.taken) > 1:  # a worker has the sums of two layers, no more
            self.summing.given(self.taken[-2][1])
        self.taken.append((layer, self.summing.take(moments, units(), grids=grids)))
        self.waiting = 1 + self.summing.steps.pool.size // AHEAD if moments and not stores else 0

    def finish(self) -> None:
        """Enters what is left."""
        self._enter_all_but(0)

    def _enter_all_but(self, count: int) -> Sequence[ArrayRecord] | None:
        needed: Sequence[ArrayRecord] | None = None
        while len(self.taken) > count:
            found = self.enter(*self.taken.popleft())
            needed = needed if found is None else found
        return needed
