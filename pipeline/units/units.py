"""Units of work that the driver sends to workers, and their results.

Units and results are small and picklable; tensors travel between workers behind opaque handles, past the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from manifests.records import ArrayRecord, FormSpec, RefinedFigures, Scheme, StagedLayer
from pipeline.methods.method import Moment, Task
from pipeline.units.base import HandleResult, Replaying, WorkUnit, place_of
from pipeline.units.curves import CurveUnit
from pipeline.units.scores import Compare, Score, WindowForward
from pipeline.units.sums import Add, CheckGrids, ChooseGrids, Collect, Summed, Sums, Total
from pipeline.units.text_amount import MeasureText

Lineage = Literal["dense", "compressed", "paired", "gradient"]


@dataclass(frozen=True)
class Forward(Replaying):
    """Takes one calibration shard through one layer.

    Attributes:
        lineage: whose hidden states come in and go out: those of the dense model or of the compressed one.
        staged: the compressed layer to use, as it is committed or on its way there; None: the layer's dense weights.
        moments: statistics to take. Samples of values go back with the result.
        sums: where the others are added, once for each shard; the worker keeps them until a `Collect`.
        cosine: whether to sum the cosines between input and output.
        emit: whether the outputs become the hidden states of the next layer.
        store: whether these outputs are written to the activation store.
        keep_inputs: whether the inputs of the shard's gradient samples are written there, for the backward pass.
        part: the slice of the layer's experts to pass; None: the whole layer. The first part also passes the attention,
            the last emits. Each needs the parts before it, which a worker passes first if it has not done so.
        ahead: the layer to read next, if any.
        weights, ahead_weights: handles of the layer's source tensors, and of that one's, where they are read for all
            nodes; what is not there a worker reads by itself.
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
        place = place_of(self.layer, self.part)
        return f"forward/{self.lineage}/{place}/{self.shard}/{'staged' if self.staged else 'dense'}"

    @property
    def handles(self) -> int:
        return sum(moment.kind == "sample" for moment in self.moments)

    def for_sums_alone(self, moments: tuple[Moment, ...], sums: Sums) -> Self:
        """Returns a unit that takes only these moments of the same shard, without the layers that were read for it."""
        unit = replace(self, moments=moments, sums=sums, cosine=False, emit=False, store=False, keep_inputs=False)
        return replace(unit, ahead=None, weights=(), ahead_weights=())


@dataclass(frozen=True)
class ReadLayer(WorkUnit):
    """Reads one of `parts` parts of a layer's source tensors for the workers of all nodes.

    `near`: names of the workers of one node, one of whom does it.
    """

    layer: int
    part: int
    parts: int
    near: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"readlayer/{self.layer}/{self.part}"

    @property
    def handles(self) -> int:
        return 1


@dataclass(frozen=True)
class ReadDone(HandleResult):
    """A handle of source tensors, by name."""

    handle_fields: ClassVar[tuple[str, ...]] = ("tensors",)

    tensors: Any


@dataclass(frozen=True)
class ShardDone(HandleResult):
    """The results of a shard's pass through a layer.

    Attributes:
        partials: handles of samples of values, by moment.
        cosine: sum and count of the cosines between input and output.
        activation: record of what left the layer, at its outputs or, backwards, at its inputs.
        inputs: record of the inputs of its gradient samples.
        worker: the worker that did it, and that keeps the sums that the shard was added to.
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
    """Takes one calibration shard through the dense layer and its compressed version, side by side.

    docs/methods.md#corrections. Both models' hidden states travel together: (M, S, 2·D), the dense ones first.

    Attributes:
        step: how many corrections of the layer came before.
        staged: the record of the layer as it is by now; None: its dense weights.
        moments: pairs to take, all at one point.
        sums: where they are added, as in `Forward`; emit, store, ahead: as there.
        targets: with `store`, what is stored is for a refinement of the layer: the dense layer's outputs beside the
            compressed model's inputs.
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
    targets: bool = False
    part: ClassVar[int | None] = None

    @property
    def key(self) -> str:
        return f"{'targets' if self.targets else 'pair'}/{self.layer}/{self.step}/{self.shard}"

    def for_sums_alone(self, moments: tuple[Moment, ...], sums: Sums) -> Self:
        """Returns a unit that takes only these moments of the same shard."""
        return replace(self, moments=moments, sums=sums, emit=False, store=False)


@dataclass(frozen=True)
class Backward(WorkUnit):
    """Takes the gradient samples of one calibration shard back through the dense layer.

    docs/methods.md#gradient-moments.

    Attributes:
        inputs: records of the stored inputs of this layer and of those above it, up to the first whose gradients are
            committed, or to the last: a worker that does not hold the gradients goes back through those layers first.
        base_record: of the committed gradients at the inputs of the layer after these; None: from the head, with
            labels drawn from the model's own distribution.
        moments: of gradients, to take.
        sums: where they are added, as in `Forward`.
        probe: the gradients at the layer's output are random, not the model's.
        emit: whether the gradients at the layer's inputs are those that the layer before it will go on with.
        store: whether these are written to the activation store.
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
    ahead: int | None = None
    part: ClassVar[int | None] = None

    @property
    def base(self) -> int:
        """The layer whose input gradients are committed, or one past the last."""
        return self.layer + len(self.inputs)

    @property
    def key(self) -> str:
        return f"backward/{self.layer}/{self.shard}"

    def for_sums_alone(self, moments: tuple[Moment, ...], sums: Sums) -> Self:
        """Returns a unit that takes only these moments of the same shard."""
        return replace(self, moments=moments, sums=sums, emit=False, store=False)


Summable = Forward | Pair | Backward  # whose worker adds its moments to its sums


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

    `statistics`: as they are stored, or as they were summed.
    `before`: the handle of the factors that the group's correction before this one gave.
    `hint`: `Curve.hint` of the group's curve, if it was taken of the same statistics.
    """

    task: Task
    ranks: Mapping[str, int]
    statistics: Mapping[Moment, ArrayRecord | Summed]
    before: Any | None = None
    hint: str = ""

    @property
    def key(self) -> str:
        return f"solve/{self.task.key}"

    @property
    def handles(self) -> int:
        return 1


@dataclass(frozen=True)
class SolveDone(HandleResult):
    """A compressed group: a handle of its factors, their forms, figures for the summary, and the rounding scheme of
    each matrix by the path of its module."""

    handle_fields: ClassVar[tuple[str, ...]] = ("factors",)

    factors: Any
    forms: Mapping[str, FormSpec]
    report: Mapping[str, Any]
    rounded: Mapping[str, Scheme] = field(default_factory=dict)


@dataclass(frozen=True)
class SolveSizes(WorkUnit):
    """Compresses one group at several sizes, without corrections. Work that the sizes share is done once."""

    task: Task
    sizes: tuple[Mapping[str, int], ...]
    statistics: Mapping[Moment, ArrayRecord]
    hint: str = ""

    @property
    def key(self) -> str:
        return f"solvesizes/{self.task.key}"

    @property
    def handles(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class SizesSolved(HandleResult):
    """The results of `SolveSizes`, size by size."""

    handle_fields: ClassVar[tuple[str, ...]] = ("sizes",)

    sizes: tuple[SolveDone, ...]


@dataclass(frozen=True)
class SolvedGroup:
    """A group of a layer that is to be refined: its ranks, and the forms and the report of its solve."""

    task: Task
    ranks: Mapping[str, int]
    forms: Mapping[str, FormSpec]
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Refine(WorkUnit):
    """Trains the stored numbers of some groups of a layer, and rounds them. docs/methods.md#refinement.

    One worker does the whole layer, so that the result does not depend on the number of workers.

    Attributes:
        staged: the layer as it was solved; the matrices of `groups` are not rounded yet.
        targets: for each shard, in order, the record of (M, S, 2·D): the dense layer's outputs, and the compressed
            model's inputs.
        groups: the groups to train; they have the same settings.
    """

    layer: int
    staged: StagedLayer
    targets: tuple[ArrayRecord, ...]
    groups: tuple[SolvedGroup, ...]

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
        roles: what the groups claim; of these nothing is copied.
        of: names the model, where several are written.
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
    """A compressed layer that is being written; its factors are in memory.

    Attributes:
        name: that no other has.
        write: what writes it.
        rounded: how matrices are rounded, by the path of their module.
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


Onward = Forward | Pair | WindowForward | Score  # takes a shard on from the inputs of a layer
SumUnit = ChooseGrids | Collect | CheckGrids | Add | Total | Reduce
# Takes nothing that a worker computes with: done beside its other units.
BesideUnit = ReadLayer | Collect | CheckGrids | Add | Total | Write
SolveUnit = Solve | SolveSizes
PassUnit = Summable | WindowForward | Score | Compare
Unit = ReadLayer | PassUnit | SumUnit | Measure | CurveUnit | SolveUnit | Refine | Write | MeasureText
ShardUnit = Summable | ChooseGrids | WindowForward | Score  # goes to the worker that holds the shard
