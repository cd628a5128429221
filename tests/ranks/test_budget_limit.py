"""What a budget leaves in whole numbers: the last bits of products of floats are forgiven, nothing more."""

from __future__ import annotations

import pytest

from manifests.errors import InputError
from pipeline.ranks.allocation import NumberBudget


@pytest.mark.parametrize(
    ("keep", "total", "taken", "limit"),
    [
        (0.29, 100, 0, 29),  # 28.999999999999996
        (0.57, 100, 0, 57),  # 56.99999999999999
        (0.7, 10, 0, 7),
        (0.289999, 100, 0, 28),
        (0.2999, 10, 0, 2),
        (0.29, 100, 3.5, 25),  # 25.5
        (0.29, 68_976_648_100, 0, 20_003_227_949),
        (0.57, 68_976_648_100, 0, 39_316_689_417),
        (0.5, 68_976_648_193, 0, 34_488_324_096),  # a half is no rounding error
        (1.0, 7, 0, 7),
    ],
)
def test_limit(keep: float, total: int, taken: float, limit: int) -> None:
    assert NumberBudget("budget.keep", keep, total, taken).limit == limit


def test_whole_shares_of_large_models_lose_nothing() -> None:
    for percent in range(1, 100):
        for total in (100, 6_738_415_600, 68_976_648_100, 405_853_388_800):
            assert NumberBudget("budget.keep", percent / 100, total, 0).limit == percent * total // 100


def test_parts_that_stay_dense_are_the_reason_for_a_least_size() -> None:
    budget = NumberBudget("budget.keep", 0.5, 100.0, 0.0)
    budget.require(50.0, [])
    with pytest.raises(
        InputError, match=r"at least 80 \(0 dense\) \(2 parts stay dense, such as experts that no token"
    ):
        budget.require(80.0, [], [(0, "0", "experts.2"), (0, "0", "experts.3")])
