"""Windows to score: the first ones of each shard."""

from __future__ import annotations

import pytest

from pipeline.units.scores import Windows


@pytest.mark.parametrize(
    ("windows", "shards", "first", "expected"),
    [
        (9, 4, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (9, 4, 2, [(0, 1), (2, 3)]),
        (9, 4, 5, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (9, 4, 9, [(0, 2), (2, 4), (4, 6), (6, 9)]),
        (9, 4, 100, [(0, 2), (2, 4), (4, 6), (6, 9)]),
        (1, 16, 4, [(0, 1)]),
    ],
)
def test_the_first_windows_of_shards(windows: int, shards: int, first: int, expected: list[tuple[int, int]]) -> None:
    whole = Windows.even(windows, shards, "float32", 1)
    few = whole.first(first)
    assert [*few.ranges] == expected
    assert all(begin == start for (begin, _), (start, _) in zip(few.ranges, whole.ranges, strict=False))
