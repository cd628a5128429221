"""The rotation that a config describes is taken over, or refused where transformers would do something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import InputError
from pipeline.families.registry import FAMILIES
from pipeline.families.rotation import rope_parameters

LLAMA = FAMILIES["llama"]


def rope(family: str = "llama", layer_types: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any] | None:
    source: Any = SimpleNamespace(rope_parameters=parameters, layer_types=layer_types)
    return rope_parameters(FAMILIES[family], source, 16)


def test_a_plain_rotation() -> None:
    assert rope(rope_type="default", rope_theta=10000.0) == {"rope_type": "default", "rope_theta": 10000.0}


def test_layer_types_have_rotations_of_their_own() -> None:
    own = {
        name: {"rope_type": "default", "rope_theta": theta}
        for name, theta in (("sliding_attention", 1e4), ("full_attention", 1e6))
    }
    assert rope("gemma3_text", ("full_attention",), **own) == own


def test_a_model_without_rotation() -> None:
    assert rope("opt") is None


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"rope_type": "unheard_of", "rope_theta": 1e4}, "rope_type: 'unheard_of'"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta: -1.0 is not a positive number"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "not supported for llama"),
    ],
)
def test_values_that_cannot_be(parameters: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError) as caught:
        rope(**parameters)
    assert fault in str(caught.value)


@pytest.mark.parametrize("share", [0.1, 1.5, "half"])
def test_a_part_of_the_head_has_an_even_width(share: object) -> None:
    with pytest.raises(InputError, match="partial_rotary_factor"):
        rope("glm", rope_type="default", rope_theta=1e4, partial_rotary_factor=share)


def test_dimensions_by_number() -> None:
    source: Any = SimpleNamespace(rotary_dim=8)
    assert rope_parameters(FAMILIES["gptj"], source, 16) == {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5
    }  # fmt: skip
    for wrong in (7, 0, 18):
        with pytest.raises(InputError, match=f"rotary_dim: {wrong}"):
            rope_parameters(FAMILIES["gptj"], SimpleNamespace(rotary_dim=wrong), 16)  # type: ignore[arg-type]
