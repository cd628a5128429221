"""Units of work that the driver sends to workers, and their results.

Units and results are small and picklable. They refer to tensors by opaque handles, so that tensors bypass the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from manifests.records import ArrayRecord, FormSpec, RefinedFigures, Scheme, StagedLayer
from pipeline.methods.method import Moment, Task
from pipeline.units.base import HandleResult, Replaying, WorkUnit, layer_part_name
from pipeline.units.curves import CurveUnit
from pipeline.units.reads import ReadLayer
from pipeline.units.scores import Compare, Score, WindowForward
from pipeline.units.sums import Add, CheckGrids, ChooseGrids, Collect, Summed, Sums, Total
from pipeline.units.text_amount import MeasureText

Lineage = Literal["dense", "compressed", "paired", "gradient"]


@dataclass(frozen=True)
class Forward(Replaying):
    """Runs one calibration shard through one layer.

    Attributes:
        lineage: the model whose hidden states pass the layer: the dense or the compressed one.
        staged: the compressed layer to use, committed or still being written; None: the layer's dense weights.
        moments: the statistics to compute. Samples of values are returned with the result.
        sums: the sums to which all other moments are added, once for each shard. The worker keeps them until a
            `Collect`.
        cosine: sum the cosines between input and output.
        emit: the outputs become the hidden states of the next layer.
        store: write these outputs to the activation store.
        keep_inputs: also write the inputs of the shard's gradient samples, for the backward pass.
        part: the slice of the layer's experts to compute; None: the whole layer. The first part also computes the
            attention, and the last emits. A worker that has not computed the earlier parts computes them first.
        ahead: the layer to read next, if any.
        weights, ahead_weights: handles of the source tensors of the layer and of the layer ahead, if they are read for
            all nodes. A worker reads missing tensors itself.
    """

    lineage: Lineage
    layer: int
    shard: int
    staged: StagedLayer | Unwritten | None = None
    moments: tuple[Moment, ...] = ()
    sums: Sums | None = None
    cosine: bool = False
    emit: bool = True
    store: bool = False
    keep_inputs: bool = False
    part: int | None = None
    ahead: int | None = None
    weights: tuple[Any, ...] = ()
    ahead_weights: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        place = layer_part_name(self.layer, self.part)
        return f"forward/{self.lineage}/{place}/{self.shard}/{'staged' if self.staged else 'dense'}"

    @property
    def handles(self) -> int:
        return sum(moment.kind == "sample" for moment in self.moments)

    def for_sums_only(self, moments: tuple[Moment, ...], sums: Sums) -> Self:
        """Return a unit that only sums these moments of the same shard, without handles of source tensors."""
        unit = replace(self, moments=moments, sums=sums, cosine=False, emit=False, store=False, keep_inputs=False)
        return replace(unit, ahead=None, weights=(), ahead_weights=())


@dataclass(frozen=True)
class ShardDone(HandleResult):
    """The results of a shard's pass through a layer.

    Attributes:
        partials: handles of samples of values, by moment.
        cosine: sum and count of the cosines between input and output.
        activation: record of the stored outputs of the layer, or, in a backward pass, of the gradients at its inputs.
        inputs: record of the stored inputs of its gradient samples.
        worker: the worker that ran the shard and keeps its sums.
    """

    handle_fields: ClassVar[tuple[str, ...]] = ("partials",)

    partials: Mapping[Moment, Any]
    cosine: tuple[float, int] | None
    activation: ArrayRecord | None
    tokens: int
    inputs: ArrayRecord | None = None
    worker: str = ""


@dataclass(frozen=True)
class Pair(Replaying):
    """Runs one calibration shard through the dense layer and its compressed version, side by side.

    docs/methods.md#corrections. Both models' hidden states travel together: (M, S, 2·D), the dense ones first.

    Attributes:
        step: the number of earlier corrections of the layer.
        drafts: the paths of the layer's drafts at the steps so far ("": its dense weights), by which workers know the
            residual streams behind the attention that they hold. Empty: they hold none.
        staged: the record of the current draft of the layer; None: its dense weights.
        moments: the pairs to sum, all at one point.
        sums, emit, store, ahead: as in `Forward`.
        targets: with `store`, store the data for a refinement of the layer: the dense layer's outputs and the
            compressed model's inputs.
        share: share of the compressed model's error in these inputs; the rest is the dense model's.
        known: the record of the shard's targets, from which the dense layer's outputs are read; None: compute them.
    """

    lineage: ClassVar[Lineage] = "paired"

    layer: int
    shard: int
    step: int
    staged: StagedLayer | None = None
    moments: tuple[Moment, ...] = ()
    sums: Sums | None = None
    emit: bool = False
    store: bool = False
    ahead: int | None = None
    drafts: tuple[str, ...] = ()
    targets: bool = False
    share: float = 1.0
    known: ArrayRecord | None = None
    part: ClassVar[int | None] = None

    @property
    def key(self) -> str:
        return f"{'targets' if self.targets else 'pair'}/{self.layer}/{self.step}/{self.shard}"

    @property
    def both_dense(self) -> bool:
        """True if both models are the dense one up to this layer."""
        return self.staged is None and self.base == 0 and not any(self.replay)

    def for_sums_only(self, moments: tuple[Moment, ...], sums: Sums) -> Self:
        """Return a unit that only sums these moments of the same shard."""
        return replace(self, moments=moments, sums=sums, emit=False, store=False)


@dataclass(frozen=True)
class Backward(WorkUnit):
    """Runs the gradient samples of one calibration shard back through the dense layer.

    docs/methods.md#gradient-moments.

    Attributes:
        inputs: records of the stored inputs of this layer and of the layers above it, up to the first with committed
            gradients or the last. A worker that does not hold the gradients first goes back through those layers.
        base_record: record of the committed gradients at the inputs of the layer above these. None: start at the head,
            with labels drawn from the model's own distribution.
        moments: the moments of gradients to sum.
        sums: as in `Forward`.
        probe: use random gradients at the layer's output instead of the model's.
        emit: keep the gradients at this layer's inputs, for the layer below.
        store: write these gradients to the activation store.
        part: the slice of the layer's experts to go back through; None: the whole layer. The last part begins at the
            layer's output, and the first ends at its inputs. A worker that has not passed the parts behind this one
            passes them first.
        forth: run the samples forwards through the part, because the way back needs the layer's output.
        alone: only the moments are wanted; no other part follows.
        ahead: the layer to read next, if any.
    """

    lineage: ClassVar[Lineage] = "gradient"

    layer: int
    shard: int
    inputs: tuple[ArrayRecord, ...]
    moments: tuple[Moment, ...] = ()
    sums: Sums | None = None
    probe: bool = False
    emit: bool = True
    store: bool = False
    base_record: ArrayRecord | None = None
    part: int | None = None
    forth: bool = False
    alone: bool = False
    ahead: int | None = None

    @property
    def base(self) -> int:
        """The layer whose input gradients are committed, or one past the last."""
        return self.layer + len(self.inputs)

    @property
    def key(self) -> str:
        return f"backward/{layer_part_name(self.layer, self.part)}/{self.shard}{'/forth' if self.forth else ''}"

    def for_sums_only(self, moments: tuple[Moment, ...], sums: Sums) -> Self:
        """Return a unit that only sums these moments of the same shard."""
        return replace(self, moments=moments, sums=sums, emit=False, store=False, alone=True, ahead=None)


Summable = Forward | Pair | Backward  # units whose moments a worker sums


@dataclass(frozen=True)
class Reduce(WorkUnit):
    """Joins samples of values in shard order and stores them. The result is their record."""

    lineage: Lineage
    layer: int
    moment: Moment
    partials: tuple[Any, ...]

    @property
    def key(self) -> str:
        return f"reduce/{self.lineage}/{self.layer}/{self.moment.key}"


@dataclass(frozen=True)
class Solve(WorkUnit):
    """Compresses one group of one layer. With a pair among the statistics, it applies one correction.

    Attributes:
        statistics: stored moments, or moments in memory.
        before: handle of the factors from the group's previous correction.
        hint: `Curve.hint` of the group's curve, if it was computed from the same statistics.
        parts: largest number of handles of factors; above 1 if the group has more experts than a worker holds.
        rounds: round the factors as the manifest says.
    """

    task: Task
    ranks: Mapping[str, int]
    statistics: Mapping[Moment, ArrayRecord | Summed]
    before: Any | None = None
    hint: str = ""
    parts: int = 1
    rounds: bool = True

    @property
    def key(self) -> str:
        return f"solve/{self.task.key}"

    @property
    def handles(self) -> int:
        return self.parts


@dataclass(frozen=True)
class SolveDone(HandleResult):
    """A compressed group: one or several handles of its factors, their forms, figures for the summary, and the rounding
    scheme of each matrix by module path."""

    handle_fields: ClassVar[tuple[str, ...]] = ("factors",)

    factors: Any
    forms: Mapping[str, FormSpec]
    report: Mapping[str, Any]
    rounded: Mapping[str, Scheme] = field(default_factory=dict)

    @property
    def handles(self) -> tuple[Any, ...]:
        """Return the handles of the factors."""
        return self.factors if type(self.factors) is tuple else (self.factors,)


@dataclass(frozen=True)
class SolveSizes(WorkUnit):
    """Compresses one group at several sizes, without corrections. Shared work is done once.

    `parts`: handles of each size's factors, as in `Solve`.
    """

    task: Task
    sizes: tuple[Mapping[str, int], ...]
    statistics: Mapping[Moment, ArrayRecord]
    hint: str = ""
    parts: int = 1

    @property
    def key(self) -> str:
        return f"solvesizes/{self.task.key}"

    @property
    def handles(self) -> int:
        return len(self.sizes) * self.parts


@dataclass(frozen=True)
class SizesSolved(HandleResult):
    """The results of `SolveSizes`, size by size."""

    handle_fields: ClassVar[tuple[str, ...]] = ("sizes",)

    sizes: tuple[SolveDone, ...]


@dataclass(frozen=True)
class SolvedGroup:
    """A group to refine: its ranks, and the forms and the report of its solve."""

    task: Task
    ranks: Mapping[str, int]
    forms: Mapping[str, FormSpec]
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Refine(WorkUnit):
    """Trains the stored numbers of some groups of a layer, and rounds them. docs/methods.md#refinement.

    One worker trains the whole layer, so that the result does not depend on the number of workers.

    Attributes:
        staged: the solved layer. The matrices of `groups` are not rounded yet.
        targets: for each shard, in order, the record of (M, S, 2·D): the dense layer's outputs, and the compressed
            model's inputs.
        groups: the groups to train, which have the same settings.
        gradient: the moment of the loss's gradient at the layer's outputs, if a group's method has it.
    """

    layer: int
    staged: StagedLayer
    targets: tuple[ArrayRecord, ...]
    groups: tuple[SolvedGroup, ...]
    gradient: ArrayRecord | None = None

    @property
    def key(self) -> str:
        return f"refine/{self.layer}"

    @property
    def handles(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class RefineDone(HandleResult):
    """The results of `Refine`, group by group, and the figures of the training."""

    handle_fields: ClassVar[tuple[str, ...]] = ("groups",)

    groups: tuple[SolveDone, ...]
    refined: RefinedFigures


@dataclass(frozen=True)
class Write(WorkUnit):
    """Writes one layer: the factors of its groups, and copies of the other tensors from the source.

    Attributes:
        roles: the roles that the groups claim, whose tensors are not copied.
        of: the name of the model; empty if there is only one.
    """

    layer: int
    factors: tuple[Any, ...]
    roles: tuple[str, ...]
    forms: Mapping[str, FormSpec]
    of: str = ""

    @property
    def key(self) -> str:
        return f"write/{self.of}/{self.layer}" if self.of else f"write/{self.layer}"


@dataclass(frozen=True)
class Unwritten:
    """A compressed layer that is being written, with its factors in memory.

    Attributes:
        name: a unique name.
        write: the unit that writes it.
        rounded: the rounding schemes of matrices, by module path.
    """

    name: str
    write: Write
    rounded: Mapping[str, Scheme]


@dataclass(frozen=True)
class Measure(WorkUnit):
    """Measures one group on the dense weights, for the method's choice of ranks. The result is JSON."""

    task: Task

    @property
    def key(self) -> str:
        return f"measure/{self.task.key}"


ReplayUnit = Forward | Pair | WindowForward | Score  # needs a shard's inputs of a layer
SumUnit = ChooseGrids | Collect | CheckGrids | Add | Total | Reduce
# These run on a worker's second thread, concurrently with its other units.
ConcurrentUnit = ReadLayer | Collect | CheckGrids | Add | Total | Write
SolveUnit = Solve | SolveSizes
PassUnit = Summable | WindowForward | Score | Compare
Unit = ReadLayer | PassUnit | SumUnit | Measure | CurveUnit | SolveUnit | Refine | Write | MeasureText
ShardUnit = Summable | ChooseGrids | WindowForward | Score  # runs on the worker that holds the shard
