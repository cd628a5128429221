"""Groups of samples by which the amount of text is chosen."""

from __future__ import annotations

import pytest

from pipeline.units.text_amount import HELD_OUT_EVERY, groups_of


@pytest.mark.parametrize("samples", [0, 1, 2, 7, 8, 9, 31, 32, 256, 257])
def test_each_sample_is_in_one_group(samples: int) -> None:
    groups = groups_of(samples)
    assert sorted(sample for group in groups for sample in group) == [*range(samples)]
    assert groups[0] == tuple(range(0, samples, HELD_OUT_EVERY))


@pytest.mark.parametrize("samples", [64, 256, 1000])
def test_a_quarter_and_a_half_of_the_samples_that_are_fitted(samples: int) -> None:
    held_out, quarter, to_half, _ = groups_of(samples)
    fitted = samples - len(held_out)
    assert len(quarter) / fitted == pytest.approx(2 / 7, abs=0.01)  # of eight, one is held out, and two are in each
    assert len(to_half) == len(quarter)
