"""How the samples are cut."""

import pytest

from pipeline.units.sharding import IMPORTANCE_TOKENS, LEAST_SHARDS, importance_shards, shard_range


def test_fixed_parts() -> None:
    assert [shard_range(shard, 3, 11) for shard in range(3)] == [(0, 3), (3, 7), (7, 11)]


@pytest.mark.parametrize("shards", [1, 2, 7, 16, 17, 64, 256])
@pytest.mark.parametrize("samples", [256, 1000])
@pytest.mark.parametrize("length", [128, 1024, 4096, 131_072])
def test_importance_is_measured_on_enough_of_the_text(shards: int, samples: int, length: int) -> None:
    chosen = importance_shards(shards, samples, length)
    assert list(chosen) == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] < shards
    held = sum(end - first for first, end in (shard_range(shard, shards, samples) for shard in chosen)) * length
    assert len(chosen) == shards or held >= IMPORTANCE_TOKENS - shards * length  # shards differ by a sample
    assert len(chosen) >= min(shards, LEAST_SHARDS)
    gaps = [after - before for before, after in zip(chosen, (*chosen[1:], shards), strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_small_jobs_measure_importance_on_all_of_it() -> None:
    assert importance_shards(32, 1024, 256) == tuple(range(32))
    assert importance_shards(256, 256, 4096) == tuple(range(0, 256, 4))
