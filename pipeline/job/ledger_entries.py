"""Checks the ledger's entries against what they must look like, before anything builds on them.

A digest says that an entry is as it was written, not that it makes sense. One that does not is invalidated: its work is
recomputed, as if it had never been committed. What the entries name is checked where it is read.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from lamina import LaminaConfig
from lamina.factored_lamina import stored_state
from lamina.layers_lamina import LaminaDecoderLayer
from manifests import records
from manifests.records import Key, LayerEntry
from pipeline.computation import Job, entered_scores
from pipeline.console.summary import print_summary
from pipeline.keys import DRAFT, RANKS, curves_key, measured_key
from pipeline.methods.registry import layers_of
from stores.ledger import Ledger

logger = logging.getLogger("lamina")


BACKWARD = ("gradient", "regradient", "inputs")  # of the shards that hold samples of the backward pass
KINDS: dict[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(entry)
    for kind, entry in {
        "layer": records.LayerEntry,
        "dense": records.DenseEntry,
        "statistics": records.StatisticsEntry,
        "activations": records.ActivationsEntry,
        "ranks": records.RanksEntry,
        "measured": records.MeasuredEntry,
        "gradient": records.GradientEntry,
        "regradient": records.GradientEntry,
        "inputs": records.ActivationsEntry,
        "curves": records.CurvesEntry,
        "tokens": records.TokensEntry,
        "target": records.TargetEntry,
        "tries": records.TryEntry,
        "held_out": records.HeldOutEntry,
        "held_out_score": records.HeldOutScoreEntry,
        "scored": records.ScoredEntry,
        "rest": records.ShardRecord,
        "assembling": records.AssemblingEntry,
        "complete": records.CompleteEntry,
        "reused": records.ReusedEntry,
        "score": records.ScoreEntry,
        "task_score": records.TaskScoreEntry,
        "compared": records.ComparedEntry,
        "evaluation": records.TokensEntry,
        "points": records.PointsEntry,
        "result": records.PointEntry,
    }.items()
}


def check_entries(ledger: Ledger, job: Job, config: Mapping[str, Any]) -> None:
    """Invalidates every entry that makes no sense, with a warning. `config`: the source's, under standard names."""
    for key in ledger.keys():  # noqa: SIM118 - no mapping
        kind = key.removeprefix(DRAFT).partition("/")[0]
        fault = _fault(kind, key, ledger.get(key), job, config) if kind in KINDS else None
        if fault:
            _invalidate(ledger, key, fault)
    _check_ranks(ledger, job)


def _fault(kind: str, key: str, entry: Any, job: Job, config: Mapping[str, Any]) -> str | None:
    try:
        found = KINDS[kind].validate_python(entry)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if kind == "complete":
        return _summary_fault(found["summary"])
    if kind == "layer":
        return _layer_fault(int(key.rpartition("/")[2]), found, config)
    return _shards_fault(kind, found, job) if kind in ("dense", "activations", *BACKWARD) else None


def _shards_fault(kind: str, found: Mapping[str, Any], job: Job) -> str | None:
    """Whether there is something of each shard."""
    cosine = found["cosine"] if kind == "dense" else [(0.0, 1)] * job.shards
    if len(cosine) != job.shards or not all(count > 0 for _, count in cosine):
        return "cosine: not one sum and count for each shard"
    expected = len(job.gradient_shards) if kind in BACKWARD else job.shards
    stored = found.get("activations", [])
    if "activations" in found and len(stored) != expected:
        return f"activations: {len(stored)} of {expected} shards"
    if "inputs" in found:
        kept = tuple(shard for shard, record in enumerate(found["inputs"]) if record is not None)
        if len(found["inputs"]) != job.shards or kept != job.gradient_shards:
            return f"inputs: of shards {kept}, not {job.gradient_shards}"
    return None


def _summary_fault(summary: Mapping[str, Any]) -> str | None:
    try:
        print_summary(summary, Console(file=io.StringIO()))
    except Exception as error:  # formatting fails in as many ways as there are types
        return f"summary: {error!r}"
    return None


def _layer_fault(layer: int, found: LayerEntry, config: Mapping[str, Any]) -> str | None:
    """Whether the layer that the forms describe has the tensors that were staged."""
    try:
        forms = [found["forms"] if index == layer else {} for index in range(config["num_hidden_layers"])]
        described = LaminaConfig(**{**config, "forms": forms})
        with torch.device("meta"):
            expected = stored_state(LaminaDecoderLayer(described, layer))
    except Exception as error:  # whatever the serving code makes of forms that nobody wrote
        return f"forms: {error}"
    prefix = f"{config['block']['layers']}.{layer}."
    staged = {name.removeprefix(prefix): tensor["shape"] for name, tensor in found["staged"]["tensors"].items()}
    wrong = [name for name, tensor in expected.items() if staged.get(name) != list(tensor.shape)]
    return f"forms: staged is another {', '.join(wrong)}" if wrong else None


def _check_ranks(ledger: Ledger, job: Job) -> None:
    """Ranks follow from the scores beside them: they are what this manifest gives for these scores."""
    entry = ledger.get(RANKS)
    if entry is None:
        return
    keys: list[Key[Any]] = [measured_key(layer) for layer in layers_of(job.measures)]
    keys += [curves_key(layer) for layer in layers_of(job.predicts)]
    nothing: dict[str, Any] = {"measured": {}, "curves": {}}
    try:
        importance = {int(layer): value for layer, value in entry["importance"].items()}
        ranks = job.allocate(entered_scores(job, lambda key: ledger.get(key) or nothing, importance))
    except Exception as error:  # scores of the wrong kind fail wherever a method first computes with them
        for key in keys:
            _invalidate(ledger, key, f"no ranks follow from it: {error}")
        ranks = {}
    if ranks != entry["ranks"]:
        _invalidate(ledger, RANKS, "these ranks do not follow from its scores")


def _invalidate(ledger: Ledger, key: str, fault: str) -> None:
    logger.warning("ledger entry %s makes no sense (%s): taken back, its work is done again", key, fault)
    ledger.retract(key)
