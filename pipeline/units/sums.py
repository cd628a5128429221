"""Units that reduce the sums of single workers to one moment of a layer, and their results.

See `pipeline.units.units`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.methods.method import Moment
from pipeline.units.base import HandleResult, WorkUnit, place_of

SUMMED = ("value", "pair", "gradient")  # kinds of moments of which each worker keeps a sum


@dataclass(frozen=True)
class Sums:
    """Names the sums that a worker keeps over one pass of shards through a layer
    (docs/methods.md#sums-without-an-order).

    Attributes:
        name: of the pass, that no other has; a worker keeps the sums of two: the one at hand, and the one before it.
        grids: moment -> handle of the grid that its products are rounded to.
    """

    name: str
    grids: Mapping[Moment, Any]


@dataclass(frozen=True)
class ChooseGrids(WorkUnit):
    """Chooses the grids of a layer's sums by the first micro-batch of one shard, backwards by its first sample that is
    not silent: a `ChooseGridsDone`.

    `forward`: the `Forward`, `Pair` or `Backward` of that shard, with the moments to sum.
    """

    forward: Any

    @property
    def shard(self) -> int:
        """The shard whose first micro-batch is taken."""
        return int(self.forward.shard)

    @property
    def key(self) -> str:
        return f"choosegrids/{self.forward.lineage}/{place_of(self.forward.layer, self.forward.part)}"

    @property
    def handles(self) -> int:
        return len(self.forward.moments)


@dataclass(frozen=True)
class ChooseGridsDone(HandleResult):
    """Handles of the grids, by moment."""

    handle_fields: ClassVar[tuple[str, ...]] = ("grids",)

    grids: Mapping[Moment, Any]


@dataclass(frozen=True)
class Collect(WorkUnit):
    """Collects the sums of one worker over a pass. The worker drops them.

    Each sum is given in up to `parts` parts. The result is a `CollectDone`, or None if the worker is gone, and its sums
    with it. `part`: of the layer, as in `Forward`.
    """

    lineage: str
    layer: int
    worker: str
    sums: str
    moments: tuple[Moment, ...]
    parts: int = 1
    part: int | None = None

    @property
    def key(self) -> str:
        return f"collect/{self.lineage}/{place_of(self.layer, self.part)}/{self.worker}"

    @property
    def handles(self) -> int:
        return len(self.moments) * (self.parts + 1)


@dataclass(frozen=True)
class CollectDone(HandleResult):
    """The sums of a worker; empty if it had none.

    Attributes:
        partials: by moment, the handles of the parts of the sum. Workers cut a moment alike.
        diagonals: by moment, the handle of its scaled sums of squares.
        shards: those that are in each of the sums.
        node: that the worker is on.
        tokens: by moment, how many passed its point.
    """

    handle_fields: ClassVar[tuple[str, ...]] = ("partials", "diagonals")

    partials: Mapping[Moment, tuple[Any, ...]]
    diagonals: Mapping[Moment, Any]
    shards: tuple[int, ...]
    node: str = ""
    tokens: Mapping[Moment, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckGrids(WorkUnit):
    """Checks a layer's sums over all shards against their grids. The result is a `CheckGridsDone`.

    `diagonals`: of each moment, as all workers have given them. `part`: of the layer, as in `Forward`.
    """

    lineage: str
    layer: int
    grids: Mapping[Moment, Any]
    diagonals: Mapping[Moment, tuple[Any, ...]]
    part: int | None = None

    @property
    def key(self) -> str:
        return f"checkgrids/{self.lineage}/{place_of(self.layer, self.part)}"

    @property
    def handles(self) -> int:
        return len(self.grids)


@dataclass(frozen=True)
class CheckGridsDone(HandleResult):
    """Handles of wider grids for the moments that exceed theirs."""

    handle_fields: ClassVar[tuple[str, ...]] = ("wider",)

    wider: Mapping[Moment, Any]


@dataclass(frozen=True)
class Add(WorkUnit):
    """Adds one part of a moment over some workers. The result is an `AddDone`.

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
        return "/".join(("add", self.lineage, f"{self.layer}", self.moment.key, f"{self.part}", self.node)).rstrip("/")

    @property
    def handles(self) -> int:
        return 1


@dataclass(frozen=True)
class AddDone(HandleResult):
    """A handle of one part of a moment, summed over those workers."""

    handle_fields: ClassVar[tuple[str, ...]] = ("part",)

    part: Any


@dataclass(frozen=True)
class Summed:
    """A moment in memory: handles of its grid and of its parts, and the number of tokens that passed its point."""

    grid: Any
    partials: tuple[Any, ...]
    tokens: int


@dataclass(frozen=True)
class Total(WorkUnit):
    """Stores a moment of a layer. The result is its record.

    Of gradients it holds besides what `kernels.shrinkage` needs: `square_norms`, `sequences`, `tokens`.
    """

    lineage: str
    layer: int
    moment: Moment
    summed: Summed

    @property
    def key(self) -> str:
        return f"total/{self.lineage}/{self.layer}/{self.moment.key}"
