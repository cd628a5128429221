"""The units that make one sum of what workers have summed of a layer's moments, and their results.

See `pipeline.units.units`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pipeline.methods.method import Moment

SUMMED = ("value", "pair", "gradient")  # kinds of moments of which each worker keeps a sum


@dataclass(frozen=True)
class Sums:
    """The sums that a worker keeps over one pass of shards through a layer (docs/methods.md#sums-without-an-order).

    Attributes:
        name: of the pass, that no other has; a worker keeps the sums of two: the one at hand, and the one before it.
        grids: moment -> handle of the grid that its products are rounded to.
    """

    name: str
    grids: Mapping[Moment, Any]


@dataclass(frozen=True)
class ChooseGrids:
    """Chooses the grids of a layer's sums by the first micro-batch of one shard, backwards by its first sample that is
    not silent: a `ChooseGridsDone`.

    `forward`: the `Forward`, `Pair` or `Backward` of that shard, with the moments to sum.
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
class Collect:
    """Takes over what one worker has summed in a pass; the worker keeps nothing of it.

    Each sum is given in up to `parts` parts. The result is a `CollectDone`, or None if the worker is gone, and its sums
    with it.
    """

    lineage: str
    layer: int
    worker: str
    sums: str
    moments: tuple[Moment, ...]
    parts: int = 1

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"collect/{self.lineage}/{self.layer}/{self.worker}"

    @property
    def handles(self) -> int:
        """How many handles its result holds at most."""
        return len(self.moments) * (self.parts + 1)


@dataclass(frozen=True)
class CollectDone:
    """What a worker gave away; nothing, if it had no such sums.

    Attributes:
        partials: by moment, the handles of the parts of the sum. Workers cut a moment alike.
        diagonals: by moment, the handle of its scaled sums of squares.
        shards: those that are in each of the sums.
        node: that the worker is on.
    """

    partials: Mapping[Moment, tuple[Any, ...]]
    diagonals: Mapping[Moment, Any]
    shards: tuple[int, ...]
    node: str = ""

    def with_handles(self, made: Callable[[Any], Any]) -> Self:
        """With `made(handle)` in place of each handle."""
        partials = {moment: tuple(map(made, parts)) for moment, parts in self.partials.items()}
        diagonals = {moment: made(handle) for moment, handle in self.diagonals.items()}
        return replace(self, partials=partials, diagonals=diagonals)


@dataclass(frozen=True)
class CheckGrids:
    """Whether a layer's sums over all shards are within their grids: a `CheckGridsDone`.

    `diagonals`: of each moment, as all workers have given them.
    """

    lineage: str
    layer: int
    grids: Mapping[Moment, Any]
    diagonals: Mapping[Moment, tuple[Any, ...]]

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"checkgrids/{self.lineage}/{self.layer}"

    @property
    def handles(self) -> int:
        """How many handles its result holds at most."""
        return len(self.grids)


@dataclass(frozen=True)
class CheckGridsDone:
    """Handles of wider grids, of the moments that exceed theirs."""

    wider: Mapping[Moment, Any]

    def with_handles(self, made: Callable[[Any], Any]) -> Self:
        """With `made(handle)` in place of each handle."""
        return replace(self, wider={moment: made(handle) for moment, handle in self.wider.items()})


@dataclass(frozen=True)
class Add:
    """Adds one part of what some workers have summed of a moment; leaves a handle of it behind.

    `node`: that these are on, if there are others; `near`: names of workers there, one of whom does it.
    """

    lineage: str
    layer: int
    moment: Moment
    part: int
    partials: tuple[Any, ...]
    node: str = ""
    near: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return "/".join(("add", self.lineage, f"{self.layer}", self.moment.key, f"{self.part}", self.node)).rstrip("/")

    @property
    def handles(self) -> int:
        """How many handles its result holds."""
        return 1


@dataclass(frozen=True)
class AddDone:
    """The handle of a part of a moment over all shards."""

    part: Any

    def with_handles(self, made: Callable[[Any], Any]) -> Self:
        """With `made(handle)` in place of the handle."""
        return replace(self, part=made(self.part))


@dataclass(frozen=True)
class Summed:
    """A moment as it was summed: handles of its grid, and of parts that are yet to be added, or put together."""

    grid: Any
    partials: tuple[Any, ...]


@dataclass(frozen=True)
class Total:
    """Stores a moment of a layer; the result is its record.

    Of gradients it holds besides what `kernels.shrinkage` needs: `square_norms`, `sequences`, `tokens`.
    """

    lineage: str
    layer: int
    moment: Moment
    summed: Summed

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"total/{self.lineage}/{self.layer}/{self.moment.key}"
