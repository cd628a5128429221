"""The keys of the ledger's entries."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manifests import entries
from manifests.records import LedgerKey, ShardRecord, SourceFile

RANKS: LedgerKey[entries.RanksEntry] = LedgerKey("ranks")
HELD_OUT: LedgerKey[entries.HeldOutEntry] = LedgerKey("held_out")  # tokens, and the dense model's outputs on them
HELD_OUT_SCORE: LedgerKey[entries.HeldOutScoreEntry] = LedgerKey("held_out_score")
TRIED_SIZE: LedgerKey[entries.TriedSizeEntry] = LedgerKey("target")  # the size being tried for a budget by loss
LOSS_RATIOS: LedgerKey[entries.LossRatiosEntry] = LedgerKey("ratios")  # by `budget.measure_layers`
TRIES = "tries/"  # prefix of the scores of a size, in thousandths
SCORED = "scored/"  # prefix of the hidden states of a model being scored
TOKENS: LedgerKey[entries.TokensEntry] = LedgerKey("tokens")
SAMPLES: LedgerKey[entries.SamplesEntry] = LedgerKey("samples")  # the number chosen by `calibration.samples: auto`
TEXTS: LedgerKey[entries.TextsEntry] = LedgerKey("texts")  # the dense model's losses on both texts
SCHEDULE: LedgerKey[entries.ScheduleEntry] = LedgerKey("schedule")  # the number chosen by `resume.every: auto`
SOURCE: LedgerKey[Mapping[str, SourceFile]] = LedgerKey("source")  # by name
HARDWARE: LedgerKey[Mapping[str, str]] = LedgerKey("hardware")
TEACHER: LedgerKey[entries.TeacherEntry] = LedgerKey("teacher")  # the dense model's distributions for a healing
HEALING: LedgerKey[entries.HealingEntry] = LedgerKey("healing")  # the last checkpoint of a healing in progress
HEALED: LedgerKey[entries.HealedEntry] = LedgerKey("healed")  # the layers that a finished healing has trained
COMPARED: LedgerKey[entries.ComparedEntry] = LedgerKey("compared")
ASSEMBLING: LedgerKey[entries.AssemblingEntry] = LedgerKey("assembling")
COMPLETE: LedgerKey[entries.CompleteEntry] = LedgerKey("complete")
REUSED: LedgerKey[entries.ReusedEntry] = LedgerKey("reused")
EVALUATION: LedgerKey[entries.TokensEntry] = LedgerKey("evaluation")  # the tokens on which a sweep scores its points
POINTS: LedgerKey[entries.PointsEntry] = LedgerKey("points")
RESULT: LedgerKey[entries.PointEntry] = LedgerKey("result")  # in the part of the ledger of a sweep's point
MEASURED_PARTS = ("block", "group")  # kinds of entries by `budget.measure_layers`
LAYER_KINDS = ("dense", "gradient", "measured", "curves", "statistics", "activations", "layer", "block")
BEFORE_WORK = (SOURCE, TOKENS, EVALUATION, SCHEDULE, SAMPLES, HARDWARE, POINTS)  # entered before anything is computed
SCORED_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def dense_key(layer: int) -> LedgerKey[entries.DenseEntry]:
    """The dense pass through a layer: cosines, moments, hidden states."""
    return LedgerKey(_layer_key("dense", layer))


def gradient_key(layer: int) -> LedgerKey[entries.GradientEntry]:
    """The backward pass through a layer: moments of gradients, gradients at its inputs."""
    return LedgerKey(_layer_key("gradient", layer))


def measured_key(layer: int) -> LedgerKey[entries.MeasuredEntry]:
    """Measurements of a layer's dense weights."""
    return LedgerKey(_layer_key("measured", layer))


def curves_key(layer: int) -> LedgerKey[entries.CurvesEntry]:
    """The predicted loss of a layer's groups, by size."""
    return LedgerKey(_layer_key("curves", layer))


def statistics_key(layer: int) -> LedgerKey[entries.StatisticsEntry]:
    """The moments of a layer in the compressed model."""
    return LedgerKey(_layer_key("statistics", layer))


def activations_key(layer: int) -> LedgerKey[entries.ActivationsEntry]:
    """The inputs of a layer in the compressed model."""
    return LedgerKey(_layer_key("activations", layer))


def layer_key(layer: int) -> LedgerKey[entries.LayerEntry]:
    """A compressed layer."""
    return LedgerKey(_layer_key("layer", layer))


def block_key(layer: int) -> LedgerKey[entries.MeasuredPartEntry]:
    """The loss of some layers, from this one on."""
    return LedgerKey(_layer_key("block", layer))


def group_in_all_layers_key(method: int, group: str) -> LedgerKey[entries.MeasuredPartEntry]:
    """The loss of a method's group in all layers."""
    return LedgerKey(f"group/{method}/{group}")


def try_key(size: int) -> LedgerKey[entries.TryEntry]:
    """The scores of a size in thousandths."""
    return LedgerKey(f"{TRIES}{size:04d}")


def scored_key(model: str, layer: int) -> LedgerKey[entries.ScoredEntry]:
    """The inputs of a layer of the model scored under this name."""
    assert SCORED_NAME.fullmatch(model)
    return LedgerKey(f"{SCORED}{model}/{layer:05d}")


def answers_key(name: str) -> LedgerKey[entries.AnswersEntry]:
    """The answers of the pass of this name."""
    assert SCORED_NAME.fullmatch(name)
    return LedgerKey(f"answers/{name}")


def point_part(digest: str) -> str:
    """The part of the ledger that holds a sweep point's own entries."""
    return f"point/{digest}"


def rest_key(shard: str) -> LedgerKey[ShardRecord]:
    """A file of OUTPUT without compressed layers. `shard`: its name without the suffix."""
    return LedgerKey(f"rest/{shard}")


def score_key(model: str, digest: str) -> LedgerKey[entries.ScoreEntry]:
    """A score of the `output` or the `dense` model. `digest`: the digest of model and text."""
    return LedgerKey(f"score/{model}/{digest}")


def task_score_key(model: str, digest: str) -> LedgerKey[entries.TaskScoreEntry]:
    """Score of the `output` or the `dense` model on tasks. `digest`: the digest of model and tasks."""
    return LedgerKey(f"task_score/{model}/{digest}")


def _layer_key(kind: str, layer: int) -> str:
    assert kind in LAYER_KINDS
    return f"{kind}/{layer:05d}"
