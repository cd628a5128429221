"""The ledger's entries, held against what they must look like before anything builds on them.

A digest says that an entry is as it was written, not that it makes sense. One that does not is taken back: its work is
done again, as if it had never been committed. What the entries name is checked where it is read.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from rich.console import Console

from lamina import LaminaConfig
from lamina.layers_lamina import LaminaDecoderLayer
from pipeline.checkpoint.compression_record import Comparison
from pipeline.computation import Job, entered_scores
from pipeline.console.summary import print_summary
from pipeline.keys import RANKS, curves_key, measured_key
from stores.arrays import DTYPES as ARRAY_DTYPES
from stores.headers import DTYPES
from stores.ledger import Ledger

logger = logging.getLogger("lamina")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(allow_inf_nan=False)]


class _Entry(BaseModel):
    """What is read of an entry; what else it holds does not matter."""

    model_config = ConfigDict(strict=True)


class _Array(_Entry):
    version: int
    path: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)+[0-9a-f]{32}$")]
    shape: list[PositiveInt]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(ARRAY_DTYPES)})$")]
    chunks: list[PositiveInt]
    symmetric: bool
    metadata_sha256: Sha256
    checksums: list[str]

    @model_validator(mode="after")
    def _a_chunk_size_for_each_axis(self) -> Self:
        if len(self.chunks) != len(self.shape):
            raise ValueError(f"{len(self.chunks)} chunk sizes for {len(self.shape)} axes")
        return self


class _GradientArray(_Array):
    square_norms: list[Annotated[float, Field(ge=0.0, allow_inf_nan=False)]]
    sequences: PositiveInt
    tokens: PositiveInt


class _Tensor(_Entry):
    model_config = ConfigDict(strict=True, extra="forbid")  # it goes into compression.json as it is

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: list[NonNegativeInt]
    sha256: Sha256


class _Shard(_Entry):
    size: NonNegativeInt
    sha256: Sha256
    tensors: dict[str, _Tensor]


class _Staged(_Shard):
    path: Annotated[str, Field(pattern=r"^staged/layer-\d{5,}\.[0-9a-f]{32}\.safetensors$")]


class _Report(_Entry):
    ranks: dict[str, int]
    error: Share | None = None


class _Layer(_Entry):
    staged: _Staged
    forms: dict[str, dict[str, Any]]
    groups: dict[str, _Report]


class _Dense(_Entry):
    cosine: list[Annotated[list[Share], Field(min_length=2, max_length=2)]]
    statistics: dict[str, _Array]
    activations: list[_Array] | None = None
    inputs: list[_Array | None] | None = None


class _Gradient(_Entry):
    statistics: dict[str, _GradientArray]
    activations: list[_Array] | None = None


class _Statistics(_Entry):
    statistics: dict[str, _Array]


class _Activations(_Entry):
    activations: list[_Array]


class _Ranks(_Entry):
    ranks: dict[str, dict[str, PositiveInt]]
    importance: dict[str, Share]


class _Measured(_Entry):
    measured: dict[str, Any]


class _Curve(_Entry):
    ranks: dict[str, list[PositiveInt]]
    numbers: list[float]
    cache: list[float]
    loss: list[Share]

    @model_validator(mode="after")
    def _columns_are_of_one_length(self) -> Self:
        lengths = {len(self.numbers), len(self.cache), len(self.loss), *map(len, self.ranks.values())}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"columns of {sorted(lengths)} points")
        return self


class _Curves(_Entry):
    curves: dict[str, _Curve]


class _Tokens(_Entry):
    tokens: _Array


class _HeldOut(_Tokens):
    outputs: list[_Array]


class _HeldOutScore(_Entry):
    divergence: Share
    dense_perplexity: Share
    perplexity: Share
    tokens: PositiveInt


class _Assembling(_Entry):
    output: str
    files: list[str] | None = None
    shard_bytes: list[NonNegativeInt] | None = None


class _Complete(_Entry):
    output: str
    contract_sha256: Sha256
    summary: dict[str, Any]


class _Reused(_Entry):
    seconds: Share


class _Score(_Entry):
    model: str
    seal: Sha256
    perplexity: Share
    tokens: PositiveInt
    window: PositiveInt


class _Compared(_Entry):
    layers: list[Sha256 | None]
    compared: Comparison


KINDS: dict[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(entry)
    for kind, entry in {
        "layer": _Layer,
        "dense": _Dense,
        "statistics": _Statistics,
        "activations": _Activations,
        "ranks": _Ranks,
        "measured": _Measured,
        "gradient": _Gradient,
        "curves": _Curves,
        "tokens": _Tokens,
        "held_out": _HeldOut,
        "held_out_score": _HeldOutScore,
        "rest": _Shard,
        "assembling": _Assembling,
        "complete": _Complete,
        "reused": _Reused,
        "score": _Score,
        "compared": _Compared,
    }.items()
}


def check_entries(ledger: Ledger, job: Job, config: Mapping[str, Any]) -> None:
    """Takes back every entry that makes no sense, with a warning. `config`: the source's, under standard names."""
    for key in ledger.keys():  # noqa: SIM118 - no mapping
        kind = key.partition("/")[0]
        fault = _fault(kind, key, ledger.get(key), job, config) if kind in KINDS else None
        if fault:
            _take_back(ledger, key, fault)
    _check_ranks(ledger, job)


def _fault(kind: str, key: str, entry: Any, job: Job, config: Mapping[str, Any]) -> str | None:
    try:
        found = KINDS[kind].validate_python(entry)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(found, _Dense) and (
        len(found.cosine) != job.shards or not all(count > 0 for _, count in found.cosine)
    ):
        return "cosine: not one sum and count for each shard"
    if isinstance(found, _Activations | _Dense) and len(found.activations or [0] * job.shards) != job.shards:
        return f"activations: {len(found.activations or [])} of {job.shards} shards"
    if isinstance(found, _Dense) and found.inputs is not None:
        stored = tuple(shard for shard, record in enumerate(found.inputs) if record is not None)
        if len(found.inputs) != job.shards or stored != job.gradient_shards:
            return f"inputs: of shards {stored}, not {job.gradient_shards}"
    if isinstance(found, _Gradient) and len(found.activations or job.gradient_shards) != len(job.gradient_shards):
        return f"activations: {len(found.activations or [])} of {len(job.gradient_shards)} shards"
    if isinstance(found, _Complete):
        return _summary_fault(found.summary)
    return _layer_fault(int(key.rpartition("/")[2]), found, config) if isinstance(found, _Layer) else None


def _summary_fault(summary: Mapping[str, Any]) -> str | None:
    try:
        print_summary(summary, Console(file=io.StringIO()))
    except Exception as error:  # formatting fails in as many ways as there are types
        return f"summary: {error!r}"
    return None


def _layer_fault(layer: int, found: _Layer, config: Mapping[str, Any]) -> str | None:
    """Whether the layer that the forms describe has the tensors that were staged."""
    try:
        forms = [found.forms if index == layer else {} for index in range(config["num_hidden_layers"])]
        described = LaminaConfig(**{**config, "forms": forms})
        with torch.device("meta"):
            expected = LaminaDecoderLayer(described, layer).state_dict()
    except Exception as error:  # whatever the serving code makes of forms that nobody wrote
        return f"forms: {error}"
    prefix = f"{config['block']['layers']}.{layer}."
    staged = {name.removeprefix(prefix): tensor.shape for name, tensor in found.staged.tensors.items()}
    wrong = [name for name, tensor in expected.items() if staged.get(name) != list(tensor.shape)]
    return f"forms: staged is another {', '.join(wrong)}" if wrong else None


def _check_ranks(ledger: Ledger, job: Job) -> None:
    """Ranks follow from the scores beside them: they are what this manifest gives for these scores."""
    entry = ledger.get(RANKS)
    if entry is None:
        return
    keys = [measured_key(layer) for layer in sorted({task.group.layer for task in job.measures})]
    keys += [curves_key(layer) for layer in sorted({task.group.layer for task in job.predicts})]
    nothing: dict[str, Any] = {"measured": {}, "curves": {}}
    try:
        importance = {int(layer): value for layer, value in entry["importance"].items()}
        ranks = job.allocate(entered_scores(job, lambda key: ledger.get(key) or nothing, importance))
    except Exception as error:  # scores of the wrong kind fail wherever a method first computes with them
        for key in keys:
            _take_back(ledger, key, f"no ranks follow from it: {error}")
        ranks = {}
    if ranks != entry["ranks"]:
        _take_back(ledger, RANKS, "these ranks do not follow from its scores")


def _take_back(ledger: Ledger, key: str, fault: str) -> None:
    logger.warning("ledger entry %s makes no sense (%s): taken back, its work is done again", key, fault)
    ledger.retract(key)
