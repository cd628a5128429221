"""How far the compressed layers are from the dense model on windows of tokens, streamed layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from manifests.records import ArrayRecord, HeldOutScoreEntry, StagedLayer
from pipeline.ports import Observer, Pool
from pipeline.steps import do_units
from pipeline.units import Diverge, Divergence, Forward, Lineage, Unit


def dense_outputs(pool: Pool, num_layers: int, shards: int, observer: Observer) -> tuple[ArrayRecord, ...]:
    """The stored outputs of the dense model's last layer, by shard."""
    observer.phase("held-out text, dense", num_layers, shards)
    done = _through(pool, "held_out_dense", [None] * num_layers, shards, observer, store=True)
    return tuple(result.activation for result in done)


def compare(
    pool: Pool, staged: Sequence[StagedLayer | None], dense: Sequence[ArrayRecord], observer: Observer
) -> HeldOutScoreEntry:
    """Divergence and perplexities, per token, of the layers as staged (None: a dense one).

    Returns `divergence` (KL(dense‖compressed), nats per token), `dense_perplexity`, `perplexity` and `tokens`; sums
    are added in shard order.
    """
    observer.phase("held-out text", len(staged), len(dense))
    _through(pool, "held_out", staged, len(dense), observer, store=False)
    units = [Diverge(len(staged), shard, record, tuple(staged)) for shard, record in enumerate(dense)]
    return _per_token(do_units(pool, units, observer))


def _through(
    pool: Pool, lineage: Lineage, staged: Sequence[StagedLayer | None], shards: int, observer: Observer, *, store: bool
) -> list[Any]:
    """All shards through all layers; what came of the last."""
    done: list[Any] = []
    last = len(staged) - 1
    for layer, record in enumerate(staged):
        units: list[Unit] = [
            Forward(
                lineage,
                layer,
                shard,
                staged=record,
                store=store and layer == last,
                replay=tuple(staged[:layer]),
                ahead=layer + 1 if layer < last and staged[layer + 1] is None else None,
            )
            for shard in range(shards)
        ]
        done = do_units(pool, units, observer)
        observer.layer_done("held-out text", layer, {})
    return done


def _per_token(parts: Sequence[Divergence]) -> HeldOutScoreEntry:
    tokens = sum(part.tokens for part in parts)
    return HeldOutScoreEntry(
        divergence=sum(part.divergence for part in parts) / tokens,
        dense_perplexity=math.exp(sum(part.dense_loss for part in parts) / tokens),
        perplexity=math.exp(sum(part.compressed_loss for part in parts) / tokens),
        tokens=tokens,
    )
