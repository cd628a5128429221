"""The time and the bytes of commits of hidden states, and how many layers lie between two of them. docs/plan.md."""

from __future__ import annotations

import math

from pipeline.cost_model.phases import Pass, add_seconds, collect_seconds, phase_seconds, store_seconds
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import LayerWork

COMMIT_SHARE = 0.05  # the largest share of a pass's time for commits of hidden states
REPEATED_SECONDS = 600.0  # the most work that a kill may cost


def committing_seconds(work: LayerWork, rates: Rates, walk: Pass) -> float:
    """Return the time that one commit of all hidden states costs the workers: its bytes and its files.

    In a dense pass, the layer's sums are committed with it and must be stored before.
    """
    waiting = 0.0
    if not walk.compressed:
        waiting = collect_seconds(work, rates) + add_seconds(work, rates, walk) + store_seconds(work, rates, walk)
    return work.hidden_bytes / walk.nodes(rates) / rates.disk + walk.rounds * walk.shards * rates.commit_s + waiting


def layers_per_commit(work: LayerWork, rates: Rates, walk: Pass) -> int:
    """Return the number of layers between two commits of hidden states, for `resume.every: auto`.

    It is the smallest number for which commits take at most `COMMIT_SHARE` of every pass. It is lower, but at least
    one, if a kill would otherwise cost more than `REPEATED_SECONDS` of work.
    """
    phases = phase_seconds(work, rates, walk)
    seconds = sum(phases.get(name, 0.0) for name in ("statistics", "reduce", "propagate"))
    seconds += phases["solve"] if walk.from_memory else 0.0  # otherwise layers are solved after the pass
    # The pass for importance commits only the hidden states of its shards, so its time is scaled to all shards.
    importance = phases.get("importance", 0.0) * walk.shards / max(1, walk.importance)
    passes = [each / walk.layers for each in (importance, seconds) if each]
    if not passes:
        return 1
    rare = math.ceil(committing_seconds(work, rates, walk) / (COMMIT_SHARE * min(passes)))
    return max(1, min(rare, walk.layers, int(REPEATED_SECONDS / max(passes))))


def committed_bytes(work: LayerWork, walk: Pass, every: int) -> int:
    """Return the bytes of all commits of hidden states: one for every `every` layers, except the last."""
    commits = (walk.layers - 1) // every
    return commits * work.hidden_bytes + commits * work.hidden_bytes * walk.importance // walk.shards
