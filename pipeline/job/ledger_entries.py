"""Checks ledger entries against the job and each other, before anything builds on them.

A digest and a class show that an entry is whole, not that it fits the job. An entry that does not fit is invalidated:
its work is done again, as if it had never been committed. The data that entries name is checked where it is read.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from lamina import LayersConfig
from lamina.decoder_layer_lamina import DecoderLayer
from lamina.factored_lamina import stored_state
from manifests.entries import DenseEntry, LayerEntry
from manifests.records import ArrayRecord, LedgerKey
from pipeline.driver.job_spec import Job, scores_from_ledger
from pipeline.driver.ledger_dependencies import kind_of
from pipeline.driver.ledger_keys import LOSS_RATIOS, RANKS, curves_key, measured_key
from pipeline.families.latent_config import described_config
from pipeline.methods.registry import layers_of
from pipeline.reporting.summary import print_summary
from pipeline.rounding.schemes import packed_shapes
from stores.formats import keeps
from stores.headers import TensorRecord
from stores.ledger import Ledger

logger = logging.getLogger("lamina")


def check_entries(ledger: Ledger, job: Job, config: Mapping[str, Any], source: Mapping[str, TensorRecord]) -> None:
    """Invalidate every entry that does not fit the job, with a warning.

    `config`: the source's, under standard names. `source`: its tensors.
    """
    for key in ledger.keys():  # noqa: SIM118 - no mapping
        if fault := _fault(key, ledger.get(key), job, config, source):
            _invalidate(ledger, key, fault)
    _check_ranks(ledger, job)


def _fault(key: str, entry: Any, job: Job, config: Mapping[str, Any], source: Mapping[str, TensorRecord]) -> str | None:
    kind = kind_of(key)
    if kind == "complete":
        return _summary_fault(entry.summary)
    if kind == "layer":
        return _layer_fault(int(key.rpartition("/")[2]), entry, config, source)
    if kind == "dense":
        shards = job.committed_shards("dense", len(entry.activations or ()))
        return _dense_fault(entry, job) or _activations_fault(entry.activations, len(shards))
    if kind == "gradient":
        return _activations_fault(entry.activations, len(job.gradient_shards))
    return _activations_fault(entry.activations, job.shards) if kind == "activations" else None


def _activations_fault(stored: Sequence[ArrayRecord] | None, shards: int) -> str | None:
    """Return a fault unless there is a record of each shard, or none at all."""
    whole = stored is None or len(stored) == shards
    return None if whole else f"activations: {len(stored or ())} of {shards} shards"


def _dense_fault(entry: DenseEntry, job: Job) -> str | None:
    if len(entry.cosine) != len(job.importance_shards) or not all(count > 0 for _, count in entry.cosine):
        return "cosine: not one sum and count for each shard that importance is measured on"
    if entry.inputs is not None:
        stored = tuple(shard for shard, record in enumerate(entry.inputs) if record is not None)
        if len(entry.inputs) != job.shards or stored != job.gradient_shards:
            return f"inputs: of shards {stored}, not {job.gradient_shards}"
    return None


def _summary_fault(summary: Mapping[str, Any]) -> str | None:
    try:
        print_summary(summary, Console(file=io.StringIO()))
    except Exception as error:  # formatting fails in as many ways as there are types
        return f"summary: {error!r}"
    return None


def _layer_fault(
    layer: int, entry: LayerEntry, config: Mapping[str, Any], source: Mapping[str, TensorRecord]
) -> str | None:
    """Return a fault unless the staged tensors are those of the layer that the forms describe.

    A rounded weight is staged as its packed tensors, and an unchanged one may keep the source's storage format.
    """
    prefix = f"{config['block']['layers']}.{layer}."
    try:
        entered = entry.as_json()["forms"]
        forms = [entered if index == layer else {} for index in range(config["num_hidden_layers"])]
        described = LayersConfig(**described_config(config, forms))
        with torch.device("meta"):
            state = stored_state(DecoderLayer(described, layer))
        shapes = packed_shapes({prefix + name: tuple(tensor.shape) for name, tensor in state.items()}, entry.rounded)
    except Exception as error:  # any error of the serving code, for forms that Lamina did not write
        return f"forms: {error}"
    staged = {name: tensor.shape for name, tensor in entry.staged.tensors.items()}
    for name in sorted((shapes.keys() & source.keys()) - staged.keys()):
        if keeps(source[name]):
            del shapes[name]
            shapes |= {part.name: part.shape for part in source[name].stored}
    wrong = [name.removeprefix(prefix) for name, shape in shapes.items() if staged.get(name) != shape]
    return f"forms: staged tensors of other shapes: {', '.join(wrong)}" if wrong else None


def _check_ranks(ledger: Ledger, job: Job) -> None:
    """Invalidate ranks that do not follow from this manifest and the scores in the ledger."""
    entry = ledger.get(RANKS)
    if entry is None:
        return
    keys: list[LedgerKey[Any]] = [measured_key(layer) for layer in layers_of(job.measures)]
    keys += [curves_key(layer) for layer in layers_of(job.predicts)]
    try:
        importance = {int(layer): value for layer, value in entry.importance.items()}
        ranks = job.allocate(scores_from_ledger(job, ledger.get, importance, ledger.get(LOSS_RATIOS)))
    except Exception as error:  # scores of the wrong kind fail wherever a method first computes with them
        for key in keys:
            _invalidate(ledger, key, f"no ranks follow from it: {error}")
        ranks = {}
    if ranks != entry.ranks:
        _invalidate(ledger, RANKS, "these ranks do not follow from its scores")


def _invalidate(ledger: Ledger, key: str, fault: str) -> None:
    logger.warning("ledger entry %s does not fit the job (%s): retracted, its work is done again", key, fault)
    ledger.retract(key)
