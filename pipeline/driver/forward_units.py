"""Builds the units that run calibration shards through a layer, starting from committed hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from manifests.entries import DenseEntry
from manifests.records import ArrayRecord, StagedLayer
from pipeline.driver.interfaces import Journal
from pipeline.driver.job_spec import Job, staged_layer
from pipeline.driver.ledger_keys import activations_key, dense_key
from pipeline.methods.method import Moment
from pipeline.units.units import Forward, Lineage, ShardDone, Unwritten


class ForwardUnits:
    """Builds the forward units of one job from the records in its journal."""

    def __init__(self, job: Job, journal: Journal) -> None:
        self.job = job
        self.journal = journal

    def units(
        self,
        lineage: Lineage,
        layer: int,
        staged: StagedLayer | Unwritten | None,
        moments: tuple[Moment, ...],
        base: int,
        *,
        part: int | None = None,
        emit: bool = True,
        store: bool = False,
        keep: bool = False,
        weights: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ()),
    ) -> list[Forward]:
        """Return the units that run the shards of a pass through a layer, in shard order.

        Only a pass that emits the next layer's inputs reads that layer ahead; during a solve it would only take memory.

        Args:
            base: the last layer whose inputs are committed.
            part: the part of the layer, as in `Forward`.
            keep: store the inputs of gradient samples.
            weights: as returned by `LayerReading.weights`.
        """
        activations = self.activations(lineage, base)
        dense = lineage == "dense"
        committed = () if activations is None else self.job.committed_shards(lineage, len(activations))
        records = dict(zip(committed, activations or (), strict=True))
        replay = tuple(None if dense else staged_layer(self.journal, before) for before in range(base, layer))
        return [
            Forward(
                lineage=lineage,
                layer=layer,
                shard=shard,
                staged=staged,
                moments=moments,
                cosine=dense and shard in self.job.importance_shards,
                emit=emit,
                store=store,
                keep_inputs=keep and shard in self.job.gradient_shards,
                part=part,
                base=base,
                base_record=records.get(shard),
                replay=replay,
                ahead=layer + 1 if emit and layer + 1 < self.job.num_layers else None,
                weights=weights[0],
                ahead_weights=weights[1],
            )
            for shard in (self.job.dense_shards() if dense else range(self.job.shards))
        ]

    def activations(self, lineage: Lineage, layer: int) -> Sequence[ArrayRecord] | None:
        """Return the records of the committed inputs of a layer, in shard order."""
        if layer == 0:
            return None
        if lineage == "dense":
            dense = self.journal.get(dense_key(layer - 1))
            return dense.activations if dense else None
        walked = self.journal.get(activations_key(layer))
        return walked.activations if walked else None

    def last_committed(self, lineage: Lineage, layer: int) -> int:
        """Return the last layer up to this one whose inputs are committed; 0: the embeddings."""
        return next((at for at in range(layer, 0, -1) if self.activations(lineage, at)), 0)


def joined(parts: Sequence[Sequence[ShardDone]]) -> list[ShardDone]:
    """Join the results of the parts of a layer, shard by shard: inputs from the first part, outputs from the last."""
    return [replace(last, inputs=first.inputs) for first, last in zip(parts[0], parts[-1], strict=True)]


def stored_outputs(results: Sequence[ShardDone]) -> tuple[ArrayRecord, ...]:
    """Return the records of the outputs that the units of all shards stored."""
    records = tuple(result.activation for result in results if result.activation is not None)
    assert len(records) == len(results), "every unit stores its outputs"
    return records


def dense_entry(results: Sequence[ShardDone], statistics: Mapping[str, ArrayRecord], *, inputs: bool) -> DenseEntry:
    """Return the ledger entry of a dense pass through a layer. `inputs`: include the kept inputs of each shard."""
    activations = tuple(result.activation for result in results if result.activation)
    return DenseEntry(
        cosine=tuple(result.cosine for result in results if result.cosine),
        statistics=statistics,
        activations=activations or None,
        inputs=tuple(result.inputs for result in results) if inputs else None,
    )
