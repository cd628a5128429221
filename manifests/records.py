"""What the ledger holds, typed: records of committed data, and the entries that name them. docs/formats.md.

They are JSON objects on disk and on their way between processes, and typed dictionaries here: a `Key[DenseEntry]` gives
a `DenseEntry`, which mypy holds every reader and writer to, and `pipeline.job.ledger_entries` every ledger.
"""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NotRequired,  # pydantic takes no other before Python 3.12
    TypeVar,
)

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, with_config
from typing_extensions import TypedDict

ARRAY_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
TENSOR_DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
    "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0",
)  # fmt: skip

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

STRICT = ConfigDict(strict=True)
E = TypeVar("E")


class Key(str, Generic[E]):
    """A name in the ledger, of an entry of type E."""

    __slots__ = ()


# -- committed data ----------------------------------------------------------------------------------------------------


@with_config(STRICT)
class ArrayRecord(TypedDict):
    """A Zarr array that was written once: where it is, its grid of chunks, and the checksum of each, in C order."""

    version: int
    path: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)+[0-9a-f]{32}$")]
    shape: list[PositiveInt]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(ARRAY_DTYPES)})$")]
    chunks: list[PositiveInt]
    symmetric: bool
    metadata_sha256: Sha256
    checksums: list[str]


@with_config(STRICT)
class GradientRecord(ArrayRecord):
    """A summed moment of gradients, with what shrinking it takes: square norms of each sequence's own, by group."""

    square_norms: list[NonNegative]
    sequences: PositiveInt
    tokens: PositiveInt


@with_config(ConfigDict(strict=True, extra="forbid"))  # it goes into compression.json as it is
class TensorDescription(TypedDict):
    """A tensor of a safetensors file: its dtype as the format names it, its shape, the digest of its bytes."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(TENSOR_DTYPES)})$")]
    shape: list[NonNegativeInt]
    sha256: Sha256


@with_config(STRICT)
class ShardRecord(TypedDict):
    """A safetensors file, by the tensors in it."""

    file: NotRequired[str]
    size: NonNegativeInt
    sha256: Sha256
    tensors: dict[str, TensorDescription]


@with_config(STRICT)
class StagedRecord(ShardRecord):
    """The file of a compressed layer; `path` is relative to RUN_DIR."""

    path: Annotated[str, Field(pattern=r"^staged/layer-\d{5,}\.[0-9a-f]{32}\.safetensors$")]


@with_config(STRICT)
class Scheme(TypedDict):
    """How a matrix is rounded: bits of a code, and columns that share a scale (None: the whole row)."""

    bits: Annotated[int, Field(ge=2, le=8)]
    group: PositiveInt | None


class StagedLayer(StagedRecord):
    """What a worker needs to load a compressed layer: its file, the form of each role's tensors, and the scheme of each
    rounded matrix by the path of its module."""

    forms: dict[str, dict[str, Any]]
    rounded: NotRequired[dict[str, Scheme]]


Figure = Annotated[float, Field(allow_inf_nan=False, strict=False)]


@with_config(STRICT)
class ComparedFigures(TypedDict):
    """What the job measured on a few tokens, for `verify` to measure again: see `workers.comparing.Comparison`."""

    origin: Literal["calibration", "random"]
    tokens: Annotated[list[Annotated[list[NonNegativeInt], Field(min_length=1)]], Field(min_length=1)]
    layer_errors: list[Figure]
    error: Figure
    sketch: list[list[Figure]]
    logits_sketch: list[Figure]


def _alike(found: ComparedFigures) -> ComparedFigures:
    if len({len(sample) for sample in found["tokens"]}) != 1 or len(found["sketch"]) != len(found["layer_errors"]):
        raise ValueError("samples of different lengths, or figures of different numbers of layers")
    return found


Compared = Annotated[ComparedFigures, AfterValidator(_alike)]


# -- entries -----------------------------------------------------------------------------------------------------------


def _one_chunk_size_for_each_axis(array: ArrayRecord) -> ArrayRecord:
    if len(array["chunks"]) != len(array["shape"]):
        raise ValueError(f"{len(array['chunks'])} chunk sizes for {len(array['shape'])} axes")
    return array


Array = Annotated[ArrayRecord, AfterValidator(_one_chunk_size_for_each_axis)]
GradientArray = Annotated[GradientRecord, AfterValidator(_one_chunk_size_for_each_axis)]


@with_config(STRICT)
class DenseEntry(TypedDict):
    """The dense pass through a layer: (sum, count) of cosines by shard, moments by key, and what was stored of the
    hidden states: its outputs by shard, and of some shards its inputs for the backward pass."""

    cosine: list[Annotated[list[Finite], Field(min_length=2, max_length=2)]]
    statistics: dict[str, Array]
    activations: NotRequired[list[Array]]
    inputs: NotRequired[list[Array | None]]


@with_config(STRICT)
class GradientEntry(TypedDict):
    """The backward pass through a layer: moments of gradients by key; by shard of the pass, gradients at the layer's
    inputs, if stored, and of the last layer the labels, where a second round takes them again."""

    statistics: dict[str, GradientArray]
    activations: NotRequired[list[Array]]
    labels: NotRequired[list[Array]]


@with_config(STRICT)
class StatisticsEntry(TypedDict):
    """The moments of the walk behind compressed layers, by key."""

    statistics: dict[str, Array]


@with_config(STRICT)
class ActivationsEntry(TypedDict):
    """The hidden states of the walk that enter a layer, by shard."""

    activations: list[Array]


@with_config(STRICT)
class RanksEntry(TypedDict):
    """The ranks of every task, and the importance of each layer that they follow."""

    ranks: dict[str, dict[str, PositiveInt]]
    importance: dict[str, Finite]


@with_config(STRICT)
class MeasuredEntry(TypedDict):
    """What the dense weights of a layer tell, by task."""

    measured: dict[str, Any]


@with_config(STRICT)
class CurveColumns(TypedDict):
    """Point i of a curve: ranks, stored numbers, cache numbers per token, predicted loss (nats per token)."""

    ranks: dict[str, list[PositiveInt]]
    numbers: list[float]
    cache: list[float]
    loss: list[Finite]


def _columns_of_one_length(curve: CurveColumns) -> CurveColumns:
    lengths = {len(curve["numbers"]), len(curve["cache"]), len(curve["loss"]), *map(len, curve["ranks"].values())}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"columns of {sorted(lengths)} points")
    return curve


@with_config(STRICT)
class CurvesEntry(TypedDict):
    """What each size of a layer's groups costs, by task."""

    curves: dict[str, Annotated[CurveColumns, AfterValidator(_columns_of_one_length)]]


@with_config(STRICT)
class GroupReport(TypedDict):
    """How a group was compressed; what else a method says of it is kept as it is."""

    ranks: dict[str, int]
    error: NotRequired[Finite | None]


@with_config(STRICT)
class LayerEntry(TypedDict):
    """A compressed layer: its file, the form of each role, the report of each group, the scheme of each rounded matrix
    by the path of its module."""

    staged: StagedRecord
    forms: dict[str, dict[str, Any]]
    groups: dict[str, GroupReport]
    rounded: NotRequired[dict[str, Scheme]]


@with_config(STRICT)
class TokensEntry(TypedDict):
    """The calibration tokens."""

    tokens: Array


@with_config(STRICT)
class HeldOutEntry(TokensEntry):
    """Tokens beyond the calibration samples, and, once it went through, what leaves the dense model's last layer on
    them, by shard."""

    outputs: NotRequired[list[Array]]


@with_config(STRICT)
class ScoredEntry(ActivationsEntry):
    """What enters a layer of a model that is being scored, by shard; `of`: digest of the windows' tokens and of the
    staged layers before it."""

    of: Sha256


@with_config(STRICT)
class HeldOutScoreEntry(TypedDict):
    """How far the compressed layers are from the dense ones on the held-out tokens (divergence: nats per token)."""

    divergence: Finite
    dense_perplexity: Finite
    perplexity: Finite
    tokens: PositiveInt


@with_config(STRICT)
class TargetEntry(TypedDict):
    """The size, in thousandths of `keep`, that is being made for a budget by loss."""

    size: Annotated[int, Field(ge=1, le=1000)]


@with_config(STRICT)
class TryEntry(HeldOutScoreEntry):
    """What was measured at a size, and the loss that its curves predict (nats per token)."""

    predicted: Finite


@with_config(STRICT)
class ComparedEntry(TypedDict):
    """What the staged layers did on a few tokens beside the dense ones; `layers`: the digests of their files."""

    layers: list[Sha256 | None]
    compared: Compared


@with_config(STRICT)
class AssemblingEntry(TypedDict):
    """OUTPUT, the names that are this job's there, and sizes that its shards had."""

    output: str
    files: NotRequired[list[str]]
    shard_bytes: NotRequired[list[NonNegativeInt]]


@with_config(STRICT)
class CompleteEntry(TypedDict):
    """A finished job: OUTPUT, the digest of its compression record, the summary."""

    output: str
    contract_sha256: Sha256
    summary: dict[str, Any]


@with_config(STRICT)
class ReusedEntry(TypedDict):
    """Seconds of forward passes that this job was spared."""

    seconds: Finite


@with_config(STRICT)
class ScoreEntry(TypedDict):
    """The perplexity of the dense or the compressed model (`seal`: of the compression record) on a text."""

    kind: NotRequired[str]
    model: str
    seal: Sha256
    text: NotRequired[dict[str, Any]]
    seen: NotRequired[float]
    perplexity: Finite
    loss: NotRequired[float]
    tokens: PositiveInt
    windows: NotRequired[int]
    window: PositiveInt


@with_config(STRICT)
class PointsEntry(TypedDict):
    """The points of a sweep as it was last asked for: digest of each, under which its own entries are."""

    digests: list[str]


@with_config(STRICT)
class PointEntry(TypedDict):
    """What came of one point of a sweep, beside its ranks.

    `text`: digest of the tokens that it was scored on. `counts` as the compression record has them. `loss`: of the
    evaluation text, `held_out`: beside the dense model, each in nats per token, where there is such text. `predicted`
    by the point's curves, where its ranks follow them. `output`, `seal`: of its checkpoint, where that is kept.
    """

    text: Sha256
    counts: dict[str, dict[str, NonNegativeInt]]
    loss: Finite | None
    held_out: HeldOutScoreEntry | None
    predicted: Finite | None
    seconds: NonNegative
    output: str | None
    seal: Sha256 | None


@with_config(STRICT)
class TaskFigure(TypedDict):
    """One metric of one task; `stderr` null where lm-eval knows none."""

    value: Finite
    stderr: Finite | None


@with_config(STRICT)
class TaskScores(TypedDict):
    """A task's figures by metric (and filter, where it has one), over so many documents."""

    documents: NotRequired[PositiveInt]
    metrics: dict[str, TaskFigure]


@with_config(STRICT)
class TaskScoreEntry(TypedDict):
    """The scores of the dense or the compressed model on lm-eval's tasks."""

    model: str
    seal: Sha256
    tasks: dict[str, TaskScores]
