"""What the ledger holds, typed and frozen: records of committed data, and the entries that name them. docs/formats.md.

They are JSON objects on disk, which `stores.ledger` reads and writes: a `Key[DenseEntry]` gives a `DenseEntry`. What is
read from there is checked against its class once; from hand to hand, records go as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, model_validator

ARRAY_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
TENSOR_DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
    "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0",
)  # fmt: skip

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

E = TypeVar("E")
T = TypeVar("T")
Row = Annotated[tuple[T, ...], Field(strict=False)]  # a JSON array; what is in it stays strict
Pair = Annotated[T, Field(strict=False)]  # the same of a tuple of so many


class Key(str, Generic[E]):
    """A name in the ledger, of an entry of type E."""

    __slots__ = ()


class Record(BaseModel):
    """A JSON object of the ledger. What only a later version says of it is kept as it is."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", ser_json_inf_nan="constants")

    def as_json(self) -> dict[str, Any]:
        """As it is stored: fields that nothing was said of are left out. Raises ValueError for what JSON cannot say."""
        return self.model_dump(mode="json", exclude_defaults=True)


# -- committed data ----------------------------------------------------------------------------------------------------


class ArrayRecord(Record):
    """A Zarr array that was written once: where it is, its grid of chunks, and the checksum of each, in C order."""

    version: int
    path: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)+[0-9a-f]{32}$")]
    shape: Row[PositiveInt]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(ARRAY_DTYPES)})$")]
    chunks: Row[PositiveInt]
    symmetric: bool
    metadata_sha256: Sha256
    checksums: Row[str]

    @model_validator(mode="after")
    def _one_chunk_size_for_each_axis(self) -> Self:
        if len(self.chunks) != len(self.shape):
            raise ValueError(f"{len(self.chunks)} chunk sizes for {len(self.shape)} axes")
        return self


class GradientRecord(ArrayRecord):
    """A summed moment of gradients, with what shrinking it takes: square norms of each sequence's own, by group."""

    square_norms: Row[NonNegative]
    sequences: PositiveInt
    tokens: PositiveInt


class TensorDescription(Record):
    """A tensor of a safetensors file: its dtype as the format names it, its shape, the digest of its bytes."""

    model_config = ConfigDict(extra="forbid")  # it goes into compression.json as it is

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(TENSOR_DTYPES)})$")]
    shape: Row[NonNegativeInt]
    sha256: Sha256


class ShardRecord(Record):
    """A safetensors file, by the tensors in it."""

    file: str | None = None
    size: NonNegativeInt
    sha256: Sha256
    tensors: Mapping[str, TensorDescription]


class StagedRecord(ShardRecord):
    """The file of a compressed layer; `path` is relative to RUN_DIR."""

    path: Annotated[str, Field(pattern=r"^staged/layer-\d{5,}\.[0-9a-f]{32}\.safetensors$")]


class Scheme(Record):
    """How a matrix is rounded: bits of a code, and columns that share a scale (None: the whole row)."""

    bits: Annotated[int, Field(ge=2, le=8)]
    group: PositiveInt | None


class FormSpec(Record):
    """How a role's tensors are stored, as the checkpoint's config says it; `lamina.forms_lamina` knows the forms, and
    what else a form says of itself."""

    form: str
    rank: PositiveInt | None = None
    group: str | None = None
    value_rank: PositiveInt | None = None
    width: PositiveInt | None = None
    absorbed: bool | None = None


class StagedLayer(StagedRecord):
    """What a worker needs to load a compressed layer: its file, the form of each role's tensors, and the scheme of each
    rounded matrix by the path of its module."""

    forms: Mapping[str, FormSpec]
    rounded: Mapping[str, Scheme] = {}


Figure = Annotated[float, Field(allow_inf_nan=False, strict=False)]


Origin = Literal["calibration", "random"]


class ComparedFigures(Record):
    """What the job measured on a few tokens, for `verify` to measure again: see `workers.comparing.Comparison`."""

    origin: Origin
    tokens: Annotated[Row[Annotated[Row[NonNegativeInt], Field(min_length=1)]], Field(min_length=1)]
    layer_errors: Row[Figure]
    error: Figure
    sketch: Row[Row[Figure]]
    logits_sketch: Row[Figure]

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len({len(sample) for sample in self.tokens}) != 1 or len(self.sketch) != len(self.layer_errors):
            raise ValueError("samples of different lengths, or figures of different numbers of layers")
        return self


# -- entries -----------------------------------------------------------------------------------------------------------


class DenseEntry(Record):
    """The dense pass through a layer: (sum, count) of cosines by shard, moments by key, and what was stored of the
    hidden states: its outputs by shard, and of some shards its inputs for the backward pass."""

    cosine: Row[Pair[tuple[Finite, NonNegativeInt]]]
    statistics: Mapping[str, ArrayRecord]
    activations: Row[ArrayRecord] | None = None
    inputs: Row[ArrayRecord | None] | None = None


class GradientEntry(Record):
    """The backward pass through a layer: moments of gradients by key; by shard of the pass, gradients at the layer's
    inputs, if stored, and of the last layer the labels, where a second round takes them again."""

    statistics: Mapping[str, GradientRecord]
    activations: Row[ArrayRecord] | None = None
    labels: Row[ArrayRecord] | None = None


class StatisticsEntry(Record):
    """The moments of the walk behind compressed layers, by key."""

    statistics: Mapping[str, ArrayRecord]


class ActivationsEntry(Record):
    """The hidden states of the walk that enter a layer, by shard."""

    activations: Row[ArrayRecord]


class RanksEntry(Record):
    """The ranks of every task, and the importance of each layer that they follow."""

    ranks: Mapping[str, Mapping[str, PositiveInt]]
    importance: Mapping[str, Finite]


class MeasuredEntry(Record):
    """What the dense weights of a layer tell, by task."""

    measured: Mapping[str, Any]


class Curve(Record):
    """Point i of a curve: ranks, stored numbers, cache numbers per token, predicted loss (nats per token)."""

    ranks: Mapping[str, Row[PositiveInt]]
    numbers: Row[int | float]
    cache: Row[int | float]
    loss: Row[Finite]

    @model_validator(mode="after")
    def _columns_of_one_length(self) -> Self:
        lengths = {len(self.numbers), len(self.cache), len(self.loss), *map(len, self.ranks.values())}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"columns of {sorted(lengths)} points")
        return self


class CurvesEntry(Record):
    """What each size of a layer's groups costs, by task."""

    curves: Mapping[str, Curve]


class GroupReport(Record):
    """How a group was compressed; what else a method says of it is kept as it is."""

    ranks: Mapping[str, int]
    error: Finite | None = None


class LayerEntry(Record):
    """A compressed layer: its file, the form of each role, the report of each group, the scheme of each rounded matrix
    by the path of its module."""

    staged: StagedRecord
    forms: Mapping[str, FormSpec]
    groups: Mapping[str, GroupReport]
    rounded: Mapping[str, Scheme] = {}


class TokensEntry(Record):
    """The calibration tokens."""

    tokens: ArrayRecord


class HeldOutEntry(TokensEntry):
    """Tokens beyond the calibration samples, and, once it went through, what leaves the dense model's last layer on
    them, by shard."""

    outputs: Row[ArrayRecord] | None = None


class ScoredEntry(Record):
    """What enters a layer of a model that is being scored, by shard; `of`: digest of the windows' tokens and of the
    staged layers before it."""

    of: Sha256
    activations: Row[ArrayRecord]


class HeldOutScoreEntry(Record):
    """How far the compressed layers are from the dense ones on the held-out tokens (divergence: nats per token)."""

    divergence: Finite
    dense_perplexity: Finite
    perplexity: Finite
    tokens: PositiveInt


class ScheduleEntry(Record):
    """How many layers `resume.every: auto` came to."""

    every: PositiveInt


class TargetEntry(Record):
    """The size, in thousandths of `keep`, that is being made for a budget by loss."""

    size: Annotated[int, Field(ge=1, le=1000)]


class TryEntry(HeldOutScoreEntry):
    """What was measured at a size, and the loss that its curves predict (nats per token)."""

    predicted: Finite


class ComparedEntry(Record):
    """What the staged layers did on a few tokens beside the dense ones; `layers`: the digests of their files."""

    layers: Row[Sha256 | None]
    compared: ComparedFigures


class AssemblingEntry(Record):
    """OUTPUT, the names that are this job's there, and sizes that its shards had."""

    output: str
    files: Row[str] | None = None
    shard_bytes: Row[NonNegativeInt] | None = None


class CompleteEntry(Record):
    """A finished job: OUTPUT, the digest of its compression record, the summary."""

    output: str
    contract_sha256: Sha256
    summary: Mapping[str, Any]


class ReusedEntry(Record):
    """Seconds of forward passes that this job was spared."""

    seconds: Finite


class ScoreEntry(Record):
    """The perplexity of the dense or the compressed model (`seal`: of the compression record) on a text."""

    kind: str | None = None
    model: str
    seal: Sha256
    text: Mapping[str, Any] | None = None
    seen: float | None = None
    perplexity: Finite
    loss: float | None = None
    tokens: PositiveInt
    windows: int | None = None
    window: PositiveInt


class PointsEntry(Record):
    """The points of a sweep as it was last asked for: digest of each, under which its own entries are."""

    digests: Row[str]


class PointEntry(Record):
    """What came of one point of a sweep, beside its ranks.

    `text`: digest of the tokens that it was scored on. `counts` as the compression record has them. `loss`: of the
    evaluation text, `held_out`: beside the dense model, each in nats per token, where there is such text. `predicted`
    by the point's curves, where its ranks follow them. `output`, `seal`: of its checkpoint, where that is kept.
    """

    text: Sha256
    counts: Mapping[str, Mapping[str, NonNegativeInt]]
    loss: Finite | None
    held_out: HeldOutScoreEntry | None
    predicted: Finite | None
    seconds: NonNegative
    output: str | None
    seal: Sha256 | None


class TaskFigure(Record):
    """One metric of one task; `stderr` null where lm-eval knows none."""

    value: Finite
    stderr: Finite | None


class TaskScores(Record):
    """A task's figures by metric (and filter, where it has one), over so many documents."""

    documents: PositiveInt | None = None
    metrics: Mapping[str, TaskFigure]


class TaskScoreEntry(Record):
    """The scores of the dense or the compressed model on lm-eval's tasks."""

    model: str
    seal: Sha256
    tasks: Mapping[str, TaskScores]


# The class of an entry, by the first part of its key that is here. What is of another kind is JSON without more.
KINDS: Mapping[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(entry)
    for kind, entry in {
        "layer": LayerEntry,
        "dense": DenseEntry,
        "statistics": StatisticsEntry,
        "activations": ActivationsEntry,
        "ranks": RanksEntry,
        "measured": MeasuredEntry,
        "gradient": GradientEntry,
        "regradient": GradientEntry,
        "inputs": ActivationsEntry,
        "curves": CurvesEntry,
        "tokens": TokensEntry,
        "schedule": ScheduleEntry,
        "target": TargetEntry,
        "tries": TryEntry,
        "held_out": HeldOutEntry,
        "held_out_score": HeldOutScoreEntry,
        "scored": ScoredEntry,
        "rest": ShardRecord,
        "assembling": AssemblingEntry,
        "complete": CompleteEntry,
        "reused": ReusedEntry,
        "score": ScoreEntry,
        "task_score": TaskScoreEntry,
        "compared": ComparedEntry,
        "evaluation": TokensEntry,
        "points": PointsEntry,
        "result": PointEntry,
    }.items()
}
