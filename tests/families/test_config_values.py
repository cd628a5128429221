"""All wrong values of a config are reported at once."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.block_lamina import COUNTS, MAX_LAYERS
from manifests.errors import InputError
from pipeline.families.config_fields import check_config_fields

RIGHT: dict[str, Any] = {
    **dict.fromkeys(COUNTS, 4),
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_right_values_pass() -> None:
    check_config_fields(RIGHT)
    check_config_fields({**RIGHT, "num_hidden_layers": 2, "layer_sizes": [{}, {"num_attention_heads": 8}]})


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("hidden_size", 0, "hidden_size: 0 is not a positive integer"),
        ("hidden_size", True, "hidden_size: True is not a positive integer"),
        ("num_hidden_layers", MAX_LAYERS + 1, "num_hidden_layers"),
        ("num_attention_heads", 6, "num_attention_heads: 6 is not a multiple of num_key_value_heads: 4"),
        ("norm_eps", float("inf"), "norm epsilon: inf"),
        ("norm_eps", True, "norm epsilon: True"),
        ("sliding_window", 2.5, "sliding_window: 2.5 is not a positive integer"),
        ("hidden_act", "unheard_of", "activation: 'unheard_of'"),
        ("tie_word_embeddings", None, "tie_word_embeddings: None"),
        ("layer_sizes", [{}], "layer_sizes: 1 entries for 4 layers"),
        ("layer_sizes", [{}, {}, {}, {"head_dim": -1}], "layer 3: head_dim: -1"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config_fields({**RIGHT, field: value})
    assert fault in str(caught.value)


def test_all_faults_are_in_one_message() -> None:
    with pytest.raises(InputError) as caught:
        check_config_fields({**RIGHT, "head_dim": "8", "norm_eps": -1.0, "hidden_act": None})
    assert str(caught.value).count("\n") == 3
