"""Eq. 12 and 13: sums of logs, the mean share, the order of the layers."""

import math
import random

import pytest

from pipeline.ranks.progressive import cumulative_log_conditions, progressive_shares


def test_cumulative_logs_sum_from_the_top() -> None:
    assert cumulative_log_conditions([(1.0, 2.0), (3.0, 0.5), (0.25, 0.0)]) == pytest.approx([6.75, 3.75, 0.25])
    # The product of 160 condition numbers of 1e6 has no float.
    assert cumulative_log_conditions([(math.log(1e6),) * 2] * 80)[0] == pytest.approx(160 * math.log(1e6))
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="log condition numbers of layer 1"):
            cumulative_log_conditions([(1.0, 2.0), (1.0, bad)])


def test_shares_worked_by_hand() -> None:
    # Depths 0, 1/2, 1; the mean 1 − (1 − ρ) / 2 = 0.8 gives ρ = 0.6.
    found = progressive_shares([30.0, 20.0, 10.0], 0.8)
    assert found.shares == pytest.approx((1.0, 0.8, 0.6))
    assert (found.least, found.most, found.skipped) == (pytest.approx(0.6), 1.0, ())


def test_random_conditions() -> None:
    dice = random.Random(0)
    for _ in range(300):
        logs = [(dice.uniform(0, 9), dice.uniform(0, 9)) for _ in range(dice.randint(1, 80))]
        cumulative = cumulative_log_conditions(logs)
        keep = dice.uniform(0.05, 1.0)
        found = progressive_shares(cumulative, keep)
        assert math.fsum(found.shares) / len(logs) == pytest.approx(keep, rel=1e-9)
        assert all(0.0 < share <= 1.0 + 1e-12 for share in found.shares)
        assert list(found.shares) == sorted(found.shares, reverse=True)
        assert max(found.shares) == pytest.approx(found.most)
        if len(set(cumulative)) > 1 and keep < 1.0:
            # Eq. 13 as printed.
            high, low = max(cumulative), min(cumulative)
            for value, share in zip(cumulative, found.shares, strict=True):
                factor = 1 - (high - value) / (high - low) * (1 - found.least / found.most)
                assert share == pytest.approx(found.most * factor, rel=1e-9)
            assert found.least >= 0.05 * found.most * (1 - 1e-9)
            assert found.most == 1.0 or found.least == pytest.approx(0.05 * found.most)


def test_low_means_lower_the_largest_rank() -> None:
    found = progressive_shares([30.0, 20.0, 10.0], 0.2, floor=0.5)
    assert found.shares == pytest.approx((0.8 / 3, 0.2, 0.4 / 3))


def test_skipped_layers_stay_dense_and_count() -> None:
    decades = math.log(10.0)
    found = progressive_shares([40 * decades, 20 * decades, 10 * decades], 0.7, skip_above=30.0)
    assert found.skipped == (0,)
    assert found.shares[0] == 1.0
    assert math.fsum(found.shares) == pytest.approx(2.1)
    with pytest.raises(ValueError, match="2 layers above skip_above 15"):
        progressive_shares([40 * decades, 20 * decades, 10 * decades], 0.6, skip_above=15.0)


def test_equal_conditions_and_everything_kept() -> None:
    assert progressive_shares([5.0], 0.4).shares == pytest.approx((0.4,))
    assert progressive_shares([0.0, 0.0], 0.4).shares == pytest.approx((0.4, 0.4))
    assert progressive_shares([30.0, 20.0, 10.0], 1.0).shares == (1.0, 1.0, 1.0)
    assert progressive_shares([30.0, 20.0], 1.0, skip_above=0.0).shares == (1.0, 1.0)


def test_refusals() -> None:
    for keep in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="cache_keep must be"):
            progressive_shares([1.0], keep)
    for floor in (0.0, 1.1):
        with pytest.raises(ValueError, match="floor must be"):
            progressive_shares([1.0], 0.5, floor=floor)
    for bad in ([], [math.inf, 1.0]):
        with pytest.raises(ValueError, match="finite cumulative"):
            progressive_shares(bad, 0.5)


def test_the_limits_of_skipping_and_of_the_floor() -> None:
    decades = math.log(10.0)
    assert progressive_shares([10.3 * 1.01 * decades, decades], 0.8, skip_above=10.3).skipped == (0,)
    assert progressive_shares([8.0 * decades, decades], 0.8, skip_above=8.0).skipped == ()  # only what exceeds it
    with pytest.raises(ValueError, match=r"already keep a share of 0\.500"):
        progressive_shares([20 * decades, decades], 0.5, skip_above=10.0)
    with pytest.raises(ValueError, match=r"already keep a share of 0\.667"):
        progressive_shares([20 * decades, 20 * decades, decades], 0.5, skip_above=10.0)
    assert progressive_shares([3.0, 2.0, 1.0], 0.4, floor=1.0).shares == pytest.approx((0.4, 0.4, 0.4))


def test_equal_layers_have_one_share_for_the_least_and_the_most() -> None:
    found = progressive_shares([4.0, 4.0, 4.0], 0.3)
    assert (found.least, found.most) == (pytest.approx(0.3), pytest.approx(0.3))
