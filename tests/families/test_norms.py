"""The norms of a layer, by role."""

from __future__ import annotations

import pytest

from lamina.block_lamina import BLOCK_DEFAULTS, LayerShape, has_norm_bias
from lamina.norms_lamina import NORMS
from pipeline.families.layer_geometry import Norm, norms_of

MODULES = {"input_norm": "a", "q_norm": "b", "k_norm": "c", "q": "d", "mlp_norm": "e"}
SHAPE = LayerShape(32, 80, 4, 2, 8, MODULES, frozenset())


def test_a_norm_of_heads_is_as_wide_as_a_head_and_has_no_bias() -> None:
    assert norms_of({"norm": "layer"}, SHAPE) == (
        Norm("input_norm", 32, bias=True),
        Norm("q_norm", 8, bias=False),
        Norm("k_norm", 8, bias=False),
        Norm("mlp_norm", 32, bias=True),
    )


def test_a_norm_of_all_heads_together_is_as_wide_as_these() -> None:
    norms = norms_of({"norm": "rms", "head_norms": "all"}, SHAPE)
    assert [norm.size for norm in norms] == [32, 32, 16, 32]


def test_only_a_layer_norm_that_says_nothing_else_has_a_bias() -> None:
    assert has_norm_bias({"norm": "layer"})
    assert not has_norm_bias({"norm": "layer", "norm_bias": False})
    assert not has_norm_bias({"norm": "rms", "norm_bias": True})


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_s_module_has_the_tensors_that_the_geometry_names(kind: str) -> None:
    module = NORMS[kind](32, 1e-6, BLOCK_DEFAULTS)
    named = {"weight": (32,)} | ({"bias": (32,)} if has_norm_bias({"norm": kind}) else {})
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == named
