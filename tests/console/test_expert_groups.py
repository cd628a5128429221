"""The experts of a layer are shown as one group."""

from __future__ import annotations

import pytest

from pipeline.console.expert_groups import expert_number, extent, named, split_experts


@pytest.mark.parametrize(
    ("group", "number"),
    [("experts.3", 3), ("experts.12.gate_up", 12), ("shared", None), ("mlp", None), ("experts", None)],
)
def test_the_number_of_an_expert(group: str, number: int | None) -> None:
    assert expert_number(group) == number


def test_experts_are_split_from_other_groups_and_come_in_order() -> None:
    others, experts = split_experts(
        {"attention": 1, "experts.10.down": 2, "experts.2.down": 3, "experts.10.gate_up": 4}
    )
    assert others == {"attention": 1}
    assert list(experts.items()) == [(2, [3]), (10, [2, 4])]


def test_values_are_told_by_the_least_and_the_largest() -> None:
    assert extent([48, 1600, 16]) == "16–1,600"
    assert extent([16, 16]) == "16"
    assert extent([0.25, 0.5], ".2e") == "2.50e-01–5.00e-01"


def test_the_first_experts_are_named() -> None:
    assert named([3, 5]) == "3, 5"
    assert named([*range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 others"
