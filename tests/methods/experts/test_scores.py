"""Which experts stay by their scores."""

from __future__ import annotations

import pytest
import torch

from pipeline.methods.experts.scores import few_tokens, kept_experts


@pytest.mark.parametrize(("count", "groups", "expected"), [(3, 1, [1, 2, 3]), (2, 2, [1, 3]), (4, 2, [1, 2, 3, 5])])
def test_the_best_stay_equally_many_of_each_group(count: int, groups: int, expected: list[int]) -> None:
    scores_E = torch.tensor([0.1, 0.5, 0.4, 0.6, 0.0, 0.2])
    assert kept_experts(scores_E, count, groups).tolist() == expected


def test_of_equal_scores_the_lower_index_stays() -> None:
    assert kept_experts(torch.zeros(6), 2).tolist() == [0, 1]


@pytest.mark.parametrize(("count", "groups"), [(0, 1), (7, 1), (3, 2), (4, 4)])
def test_impossible_counts_are_refused(count: int, groups: int) -> None:
    with pytest.raises(ValueError, match="cannot be kept"):
        kept_experts(torch.zeros(6), count, groups)


def test_nan_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        kept_experts(torch.tensor([0.0, float("nan")]), 1)


def test_few_tokens_are_below_the_least_for_each_channel() -> None:
    assert [few_tokens(tokens, 10) for tokens in (0, 1, 319, 320)] == [False, True, True, False]
