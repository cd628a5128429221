"""The time and the bytes of commits of hidden states, and how many layers lie between two of them. docs/plan.md."""

from __future__ import annotations

import math

from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.prices import Prices

COMMIT_SHARE = 0.05  # the largest share of a pass's time for commits of hidden states
REPEATED_SECONDS = 600.0  # the most work that a kill may cost


def committing_seconds(prices: Prices) -> float:
    """Return the time that one commit of all hidden states costs the workers: its bytes and its files.

    In a dense pass, the layer's sums are committed with it and must be stored before.
    """
    rates, passes, reducing = prices.rates, prices.passes, sum(prices.sum_seconds(prices.work.moment_bytes))
    writing = prices.work.hidden_bytes / prices.nodes / rates.disk
    return writing + passes.rounds * passes.shards * rates.commit_s + (0.0 if passes.compressed else reducing)


def layers_per_commit(prices: Prices) -> int:
    """Return the number of layers between two commits of hidden states, for `resume.every: auto`.

    It is the smallest number for which commits take at most `COMMIT_SHARE` of every pass. It is lower, but at least
    one, if a kill would otherwise cost more than `REPEATED_SECONDS` of work.
    """
    phases, passes = phase_seconds(prices), prices.passes
    seconds = sum(phases.get(name, 0.0) for name in ("statistics", "reduce", "propagate"))
    seconds += phases["solve"] if passes.from_memory else 0.0  # otherwise layers are solved after the pass
    seconds = seconds or phases.get("correct", 0.0)  # a walk that needs no statistics
    # The pass for importance commits only the hidden states of its shards, so its time is scaled to all shards.
    importance = phases.get("importance", 0.0) * passes.shards / max(1, passes.importance)
    of_layer = [each / passes.layers for each in (importance, seconds) if each]
    if not of_layer:
        return 1
    rare = math.ceil(committing_seconds(prices) / (COMMIT_SHARE * min(of_layer)))
    return max(1, min(rare, passes.layers, int(REPEATED_SECONDS / max(of_layer))))


def committed_bytes(prices: Prices, every: int) -> int:
    """Return the bytes of all commits of hidden states: one for every `every` layers, except the last."""
    passes, commits = prices.passes, (prices.passes.layers - 1) // every
    size = commits * prices.work.hidden_bytes
    return size + size * passes.importance // passes.shards
