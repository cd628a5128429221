"""The typed, frozen entries of the ledger, by the first part of their keys. docs/formats.md.

They hold the records of committed data (`manifests.records`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter

from manifests.records import (
    ArrayRecord,
    ComparedFigures,
    Curve,
    Finite,
    FormSpec,
    GradientRecord,
    MomentRecord,
    NonNegative,
    Pair,
    Perplexity,
    Record,
    RefinedFigures,
    Row,
    Scheme,
    Sha256,
    ShardRecord,
    SourceFile,
    StagedRecord,
)


class DenseEntry(Record):
    """The dense pass through a layer: (sum, count) of cosines by shard, moments by key, and hidden states if stored:
    outputs by shard, and inputs of some shards for the backward pass."""

    cosine: Row[Pair[tuple[Finite, NonNegativeInt]]]
    statistics: Mapping[str, MomentRecord]
    activations: Row[ArrayRecord] | None = None
    inputs: Row[ArrayRecord | None] | None = None


class GradientEntry(Record):
    """The backward pass through a layer: moments of gradients by key, and gradients at the layer's inputs by shard, if
    stored."""

    statistics: Mapping[str, GradientRecord]
    activations: Row[ArrayRecord] | None = None


class StatisticsEntry(Record):
    """The moments of a layer in the compressed model, by key."""

    statistics: Mapping[str, MomentRecord]


class ActivationsEntry(Record):
    """The inputs of a layer in the compressed model, by shard."""

    activations: Row[ArrayRecord]


class RanksEntry(Record):
    """The ranks of every task, and the importance of each layer that they are based on."""

    ranks: Mapping[str, Mapping[str, PositiveInt]]
    importance: Mapping[str, Finite]


class MeasuredEntry(Record):
    """Measurements of the dense weights of a layer, by task."""

    measured: Mapping[str, Any]


class CurvesEntry(Record):
    """The loss curves of a layer's groups, by task."""

    curves: Mapping[str, Curve]


class GroupReport(Record):
    """The result of compressing a group; other fields of its method are kept as they are."""

    ranks: Mapping[str, int]
    error: Finite | None = None


class LayerEntry(Record):
    """A compressed layer: its file, the form of each role, and the report of each group.

    `rounded`: the scheme of each rounded matrix, by the path of its module. `refined`: the figures of its refinement.
    """

    staged: StagedRecord
    forms: Mapping[str, FormSpec]
    groups: Mapping[str, GroupReport]
    rounded: Mapping[str, Scheme] = {}
    refined: RefinedFigures | None = None


class TokensEntry(Record):
    """The calibration tokens."""

    tokens: ArrayRecord


class HeldOutEntry(TokensEntry):
    """Tokens beyond the calibration samples and, once they are computed, the dense model's last hidden states by
    shard. `inputs`: its hidden states that enter some layers, by the layer's number, until these are measured."""

    outputs: Row[ArrayRecord] | None = None
    inputs: Mapping[str, Row[ArrayRecord]] = {}

    @property
    def hidden_states(self) -> list[ArrayRecord]:
        """Return the records of all its hidden states."""
        return [*(self.outputs or ()), *(record for inputs in self.inputs.values() for record in inputs)]


class ScoredEntry(Record):
    """The hidden states that enter a layer of a model that is being scored, by shard. `of`: digest of the windows'
    tokens and of the staged layers before it."""

    of: Sha256
    activations: Row[ArrayRecord]


class AnswersEntry(Record):
    """A model's answers to the questions of a pass, in order: the log-likelihood of each continuation, and whether each
    of its tokens is the likeliest. `of`: digest of the questions' tokens and of the model."""

    of: Sha256
    logs: Row[Finite]
    greedy: Row[bool]


class HeldOutScoreEntry(Record):
    """The distance of the compressed from the dense model on the held-out tokens. Divergence and losses are in nats
    per token."""

    divergence: Finite
    dense_perplexity: Perplexity
    perplexity: Perplexity
    tokens: PositiveInt
    dense_loss: Finite | None = None
    loss: Finite | None = None


class TextLoss(Record):
    """The dense model's loss on windows of a text, in nats per token."""

    loss: NonNegative
    tokens: PositiveInt


class TextsEntry(Record):
    """The dense model's losses on the calibration samples and on the evaluation text, in windows of `window` tokens.
    `of`: digest of both texts' tokens. `prefix`: as in `ScoreEntry`. `remark`: on calibration text that looks
    damaged."""

    of: Sha256
    window: PositiveInt
    prefix: Row[NonNegativeInt] | None = None
    calibration: TextLoss
    evaluation: TextLoss | None = None
    remark: str | None = None


class SamplesEntry(Record):
    """The number of calibration samples that `samples: auto` has chosen, and the held-out errors of fits to other
    numbers of them (`counts`)."""

    samples: PositiveInt
    counts: Row[PositiveInt]
    errors: Row[NonNegative]


class ScheduleEntry(Record):
    """The number of layers that `resume.every: auto` has chosen."""

    every: PositiveInt


class TriedSizeEntry(Record):
    """The size, in thousandths of `keep`, that is being tried for a budget by loss."""

    size: Annotated[int, Field(ge=1, le=1000)]


class TryEntry(HeldOutScoreEntry):
    """The measured loss of a size, and the loss that its curves predict (nats per token)."""

    predicted: Finite


class BlockEntry(Record):
    """The loss of the model with some consecutive layers compressed, from the entry's layer to `stop`, exclusive:
    measured, and as their curves predict it (nats per token)."""

    stop: PositiveInt
    measured: Finite
    predicted: Finite


class LossRatiosEntry(Record):
    """Task -> the factor by which the losses that its curve predicts are multiplied; 1 for a task that is not named."""

    ratios: Mapping[str, Annotated[PositiveFloat, Field(allow_inf_nan=False)]]


class ComparedEntry(Record):
    """The staged layers compared with the dense ones on a few tokens; `layers`: the digests of their files."""

    layers: Row[Sha256 | None]
    compared: ComparedFigures


class AssemblingEntry(Record):
    """OUTPUT, the names of this job's files there, and the sizes of its shards."""

    output: str
    files: Row[str] | None = None
    shard_bytes: Row[NonNegativeInt] | None = None


class CompleteEntry(Record):
    """A finished job: OUTPUT, the digest of its compression record, the summary."""

    output: str
    contract_sha256: Sha256
    summary: Mapping[str, Any]


class ReusedEntry(Record):
    """Seconds of forward passes that this job saved by reusing another's."""

    seconds: Finite


class TeacherEntry(Record):
    """The dense model's distribution on the text of a healing. `of`: digest of the tokens and of how they are stored.

    Attributes:
        tokens: ids of the trained windows, then of the held-out ones.
        rows: rows of the trained windows (`pipeline.kernels.teacher_rows`), by shard.
        outputs: last hidden states of the held-out windows, by shard.
    """

    of: Sha256
    tokens: ArrayRecord
    rows: Row[ArrayRecord]
    outputs: Row[ArrayRecord]


class HealingCurve(Record):
    """Divergences of the healed from the dense model on held-out windows, in nats per token, after some steps.

    `best`: the step with the least. `skipped`: steps whose gradient was not finite. `retreats`: the steps after which
    the training went back to the best weights; null: of a version that never did.
    """

    steps: Row[NonNegativeInt] = ()
    divergences: Row[Finite] = ()
    best: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    retreats: Row[NonNegativeInt] | None = None


class HealingEntry(Record):
    """A healing in progress: its digest, and the folder of its last checkpoint in RUN_DIR.

    `per_step`: windows of a step. `peak`: the largest learning rate; `relative`: as a share of each tensor's magnitude,
    `few` times as large of tensors with few numbers. They stay the same if other processes, or a version with other
    defaults, continue the healing. `steps`: the total number. A field is None if the version that began the healing did
    not enter it.
    """

    of: Sha256
    step: NonNegativeInt
    folder: str
    curve: HealingCurve
    steps: NonNegativeInt | None = None
    per_step: NonNegativeInt | None = None
    peak: float | None = None
    relative: bool = False
    few: float | None = None


class HealedEntry(Record):
    """A finished healing. Without `layers`, none was better than the start.

    Attributes:
        of: digest of the settings, of the text and of the layers before healing.
        base: the digests of these layers.
        layers: the healed layers, by number.
        trained: the names of the tensors that differ from those of the solve.
        figures: what the compression record and the card say of it.
    """

    of: Sha256
    base: Row[Sha256 | None]
    layers: Mapping[str, StagedRecord]
    trained: Row[str]
    figures: Mapping[str, Any]


class ScoreEntry(Record):
    """The perplexity of the dense or the compressed model (`seal`: of the compression record) on a text.

    `prefix`: the ids before the text in each window; null: of a version that had none.
    """

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
    prefix: Row[NonNegativeInt] | None = None


class PointsEntry(Record):
    """The points of the last run of a sweep, by the digests that begin the keys of their entries."""

    digests: Row[str]


class TaskFigure(Record):
    """One metric of one task; `stderr` is null if lm-eval has none."""

    value: Finite
    stderr: Finite | None


class TaskScores(Record):
    """A task's figures by metric (and filter, if it has one), and the number of documents."""

    documents: PositiveInt | None = None
    metrics: Mapping[str, TaskFigure]


class HealedPoint(Record):
    """The healing of a point of a sweep. Its scores are null if no step was better than the solved layers, which then
    stay.

    Attributes:
        asked: digest of the settings and of the text.
        figures: as in the compression record.
        loss, held_out, tasks: scores of the healed layers, as in `PointEntry`.
    """

    asked: Sha256
    figures: Mapping[str, Any]
    loss: Finite | None = None
    held_out: HeldOutScoreEntry | None = None
    tasks: Mapping[str, TaskScores] | None = None


class PointEntry(Record):
    """The results of a point of a sweep, besides its ranks.

    Attributes:
        text: digest of the tokens on which it was scored.
        counts: as in the compression record.
        loss: on the evaluation text, in nats per token.
        held_out: scores beside the dense model.
        predicted: loss predicted by the point's curves, if its ranks follow them.
        output, seal: of its checkpoint, if that is kept.
        tasks: its scores on tasks, if the sweep has some.
        healed: its healing, if it had one; the other scores are of the solved layers.
    """

    text: Sha256
    counts: Mapping[str, Mapping[str, NonNegativeInt]]
    loss: Finite | None
    held_out: HeldOutScoreEntry | None
    predicted: Finite | None
    seconds: NonNegative
    output: str | None
    seal: Sha256 | None
    tasks: Mapping[str, TaskScores] | None = None
    healed: HealedPoint | None = None


class TaskScoreEntry(Record):
    """The scores of the dense or the compressed model on lm-eval's tasks."""

    model: str
    seal: Sha256
    tasks: Mapping[str, TaskScores]


# The class of an entry, by the first part of its key. Entries of other kinds are unchecked JSON.
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
        "samples": SamplesEntry,
        "texts": TextsEntry,
        "schedule": ScheduleEntry,
        "target": TriedSizeEntry,
        "tries": TryEntry,
        "block": BlockEntry,
        "ratios": LossRatiosEntry,
        "held_out": HeldOutEntry,
        "held_out_score": HeldOutScoreEntry,
        "scored": ScoredEntry,
        "answers": AnswersEntry,
        "rest": ShardRecord,
        "assembling": AssemblingEntry,
        "complete": CompleteEntry,
        "reused": ReusedEntry,
        "score": ScoreEntry,
        "task_score": TaskScoreEntry,
        "compared": ComparedEntry,
        "evaluation": TokensEntry,
        "teacher": TeacherEntry,
        "healing": HealingEntry,
        "healed": HealedEntry,
        "points": PointsEntry,
        "result": PointEntry,
    }.items()
}
