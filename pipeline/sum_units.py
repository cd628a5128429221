"""The units that make one sum of what workers have summed of a layer's moments, and their results.

See `pipeline.units`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from manifests.records import ArrayRecord
from pipeline.methods.method import Moment
from pipeline.unit_parts import HoldsPartials, TakesMoments


@dataclass(frozen=True)
class Sums:
    """The sums that a worker keeps over one pass of shards through a layer (docs/methods.md#sums-without-an-order).

    Attributes:
        name: of the pass; a worker has the sums of one pass at a time, and lets go of any other's.
        grids: moment -> handle of the grid that its products are rounded to.
    """

    name: str
    grids: Mapping[Moment, Any]


@dataclass(frozen=True)
class ChooseGrids:
    """Chooses the grids of a layer's sums by the first micro-batch of one shard: a `ChooseGridsDone`.

    `forward`: the `Forward` of that shard, with the moments to sum.
    """

    forward: Any

    @property
    def shard(self) -> int:
        """Whose first micro-batch it is."""
        return int(self.forward.shard)

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"choosegrids/{self.forward.lineage}/{self.forward.layer}"

    @property
    def handles(self) -> int:
        """How many handles its result holds."""
        return len(self.forward.moments)


@dataclass(frozen=True)
class ChooseGridsDone:
    """Handles of the grids, by moment."""

    grids: Mapping[Moment, Any]

    def with_handles(self, made: Callable[[Any], Any]) -> Self:
        """With `made(handle)` in place of each handle."""
        return replace(self, grids={moment: made(handle) for moment, handle in self.grids.items()})


@dataclass(frozen=True)
class Collect(TakesMoments):
    """Takes over what one worker has summed in a pass; the worker keeps nothing of it.

    The result is a `CollectDone`, or None if the worker is gone, and its sums with it.
    """

    lineage: str
    layer: int
    worker: str
    sums: str
    moments: tuple[Moment, ...]

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"collect/{self.lineage}/{self.layer}/{self.sums}/{self.worker}"


@dataclass(frozen=True)
class CollectDone(HoldsPartials):
    """Handles of the sums, by moment, and the shards that are in each of them; none, if the worker had no such sums."""

    shards: tuple[int, ...]


@dataclass(frozen=True)
class Total:
    """Adds what the workers have summed of a moment, in any order, and stores it: a `TotalDone`."""

    lineage: str
    layer: int
    moment: Moment
    grid: Any
    partials: tuple[Any, ...]

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"total/{self.lineage}/{self.layer}/{self.moment.key}"

    @property
    def handles(self) -> int:
        """How many handles its result holds."""
        return 1


@dataclass(frozen=True)
class TotalDone:
    """The record of the stored sum; or, when it exceeds what its grid allows, the handle of a wider grid.

    `kept`: whoever added it holds it, for the solve that comes next.
    """

    record: ArrayRecord | None
    wider: Any = None
    kept: bool = False

    def with_handles(self, made: Callable[[Any], Any]) -> Self:
        """With `made(handle)` in place of the handle."""
        return self if self.wider is None else replace(self, wider=made(self.wider))
