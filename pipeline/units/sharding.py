"""Cuts calibration samples into shards, and chooses samples for importance, grids, the backward pass and scoring."""

from __future__ import annotations

IMPORTANCE_TOKENS = 262_144  # 64 windows of 256 tokens give t_l to 1 % (docs/results.md#choices-that-were-measured)
LEAST_SHARDS = 16  # so that there is work for several workers
TOKENS_PER_HIDDEN = 16
GRID_TOKENS = 128  # tokens of a sample from which the grids of a layer's sums are chosen
HELD_OUT = 10  # samples per held-out window
HELD_OUT_TOKENS = 32_768  # at most, in all texts: a divergence to 3 % (docs/results.md#choices-that-were-measured)
TEXT_TOKENS = 8_192  # at most, of each text on which the dense model is scored before the job's passes


def shard_range(shard: int, shards: int, samples: int) -> tuple[int, int]:
    """Return the first sample of a shard, and one past its last. Sizes of shards differ by at most one."""
    return shard * samples // shards, (shard + 1) * samples // shards


def importance_shards(shards: int, samples: int, sequence_length: int) -> tuple[int, ...]:
    """Return the shards on which importance is measured: evenly spread, at least 16 with 262,144 tokens, or all.

    docs/methods.md#importance.
    """
    enough = -(-IMPORTANCE_TOKENS * shards // (samples * sequence_length))
    count = min(shards, max(enough, LEAST_SHARDS))
    return tuple(index * shards // count for index in range(count))


def expert_ranges(experts: int, size: int) -> tuple[range, ...]:
    """Cut the experts of a layer into slices of at most `size`."""
    return tuple(range(first, min(first + size, experts)) for first in range(0, experts, size))


def expert_parts(experts: int, size: int) -> tuple[int | None, ...]:
    """Return the numbers of the parts of a pass through a layer with these experts; (None,) for an undivided pass."""
    count = len(expert_ranges(experts, size))
    return tuple(range(count)) if count > 1 else (None,)


def gradient_count(shard: int, shards: int, samples: int, chosen: int) -> int:
    """Return how many of a shard's first samples are chosen, if `chosen` samples are spread evenly over all shards."""
    first, end = shard_range(shard, shards, samples)
    return end * chosen // samples - first * chosen // samples


def gradient_samples(samples: int, sequence_length: int, hidden: int, least_tokens: int) -> int:
    """Return the number of samples of the backward pass, if none is given. docs/methods.md#gradient-moments.

    It is enough for 16 tokens per hidden number and for `least_tokens`; at most all samples.
    """
    return min(samples, -(-max(TOKENS_PER_HIDDEN * hidden, least_tokens) // sequence_length))


def held_out_windows(count: int, samples: int, sequence_length: int) -> int:
    """Return the number of held-out windows of a text with `count` of the samples: a tenth of `count`, and at most the
    text's share of 32,768 tokens."""
    most = -(-HELD_OUT_TOKENS * count // (samples * sequence_length))
    return min(-(-count // HELD_OUT), most)


def text_windows(windows: int, length: int, most: int = TEXT_TOKENS) -> int:
    """Return how many of a text's windows hold `most` tokens; all of them if the text has fewer."""
    return min(windows, -(-most // length))
