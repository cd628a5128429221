"""Units that reduce the sums of single workers to one moment of a layer, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.methods.method import Moment
from pipeline.units.base import HandleResult, WorkUnit, layer_part_name

SUMMED = ("value", "pair", "gradient")  # the kinds of moments that workers sum


@dataclass(frozen=True)
class Sums:
    """The sums that a worker keeps over a pass of shards through a layer. docs/methods.md#sums-without-an-order.

    Attributes:
        name: the unique name of the pass. A worker keeps the sums of the current and of the previous pass.
        grids: moment -> handle of the grid to which its products are rounded.
    """

    name: str
    grids: Mapping[Moment, Any]


@dataclass(frozen=True)
class ChooseGrids(WorkUnit):
    """Chooses the grids of a layer's sums from the first micro-batch of one shard. The result is a `ChooseGridsDone`.

    A backward pass uses the first sample with a gradient other than 0. `forward`: the unit of that shard, with the
    moments to sum.
    """

    forward: Any

    @property
    def shard(self) -> int:
        """The shard from which the grids are chosen."""
        return int(self.forward.shard)

    @property
    def key(self) -> str:
        return f"choosegrids/{self.forward.lineage}/{layer_part_name(self.forward.layer, self.forward.part)}"

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
    """Collects the sums of one worker over a pass. The worker then drops them.

    Each sum is cut into at most `parts` parts. The result is a `CollectDone`, or None if the worker is lost.
    `part`: the part of the layer, as in `Forward`.
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
        return f"collect/{self.lineage}/{layer_part_name(self.layer, self.part)}/{self.worker}"

    @property
    def handles(self) -> int:
        return len(self.moments) * (self.parts + 1)


@dataclass(frozen=True)
class CollectDone(HandleResult):
    """The sums of a worker; empty if it had none.

    Attributes:
        partials: by moment, the handles of the parts of the sum. All workers cut a moment in the same way.
        diagonals: by moment, the handle of the scaled sums of squares.
        shards: the shards in each of the sums.
        node: the node of the worker.
        tokens: by moment, the number of tokens that passed its point.
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

    `diagonals`: by moment, those of all workers. `part`: the part of the layer, as in `Forward`.
    """

    lineage: str
    layer: int
    grids: Mapping[Moment, Any]
    diagonals: Mapping[Moment, tuple[Any, ...]]
    part: int | None = None

    @property
    def key(self) -> str:
        return f"checkgrids/{self.lineage}/{layer_part_name(self.layer, self.part)}"

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

    `node`: the node of these workers, if there are several nodes. `near`: the workers that may run the unit.
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

    The record of gradients also holds what `kernels.shrinkage` needs: `square_norms`, `sequences`, `tokens`.
    """

    lineage: str
    layer: int
    moment: Moment
    summed: Summed

    @property
    def key(self) -> str:
        return f"total/{self.lineage}/{self.layer}/{self.moment.key}"
