"""The keys of the ledger's entries."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manifests import entries
from manifests.records import Key, ShardRecord, SourceFile

RANKS: Key[entries.RanksEntry] = Key("ranks")
HELD_OUT: Key[entries.HeldOutEntry] = Key("held_out")  # the held-out tokens, and the dense model's outputs on them
HELD_OUT_SCORE: Key[entries.HeldOutScoreEntry] = Key("held_out_score")
TARGET: Key[entries.TargetEntry] = Key("target")  # the size chosen for a budget by loss
TRIES = "tries/"  # prefix of the scores of a size, in thousandths
SCORED = "scored/"  # prefix of the hidden states of a model being scored
TOKENS: Key[entries.TokensEntry] = Key("tokens")
SAMPLES: Key[entries.SamplesEntry] = Key("samples")  # the number that `calibration.samples: auto` has chosen
TEXTS: Key[entries.TextsEntry] = Key("texts")  # the dense model's losses on both texts
SCHEDULE: Key[entries.ScheduleEntry] = Key("schedule")  # how often hidden states are committed, if the plan chose it
SOURCE: Key[Mapping[str, SourceFile]] = Key("source")  # by name
HARDWARE: Key[Mapping[str, str]] = Key("hardware")
TEACHER: Key[entries.TeacherEntry] = Key("teacher")  # the dense model's distribution on the text of a healing
HEALING: Key[entries.HealingEntry] = Key("healing")  # the last checkpoint of a healing in progress
HEALED: Key[entries.HealedEntry] = Key("healed")  # the layers that a finished healing has trained
COMPARED: Key[entries.ComparedEntry] = Key("compared")
ASSEMBLING: Key[entries.AssemblingEntry] = Key("assembling")
COMPLETE: Key[entries.CompleteEntry] = Key("complete")
REUSED: Key[entries.ReusedEntry] = Key("reused")
EVALUATION: Key[entries.TokensEntry] = Key("evaluation")  # the tokens on which a sweep scores its points
POINTS: Key[entries.PointsEntry] = Key("points")
RESULT: Key[entries.PointEntry] = Key("result")  # in the part of the ledger of a sweep's point
LAYER_KINDS = ("dense", "gradient", "measured", "curves", "statistics", "activations", "layer")
BEFORE_WORK = (SOURCE, TOKENS, EVALUATION, SCHEDULE, SAMPLES, HARDWARE, POINTS)  # entered before anything is computed
SCORED_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def dense_key(layer: int) -> Key[entries.DenseEntry]:
    """The dense pass through a layer: cosines, moments, hidden states."""
    return Key(_layer_key("dense", layer))


def gradient_key(layer: int) -> Key[entries.GradientEntry]:
    """The backward pass through a layer: moments of gradients, gradients at its inputs."""
    return Key(_layer_key("gradient", layer))


def measured_key(layer: int) -> Key[entries.MeasuredEntry]:
    """Measurements of a layer's dense weights."""
    return Key(_layer_key("measured", layer))


def curves_key(layer: int) -> Key[entries.CurvesEntry]:
    """The predicted loss of a layer's groups, by size."""
    return Key(_layer_key("curves", layer))


def statistics_key(layer: int) -> Key[entries.StatisticsEntry]:
    """The moments of a layer in the compressed model."""
    return Key(_layer_key("statistics", layer))


def activations_key(layer: int) -> Key[entries.ActivationsEntry]:
    """The inputs of a layer in the compressed model."""
    return Key(_layer_key("activations", layer))


def layer_key(layer: int) -> Key[entries.LayerEntry]:
    """A compressed layer."""
    return Key(_layer_key("layer", layer))


def try_key(size: int) -> Key[entries.TryEntry]:
    """The scores of a size in thousandths."""
    return Key(f"{TRIES}{size:04d}")


def scored_key(model: str, layer: int) -> Key[entries.ScoredEntry]:
    """The inputs of a layer of the model scored under this name."""
    assert SCORED_NAME.fullmatch(model)
    return Key(f"{SCORED}{model}/{layer:05d}")


def answers_key(name: str) -> Key[entries.AnswersEntry]:
    """The answers of the pass of this name."""
    assert SCORED_NAME.fullmatch(name)
    return Key(f"answers/{name}")


def point_part(digest: str) -> str:
    """The part of the ledger that holds a sweep point's own entries."""
    return f"point/{digest}"


def rest_key(shard: str) -> Key[ShardRecord]:
    """A file of OUTPUT without compressed layers. `shard`: its name without the suffix."""
    return Key(f"rest/{shard}")


def score_key(model: str, digest: str) -> Key[entries.ScoreEntry]:
    """A score of the `output` or the `dense` model. `digest`: the digest of model and text."""
    return Key(f"score/{model}/{digest}")


def task_score_key(model: str, digest: str) -> Key[entries.TaskScoreEntry]:
    """Score of the `output` or the `dense` model on tasks. `digest`: the digest of model and tasks."""
    return Key(f"task_score/{model}/{digest}")


def _layer_key(kind: str, layer: int) -> str:
    assert kind in LAYER_KINDS
    return f"{kind}/{layer:05d}"
