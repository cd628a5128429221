"""Families against transformers' own models, and configs as they come: incomplete, odd and hostile."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lamina import LaminaConfig
from manifests.errors import InputError
from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.families.registry import checkpoint_config, geometry_of, standard_config, supported_families

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OPT: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "word_embed_proj_dim": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPTJ: dict[str, Any] = {
    "vocab_size": 100, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 12,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DENSE_MLPS = {"first_k_dense_replace": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama-head-dim": {"model_type": "llama", **SMALL, "head_dim": 20},
    "llama-mha": {"model_type": "llama", **SMALL, "num_key_value_heads": 4},
    "llama-mqa-tied": {"model_type": "llama", **SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-biased": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama-attention-biased": {"model_type": "llama", **SMALL, "attention_bias": True},
    "mistral": {"model_type": "mistral", **SMALL, "head_dim": 12, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen2-tied": {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16},
    "qwen3-biased": {"model_type": "qwen3", **SMALL, "head_dim": 16, "attention_bias": True},
    "opt": {"model_type": "opt", **OPT},
    "opt-untied": {"model_type": "opt", **OPT, "tie_word_embeddings": False},
    "opt-bare": {"model_type": "opt", **OPT, "enable_bias": False},
    "gptj": {"model_type": "gptj", **GPTJ},
    "gptj-null-inner": {"model_type": "gptj", **GPTJ, "n_inner": None},
    "gptj-tied": {"model_type": "gptj", **GPTJ, "tie_word_embeddings": True},
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT, **DENSE_MLPS},
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT, **DENSE_MLPS, "q_lora_rank": 9, "attention_bias": True},
}


def transformers_model(config: dict[str, Any]) -> Any:
    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_expected_tensors_are_those_of_the_model(name: str) -> None:
    config = CONFIGS[name]
    geometry = geometry_of(standard_config(config))
    model = transformers_model(config)
    shapes = {tensor: tuple(value.shape) for tensor, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]  # not in a checkpoint
    assert geometry.expected_tensors() == shapes
    assert geometry.tied == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", list(CONFIGS))
def test_counted_numbers_are_the_model_s_parameters(name: str) -> None:
    config = CONFIGS[name]
    geometry = geometry_of(standard_config(config))
    model = transformers_model(config)
    assert geometry.model_numbers() == model.num_parameters()
    layers = model.get_decoder()
    layers = layers.layers if hasattr(layers, "layers") else layers.h
    layer = geometry.layers[0]
    assert layer.numbers() == sum(parameter.numel() for parameter in layers[0].parameters())
    assert layer.numbers() == sum(layer.numbers((role,)) for role in layer.roles)
    assert layer.numbers(()) == 0


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_config_of_a_checkpoint_builds_a_model_of_the_same_tensors(name: str) -> None:
    """The other side of the compression: what the compress side writes, the serving side takes."""
    from lamina import LaminaForCausalLM

    standard = standard_config(CONFIGS[name])
    written = checkpoint_config(standard, standard["forms"], "float32")
    assert written["model_type"] == "lamina"
    assert written["dtype"] == "float32"
    assert standard.keys() <= written.keys()
    fields = {key: value for key, value in written.items() if key not in ("model_type", "architectures", "dtype")}
    with torch.device("meta"):
        model: Any = LaminaForCausalLM(LaminaConfig(**fields))
    shapes = {tensor: tuple(value.shape) for tensor, value in model.state_dict().items()}
    if standard["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    assert shapes == geometry_of(standard).expected_tensors()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_a_pivoted_group_shares_lies_where_the_model_looks(name: str) -> None:
    from lamina import LaminaForCausalLM

    standard = standard_config(CONFIGS[name])
    geometry = geometry_of(standard)
    stacks = {"query_key": ("q", "k"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    present = {group: [role for role in roles if role in geometry.layers[1].roles] for group, roles in stacks.items()}
    groups = {group: roles for group, roles in present.items() if roles}
    forms = {role: {"form": "pivoted", "rank": 2, "group": group} for group in groups for role in groups[group]}
    written = checkpoint_config(standard, [forms] * geometry.num_layers, "float32")
    fields = {key: value for key, value in written.items() if key not in ("model_type", "architectures", "dtype")}
    with torch.device("meta"):
        model: Any = LaminaForCausalLM(LaminaConfig(**fields))
    ours = {
        geometry.layers[1].tensor_name(f"{group}.pivoted.{part}", tuple(roles))
        for group, roles in groups.items()
        for part in ("rows.weight", "coefficients.weight", "indices")
    }
    assert ours == {key for key in model.state_dict() if ".pivoted." in key and f"{geometry.layers_path}.1." in key}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "opt", "gptj"])
def test_missing_fields_take_the_family_s_defaults(model_type: str) -> None:
    ours = standard_config({"model_type": model_type})
    theirs = AutoConfig.for_model(model_type)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        assert ours[name] == getattr(theirs, name)
    assert geometry_of(ours).num_layers == len(ours["forms"]) == theirs.num_hidden_layers
    assert model_type in supported_families()


def test_defaults_that_differ_from_the_config_are_heeded() -> None:
    """A checkpoint of transformers writes only what differs: what is not there is the family's, not ours."""
    assert standard_config({"model_type": "mistral"})["num_key_value_heads"] == 8
    assert standard_config({"model_type": "opt"})["tie_word_embeddings"] is True
    assert standard_config({"model_type": "gptj"})["intermediate_size"] == 4 * 4096
    assert standard_config({"model_type": "qwen2"})["block"]["biases"] == ["q", "k", "v"]
    assert standard_config({"model_type": "llama", "num_attention_heads": 16})["num_key_value_heads"] == 16


def test_fields_under_older_names() -> None:
    standard = standard_config({"model_type": "llama", **SMALL, "rope_theta": 500000.0, "torch_dtype": "float16"})
    assert standard["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    scaled = {"type": "linear", "factor": 2.0}
    standard = standard_config({"model_type": "llama", **SMALL, "rope_scaling": scaled})
    assert standard["rope_parameters"]["rope_type"] == "linear"
    assert standard["rope_parameters"]["factor"] == 2.0
    assert standard_config({"model_type": "gptj", **GPTJ})["rope_parameters"]["partial_rotary_factor"] == 8 / 12
    assert standard_config({"model_type": "opt", **OPT})["rope_parameters"] is None


def test_the_config_given_is_not_changed() -> None:
    config = {"model_type": "llama", **SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}}
    before = copy.deepcopy(config)
    standard_config(config)
    assert config == before


def test_windows_are_heeded_by_the_families_that_have_them() -> None:
    def windows(model_type: str, **fields: Any) -> tuple[Any, Any]:
        standard = standard_config({"model_type": model_type, **SMALL, **fields})
        return standard["sliding_window"], standard["layer_types"]

    assert windows("mistral", sliding_window=8) == (8, None)
    assert windows("mistral", sliding_window=None) == (None, None)
    assert windows("llama", sliding_window=8) == (None, None)
    assert windows("llama", layer_types=["sliding_attention"] * 2) == (None, None)
    assert windows("qwen2", sliding_window=8) == (None, ["full_attention"] * 2)
    mixed = windows("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert mixed == (8, ["full_attention", "sliding_attention"])
    for model_type in ("mistral", "qwen2", "qwen3", "llama"):
        LaminaConfig(**standard_config({"model_type": model_type, **SMALL, "sliding_window": 8}))


@pytest.mark.parametrize("model_type", [None, "mamba", "LLAMA", "", 3, ["llama"], {"a": 1}, "lamina"])
def test_unsupported_families_are_named_with_the_supported(model_type: Any) -> None:
    with pytest.raises(
        InputError, match=r"model_type .* is not supported; supported: .*'gptj', .*'llama', .*'mistral'"
    ):
        standard_config({"model_type": model_type, **SMALL})


def test_no_model_type_at_all() -> None:
    with pytest.raises(InputError, match="model_type None is not supported"):
        standard_config({})


LONG = {"rope_type": "longrope", "rope_theta": 1.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
HOSTILE: list[tuple[str, str, Any, str]] = [
    ("llama", "hidden_size", "48", "hidden_size"),
    ("llama", "hidden_size", 48.0, "hidden_size"),
    ("llama", "hidden_size", None, "hidden_size"),
    ("llama", "hidden_size", 0, "hidden_size: 0"),
    ("llama", "hidden_size", 10**30, "hidden_size: 1000"),
    ("llama", "hidden_size", {}, "hidden_size"),
    ("llama", "num_hidden_layers", 0, "num_hidden_layers: 0"),
    ("llama", "num_hidden_layers", -1, "num_hidden_layers: -1"),
    ("llama", "num_hidden_layers", True, "num_hidden_layers"),
    ("llama", "num_hidden_layers", 10**9, "num_hidden_layers: 1000000000"),
    ("gptj", "n_layer", 10**9, "n_layer: 1000000000"),
    ("llama", "num_attention_heads", 0, "num_attention_heads: 0"),
    ("llama", "num_attention_heads", -4, "num_attention_heads: -4"),
    ("llama", "num_attention_heads", 5, "multiple"),
    ("gptj", "n_head", 0, "num_attention_heads: 0"),
    ("opt", "num_attention_heads", 0, "num_attention_heads: 0"),
    ("llama", "num_key_value_heads", 3, "num_attention_heads: 4 is not a multiple of num_key_value_heads: 3"),
    ("llama", "num_key_value_heads", 0, "num_key_value_heads: 0"),
    ("llama", "num_key_value_heads", 8, "is not a multiple of num_key_value_heads: 8"),
    ("qwen3", "head_dim", -3, "head_dim"),
    ("llama", "head_dim", 11, "even"),
    ("llama", "head_dim", "a", "head_dim"),
    ("llama", "intermediate_size", -1, "intermediate_size: -1"),
    ("llama", "vocab_size", 0, "vocab_size: 0"),
    ("llama", "vocab_size", [100], "vocab_size"),
    ("llama", "max_position_embeddings", 0, "max_position_embeddings: 0"),
    ("llama", "hidden_act", "swoosh", "activation: 'swoosh'"),
    ("llama", "rms_norm_eps", -1.0, "norm epsilon: -1.0"),
    ("llama", "rms_norm_eps", float("nan"), "norm epsilon: nan"),
    ("llama", "rms_norm_eps", "tiny", "rms_norm_eps"),
    ("llama", "rope_parameters", {"rope_type": "spiral", "rope_theta": 1.0}, "rope_type: 'spiral'"),
    ("llama", "rope_parameters", {**LONG, "short_factor": [1.0] * 3}, "rope_parameters.short_factor: a list of 3"),
    (
        "gpt_neox",
        "rope_parameters",
        {**LONG, "partial_rotary_factor": 0.5},
        "rope_parameters.short_factor: a list of 6",
    ),
    ("llama", "rope_theta", -3.0, "rope_theta: -3.0"),
    ("llama", "rope_theta", "a", "rope_theta: 'a'"),
    ("llama", "rope_scaling", {"type": "linear"}, "factor"),
    ("llama", "partial_rotary_factor", 0.5, "partial_rotary_factor is not supported"),
    ("llama", "tie_word_embeddings", "yes", "tie_word_embeddings"),
    ("llama", "attention_bias", "false", "attention_bias"),
    ("mistral", "sliding_window", 0, "sliding_window: 0"),
    ("gemma2", "attn_logit_softcapping", -1.0, "attn_logit_softcapping: -1.0 is not a positive number"),
    ("gemma2", "use_bidirectional_attention", True, "use_bidirectional_attention is True"),
    ("granite", "residual_multiplier", 0.0, "residual_multiplier: 0.0 is not a positive number"),
    ("cohere", "use_qk_norm", True, "use_qk_norm is True; for cohere only False is supported"),
    ("glm4", "partial_rotary_factor", 0.3, "partial_rotary_factor: 0.3 of"),
    ("qwen2", "layer_types", ["full_attention"], "layer_types"),
    ("qwen2", "layer_types", ["odd", "odd"], "layer_type"),
    ("opt", "do_layer_norm_before", False, "do_layer_norm_before is False; for opt only True is supported"),
    ("opt", "_remove_final_layer_norm", True, "_remove_final_layer_norm is True"),
    ("opt", "layer_norm_elementwise_affine", False, "layer_norm_elementwise_affine is False"),
    ("opt", "word_embed_proj_dim", 24, "word_embed_proj_dim"),
    ("opt", "ffn_dim", 0, "intermediate_size: 0"),
    ("gptj", "rotary_dim", 0, "rotary_dim: 0"),
    ("gptj", "rotary_dim", 3, "rotary_dim: 3"),
    ("gptj", "rotary_dim", 64, "rotary_dim: 64"),
    ("gptj", "layer_norm_epsilon", None, "layer_norm_epsilon"),
    ("deepseek_v3", "q_lora_rank", 0, "q_lora_rank: 0 is not a positive integer"),
    ("deepseek_v2", "kv_lora_rank", -1, "kv_lora_rank: -1"),
    ("deepseek_v2", "kv_lora_rank", 5, "kv_lora_rank: 5 is odd"),
    ("deepseek_v3", "v_head_dim", None, "v_head_dim: None"),
    ("deepseek_v3", "qk_rope_head_dim", 5, "even rotary dimension"),
    ("deepseek_v3", "rope_interleave", None, "rope_interleave: None is neither"),
    ("deepseek_v3", "num_key_value_heads", 2, "num_key_value_heads: 2 differs from num_attention_heads: 4"),
    ("deepseek_v2", "topk_method", "noaux_tc", "topk_method: 'noaux_tc' is not one of greedy, group_limited_greedy"),
    ("deepseek_v3", "scoring_func", "softmax", "scoring_func is 'softmax'; for deepseek_v3 only 'sigmoid'"),
    ("kimi_k2", "n_group", 4, "6 experts in 4 groups"),
]


@pytest.mark.parametrize(
    ("model_type", "name", "value", "expected"),
    HOSTILE,
    ids=[f"{kind}-{name}-{value}" for kind, name, value, _ in HOSTILE],
)
def test_hostile_configs_are_wrong_input(model_type: str, name: str, value: Any, expected: str) -> None:
    latent = dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), LATENT)
    sizes = {"opt": OPT, "gptj": GPTJ, **latent}.get(model_type, SMALL)
    with pytest.raises(InputError) as raised:
        standard_config({"model_type": model_type, **sizes, name: value})
    assert "config.json" in str(raised.value)
    assert expected in str(raised.value)


def test_every_fault_of_the_sizes_is_told_at_once() -> None:
    with pytest.raises(InputError) as raised:
        standard_config({"model_type": "llama", **SMALL, "vocab_size": 0, "intermediate_size": -1})
    assert all(name in str(raised.value) for name in ("vocab_size: 0", "intermediate_size: -1"))
    with pytest.raises(InputError) as raised:
        standard_config({"model_type": "opt", **OPT, "ffn_dim": -1, "activation_function": "no"})
    assert all(name in str(raised.value) for name in ("intermediate_size: -1", "activation: 'no'"))


def test_a_role_may_have_dots() -> None:
    """Of several MLPs in one layer, say: whose a tensor is does not hang on the first dot of its key."""
    geometry = geometry_of(standard_config({"model_type": "llama", **SMALL})).layers[1]
    role = "experts.3.up"
    up, down = (Matrix(f"experts.3.{name}", 8, 8, False, "mlp.in") for name in ("up", "down"))
    expert = MLPBlock("experts.3", (up,), down, 8, "silu")
    several = replace(
        geometry,
        blocks=(*geometry.blocks, expert),
        modules=(*geometry.modules, (role, "mlp.experts.3.up_proj"), (down.role, "mlp.experts.3.down_proj")),
    )
    path = "model.layers.1.mlp.experts.3.up_proj"
    assert several.tensor_name(f"{role}.first.weight", (role,)) == f"{path}.first.weight"
    assert several.tensor_name("up.weight", ("up",)) == "model.layers.1.mlp.up_proj.weight"
    assert [name for name, _ in several.tensors((role,)).values()] == [f"{path}.weight"]
    assert several.tensors()[f"{role}.weight"][0] == f"{path}.weight"
