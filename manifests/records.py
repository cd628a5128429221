"""Records of committed data: typed, frozen JSON objects inside the entries of `manifests.entries`. docs/formats.md.

`stores.ledger` reads and writes them: a `LedgerKey[DenseEntry]` gives a `DenseEntry`. An object that is read from disk
is checked against its class once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    model_validator,
)

ARRAY_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
TENSOR_DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
    "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0",
)  # fmt: skip

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
INFINITY = "Infinity"  # as text: `float` of Python and `Number` of JavaScript read it
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

E = TypeVar("E")
T = TypeVar("T")
Row = Annotated[tuple[T, ...], Field(strict=False)]  # a JSON array; its items stay strict
Pair = Annotated[T, Field(strict=False)]  # a JSON array of fixed length


def _read_infinity(perplexity: Any) -> Any:
    return math.inf if perplexity == INFINITY else perplexity


def _write_infinity(perplexity: float) -> float | str:
    return INFINITY if math.isinf(perplexity) else perplexity


Perplexity = Annotated[
    float,
    Field(ge=0.0),  # refuses NaN
    BeforeValidator(_read_infinity),
    PlainSerializer(_write_infinity, when_used="json"),
]


class LedgerKey(str, Generic[E]):
    """The name of a ledger entry of type E."""

    __slots__ = ()


class Record(BaseModel):
    """A JSON object of the ledger. Fields of later versions are kept as they are."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", ser_json_inf_nan="constants")

    def as_json(self) -> dict[str, Any]:
        """Return the stored object, without fields at their defaults. Raises ValueError for values that JSON lacks."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


# -- committed data ----------------------------------------------------------------------------------------------------


class ArrayRecord(Record):
    """A Zarr array that was written once: its path, its grid of chunks, and their checksums in C order."""

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


class CountedRecord(ArrayRecord):
    """A summed moment of a point that only `tokens` of the calibration tokens passed. This may be 0."""

    tokens: NonNegativeInt


MomentRecord = Annotated[CountedRecord | ArrayRecord, Field(union_mode="left_to_right")]


class GradientRecord(ArrayRecord):
    """A summed moment of gradients, with the numbers that its shrinkage needs: square norms of sequences, by group."""

    square_norms: Row[NonNegative]
    sequences: PositiveInt
    tokens: PositiveInt


class TensorDescription(Record):
    """A tensor of a safetensors file: dtype (by the format's names), shape, and digest of its bytes."""

    model_config = ConfigDict(extra="forbid")  # it is copied into compression.json

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(TENSOR_DTYPES)})$")]
    shape: Row[NonNegativeInt]
    sha256: Sha256


class SourceFile(Record):
    """A file of the source, with other fields by which its storage identifies it: on a disk, times and inode."""

    size: NonNegativeInt
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


LevelKind = Literal["uniform", "normal", "iq4_nl", "learned"]  # the meaning of codes: themselves, or indices of a table


class Scheme(Record):
    """The rounding of a matrix: bits of a code, columns that share a scale (None: the whole row), and the meaning of
    codes: themselves (`uniform`), or indices of a stored table."""

    bits: Annotated[int, Field(ge=2, le=8)]
    group: PositiveInt | None
    levels: LevelKind = "uniform"

    @property
    def has_table(self) -> bool:
        """Return True if the levels are stored."""
        return self.levels != "uniform"


class FormSpec(Record):
    """The stored form of a role, as in the checkpoint's config. `lamina.forms_lamina` defines the forms and their
    other fields."""

    form: str
    rank: PositiveInt | None = None
    group: str | None = None
    value_rank: PositiveInt | None = None
    width: PositiveInt | None = None
    absorbed: bool | None = None
    rope: PositiveInt | None = None
    density: PositiveInt | None = None


class StagedLayer(StagedRecord):
    """A compressed layer for workers to load: its file, the form of each role, and the scheme of each rounded matrix by
    the path of its module."""

    forms: Mapping[str, FormSpec]
    rounded: Mapping[str, Scheme] = {}


Figure = Annotated[float, Field(allow_inf_nan=False, strict=False)]


Origin = Literal["calibration", "random"]


class ComparedFigures(Record):
    """Figures of both models on a few tokens, for `verify` to measure again. See `workers.comparing.Comparison`."""

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


class RefinedFigures(Record):
    """The training of a layer towards the dense model's outputs. docs/methods.md#refinement.

    Errors are mean squares of the difference to the dense layer's outputs, relative to their mean square; with a moment
    of the gradient, half of this and half of the error that the moment weighs. `before` and `after` are of the held-out
    samples, `train_before` and `train_after` of as many of those that it was trained on.

    Attributes:
        kept: the trained numbers are stored; otherwise those of the solve, and `after` is `before`.
        steps: steps of the stored numbers, or 0; `steps_done`: steps until it stopped.
        learning_rate: the largest of the schedule.
        rates: the rates that were tried and did not diverge, and the error of each on the held-out samples.
        held_out, samples: the number of held-out samples, and of those that it was trained on.
    """

    kept: bool
    before: NonNegative
    after: NonNegative
    train_before: NonNegative
    train_after: NonNegative
    steps: NonNegativeInt
    steps_done: NonNegativeInt
    learning_rate: NonNegative
    rates: Row[Pair[tuple[NonNegative, NonNegative]]] = ()
    held_out: PositiveInt
    samples: PositiveInt


class Curve(Record):
    """Point i of a curve: ranks, stored numbers, cache numbers per token, predicted loss (nats per token).

    `hint`: for solving the group from the same statistics, in a format of its method. Stored as `told`.
    `few`: so few tokens passed the expert that its share of the text's tokens is not known.
    """

    ranks: Mapping[str, Row[PositiveInt]]
    numbers: Row[int | float]
    cache: Row[int | float]
    loss: Row[Finite]
    hint: str = Field(default="", validation_alias=AliasChoices("told", "hint"), serialization_alias="told")
    few: bool = False

    def times(self, ratio: float) -> Curve:
        """Return the curve with all losses multiplied."""
        return self if ratio == 1.0 else self.model_copy(update={"loss": tuple(ratio * loss for loss in self.loss)})

    @model_validator(mode="after")
    def _columns_of_one_length(self) -> Self:
        lengths = {len(self.numbers), len(self.cache), len(self.loss), *map(len, self.ranks.values())}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"columns of {sorted(lengths)} points")
        return self
