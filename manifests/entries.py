"""The entries of the ledger, typed and frozen, by the kind that their keys begin with. docs/formats.md.

They name committed data, which `manifests.records` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter

from manifests.records import (
    ArrayRecord,
    ComparedFigures,
    Curve,
    Finite,
    FormSpec,
    GradientRecord,
    NonNegative,
    Pair,
    Perplexity,
    Record,
    Row,
    Scheme,
    Sha256,
    ShardRecord,
    SourceFile,
    StagedRecord,
)


class DenseEntry(Record):
    """The dense pass through a layer: (sum, count) of cosines by shard, moments by key, and what was stored of the
    hidden states: its outputs by shard, and of some shards its inputs for the backward pass."""

    cosine: Row[Pair[tuple[Finite, NonNegativeInt]]]
    statistics: Mapping[str, ArrayRecord]
    activations: Row[ArrayRecord] | None = None
    inputs: Row[ArrayRecord | None] | None = None


class GradientEntry(Record):
    """The backward pass through a layer: moments of gradients by key; by shard of the pass, gradients at the layer's
    inputs, if stored."""

    statistics: Mapping[str, GradientRecord]
    activations: Row[ArrayRecord] | None = None


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
    """How far the compressed layers are from the dense ones on the held-out tokens (divergence and losses: nats per
    token)."""

    divergence: Finite
    dense_perplexity: Perplexity
    perplexity: Perplexity
    tokens: PositiveInt
    dense_loss: Finite | None = None
    loss: Finite | None = None


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
    perplexity: Perplexity
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
        "source": Mapping[str, SourceFile],
        "hardware": Mapping[str, str],
        "layer": LayerEntry,
        "dense": DenseEntry,
        "statistics": StatisticsEntry,
        "activations": ActivationsEntry,
        "ranks": RanksEntry,
        "measured": MeasuredEntry,
        "gradient": GradientEntry,
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
