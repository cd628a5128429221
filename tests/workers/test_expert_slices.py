"""Slices of experts by the names of their tensors."""

from __future__ import annotations

import pytest

from workers.expert_slices import ExpertSlices

SLICES = ExpertSlices("model.layers.3.mlp.experts.", (range(4), range(4, 6)))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.3.mlp.experts.0.up_proj.weight", 0),
        ("model.layers.3.mlp.experts.3.up_proj.weight", 0),
        ("model.layers.3.mlp.experts.4.down_proj.weight", 1),
        ("model.layers.3.mlp.gate.weight", None),
        ("model.layers.3.mlp.experts.bias", None),
        ("model.layers.33.mlp.experts.4.up_proj.weight", None),
    ],
)
def test_a_tensor_belongs_to_the_slice_of_its_expert(name: str, number: int | None) -> None:
    assert SLICES.number(name) == number
    assert [SLICES.is_read(name, each, outside=each == 0) for each in (0, 1)] == [number != 1, number == 1]


def test_an_expert_beyond_the_slices_is_no_silent_match() -> None:
    with pytest.raises(KeyError):
        SLICES.number("model.layers.3.mlp.experts.6.up_proj.weight")
