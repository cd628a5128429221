"""The norms of a layer, by role."""

from __future__ import annotations

from pipeline.families.layer_geometry import Norm
from pipeline.families.norms import has_norm_bias, norms_of

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODULES = {"input_norm": "a", "q_norm": "b", "k_norm": "c", "q": "d", "mlp_norm": "e"}


def test_a_norm_of_heads_is_as_wide_as_a_head_and_has_no_bias() -> None:
    assert norms_of({"norm": "layer"}, MODULES, 32, SIZES) == (
        Norm("input_norm", 32, bias=True),
        Norm("q_norm", 8, bias=False),
        Norm("k_norm", 8, bias=False),
        Norm("mlp_norm", 32, bias=True),
    )


def test_a_norm_of_all_heads_together_is_as_wide_as_these() -> None:
    norms = norms_of({"norm": "rms", "head_norms": "all"}, MODULES, 32, SIZES)
    assert [norm.size for norm in norms] == [32, 32, 16, 32]


def test_only_a_layer_norm_that_says_nothing_else_has_a_bias() -> None:
    assert has_norm_bias({"norm": "layer"})
    assert not has_norm_bias({"norm": "layer", "norm_bias": False})
    assert not has_norm_bias({"norm": "rms", "norm_bias": True})
