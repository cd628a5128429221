"""How the samples are cut."""

from pipeline.samples import shard_range


def test_fixed_parts() -> None:
    assert [shard_range(shard, 3, 11) for shard in range(3)] == [(0, 3), (3, 7), (7, 11)]
