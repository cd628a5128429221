"""Fields of forms in config.json: the ranks that each form allows, and what else of a config follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.forms_lamina import FORMS
from lamina.layers_config_lamina import LayersConfig

SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GATE_UP = {"gate": {"group": "gate_up"}, "up": {"group": "gate_up"}}
QUERY_KEY = {"q": {"group": "query_key"}, "k": {"group": "query_key"}}
# form -> roles with their other fields, and the largest rank
LIMITS: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "head_pca": ({"v": {}, "o": {}}, 8),
    "pruned": ({"gate": {}, "up": {}, "down": {}}, 40),
    "head_low_rank": ({"q": {}}, 8),
    "low_rank": ({"down": {}}, 24),
    "joint_low_rank": (GATE_UP, 24),
    "joint_head_low_rank": (QUERY_KEY, 16),
    "pivoted": ({"down": {"group": "down"}}, 24),
    "latent": ({"k": {}}, 24),
}


def config_of(forms: Any, **sizes: Any) -> LayersConfig:
    return LayersConfig(**{**SIZES, **sizes, "forms": [{}, forms]})


def specs(form: str, rank: Any) -> dict[str, Any]:
    return {role: {"form": form, "rank": rank, **fields} for role, fields in LIMITS[form][0].items()}


@pytest.mark.parametrize("form", LIMITS)
def test_ranks_from_one_to_the_limit(form: str) -> None:
    largest = LIMITS[form][1]
    for rank in (1, largest):
        assert config_of(specs(form, rank)).forms[1] == specs(form, rank)
    for rank in (0, -1, largest + 1, True, 2.0, "2", None, [2], float("nan")):
        with pytest.raises(ValueError, match=rf"layer 1, \w+: {form} rank .*, allowed is 1 to .* {largest}$"):
            config_of(specs(form, rank))


@pytest.mark.parametrize("group", [None, 3, "", "down_up", [], {}, ["gate_up"]])
@pytest.mark.parametrize("form", ["joint_low_rank", "joint_head_low_rank", "pivoted"])
def test_a_group_that_the_form_does_not_have(form: str, group: Any) -> None:
    forms = specs(form, 2)
    forms[next(iter(forms))]["group"] = group
    with pytest.raises(ValueError, match=r"layer 1, \w+: \w+ group .*, allowed is \["):
        config_of(forms)


def test_a_joint_form_needs_its_partner() -> None:
    forms = specs("joint_low_rank", 3)
    for up in ({"form": "low_rank", "rank": 3}, {**forms["up"], "rank": 4}, None):
        with pytest.raises(ValueError, match="needs the same on up"):
            config_of({**forms, "up": up} if up else {"gate": forms["gate"]})
    with pytest.raises(ValueError, match="as many query as key heads, not 4 and 2"):
        config_of(specs("joint_head_low_rank", 3), num_key_value_heads=2)


def test_roles_that_share_values_or_channels_have_one_width() -> None:
    with pytest.raises(ValueError, match=r"different value heads of v 3 \(head_pca\), o 8 \(dense\)"):
        config_of({"v": {"form": "head_pca", "rank": 3}})
    with pytest.raises(ValueError, match=r"different channels: gate 40 \(dense\), up 40 \(dense\), down 7 \(pruned\)"):
        config_of({"down": {"form": "pruned", "rank": 7}})
    factored = {"form": "low_rank", "rank": 2, "width": 7}
    config = config_of({role: {"form": "pruned", "rank": 7} for role in ("gate", "up")} | {"down": factored})
    assert config.form_of(1, "down")[0].widths(config.layer_shape(1), "down", factored) == (7, 24)
    with pytest.raises(ValueError, match="rank 8, allowed is 1 to min"):
        config_of({role: {"form": "pruned", "rank": 7} for role in ("gate", "up")} | {"down": {**factored, "rank": 8}})


TUCKER = {"form": "tucker", "ranks": [5, 6, 3]}
MLP = ("gate", "up", "down")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"ranks": [24, 40, 3]}, None),
        ({"ranks": [25, 40, 3]}, r"ranks \[25, 40, 3\], allowed is 1 to \[24, 40, 3\]"),
        ({"ranks": [5, 6, 4]}, "allowed is 1 to"),
        ({"ranks": [5, 0, 3]}, "allowed is 1 to"),
        ({"ranks": [5, 6]}, "expected 3 numbers"),
        ({"ranks": 5}, "expected 3 numbers"),
        ({"sparse": 1}, "sparse 1, allowed are true and false"),
        ({"sparse": True}, "with sparse True needs nnz"),
        ({"nnz": 4}, "with sparse False needs no nnz"),
        ({"sparse": True, "nnz": 90}, None),
        ({"sparse": True, "nnz": 91}, r"nnz 91, allowed is 1 to 90 of \(5, 6, 3, 1\)"),
        ({"sparse": True, "nnz": 0}, "nnz 0, allowed"),
        ({"own_output": False}, "in attention only"),
    ],
)
def test_tucker_in_an_mlp(fields: dict[str, Any], fault: str | None) -> None:
    forms = {role: {**TUCKER, **fields} for role in MLP}
    if fault is None:
        config_of(forms)
        return
    with pytest.raises(ValueError, match=fault):
        config_of(forms)


def test_cached_numbers_and_widths_of_values() -> None:
    assert FORMS["dense"].limit(config_of({}).layer_shape(0), "q", {}) is None
    config = config_of({"k": {"form": "latent", "rank": 5}, **specs("head_pca", 3)})
    assert [config.cache_numbers(layer) for layer in (0, 1)] == [4 * 8 + 4 * 8, 5 + 4 * 3]
    assert (config.widest_value(), config.served_value_width()) == (8, 8)  # engines cache at least head_dim
    assert config.latent_key_layers() == {"full_attention": 1}
    absorbed = {"v": {"form": "latent", "rank": 20, "absorbed": True}, "o": {"form": "absorbed", "rank": 20}}
    config = config_of(absorbed)
    assert config.cache_numbers(1) == 4 * 8 + 20
    assert (config.widest_value(), config.served_value_width()) == (20, 32)  # a multiple of 16
    with pytest.raises(ValueError, match=r"needs .* on o"):
        config_of({**absorbed, "o": {"form": "absorbed", "rank": 19}})
    with pytest.raises(ValueError, match="true or false for v and nothing for k"):
        config_of({"k": {"form": "latent", "rank": 5, "absorbed": False}})


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("norm_eps", float("nan"), "norm epsilon: nan"),
        ("norm_eps", True, "norm epsilon: True"),
        ("sliding_window", 0, "sliding_window: 0"),
        ("num_hidden_layers", 2.0, "num_hidden_layers: 2.0"),
        ("layer_types", ["full_attention"], "layer_types must be 2 of"),
        ("layer_types", ["sliding_attention"] * 2, "sliding_window is null"),
        ("num_key_value_heads", 3, "num_attention_heads: 4 is not a multiple of num_key_value_heads: 3"),
        ("layer_sizes", [{}], "layer_sizes: 1 entries for 2 layers"),
        ("layer_sizes", [{}, {"depth": 3}], "layer 1 has unknown depth"),
        ("core_format", "coo", "core_format is 'coo'"),
    ],
)
def test_fields_from_which_no_layers_follow(field: str, value: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        LayersConfig(**{**SIZES, field: value})
