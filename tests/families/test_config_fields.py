"""Every field of every family's config class is read and written back, fixed, or changes no logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers.configuration_utils import PreTrainedConfig

from lamina import LayersConfig
from lamina.block_lamina import BLOCK_DEFAULTS, DEFAULT_BLOCK
from manifests.errors import InputError
from pipeline.checkpoint.targets import BLOCK, FIELDS, export_faults
from pipeline.families import registry
from pipeline.families.config_fields import (
    UNREAD_FIELDS,
    config_class,
    fixed_fields,
    kept_fields,
    listed_fields,
    unread_fields,
)
from pipeline.families.registry import FAMILIES, checkpoint_config, standard_config
from pipeline.families.source_config import source_config
from tests.families.test_registry import GPTJ, LATENT, OPT, SMALL

MIXTURE = {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTRAL = {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}
SHARED = {
    **SMALL, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
SOLAR = {name: value for name, value in SHARED.items() if name not in ("first_k_dense_replace", "intermediate_size")}
LISTED = {**LATENT, "first_k_dense_replace": 1}
OWN_HEADS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
NEOX = {**OWN_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
FALCON = {**{name: value for name, value in OWN_HEADS.items() if name != "intermediate_size"}, "ffn_hidden_size": 80}
MINIMAX = {**MIXTRAL, "head_dim": 12}
MINIMAX_FIELDS = ("scoring_func", "qk_norm_type", "use_routing_bias", "shared_intermediate_size")
ROUTING = ("topk_method", "scoring_func", "moe_layer_freq")  # fields of the hub's configs
INDEX = {**LATENT, "q_lora_rank": 12, "index_head_dim": 16}
KIMI = {
    **{name: value for name, value in LATENT.items() if name != "n_routed_experts"}, "num_local_experts": 6,
    "first_k_dense_replace": 1,
}  # fmt: skip
KIMI_FIELDS = ("first_k_dense_replace", "moe_layer_freq", "moe_router_activation_func", "mla_use_nope")
NEMOTRON = {
    **SMALL, "layers_block_type": ["linear_attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 6,
    "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
NEMOTRON_LACKS = ("hidden_act", "rms_norm_eps", "rope_parameters", "num_hidden_layers")
SOLAR_LACKS = ("first_k_dense_replace", "intermediate_size")
KIMI_LACKS = ("n_routed_experts", "rope_parameters", "q_lora_rank")
SIZES = {
    "opt": OPT, "gptj": GPTJ, "mixtral": MIXTRAL, "qwen2_moe": MIXTURE, "qwen3_moe": MIXTURE, "deepseek_v2": LATENT,
    "deepseek_v3": LATENT, "glm4_moe": SHARED, "dots1": SHARED, "solar_open": SOLAR,
    "glm4_moe_lite": LISTED,
    "minimax_m2": MINIMAX, "gpt_neox": NEOX, "falcon": FALCON,
    "smollm3": {**SMALL, "no_rope_layers": [1, 0]}, "qwen3_next": MIXTURE,
    "llama4_text": {**MIXTRAL, "no_rope_layers": [1, 0], "intermediate_size_mlp": 40},
    "deepseek_v32": INDEX, "glm_moe_dsa": INDEX, "kimi_linear": KIMI, "nemotron_h": NEMOTRON,
}  # fmt: skip
UNLISTED = {  # head_dim
    "phi3", "granitemoe", "dots1",
    "qwen2", "qwen2_moe", "qwen3_moe", "glm4_moe", "olmo2", "olmo3", "granite", "smollm3", "starcoder2", "cohere",
    "cohere2",
}  # fmt: skip
TOKENS = {"bos_token_id": None, "eos_token_id": [3, 4], "pad_token_id": 7}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "vocab_size": 77, "hidden_size": 56, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 44, "tie_word_embeddings": True, "initializer_range": 0.3, **TOKENS,
}  # fmt: skip
GATED: dict[str, Any] = {
    **COMMON, "intermediate_size": 33, "num_key_value_heads": 1, "hidden_act": "relu", "rms_norm_eps": 0.5,
    "head_dim": 18, "rope_parameters": LLAMA3,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1 / 3}
ODD_SHARED: dict[str, Any] = {
    "first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 9,
    "n_shared_experts": 3, "routed_scaling_factor": 3.5,
}  # fmt: skip
GROUPED = {"topk_method": "group_limited_greedy"}
ODD_LATENT: dict[str, Any] = {
    **COMMON, "intermediate_size": 33, "hidden_act": "relu", "rms_norm_eps": 0.5, "rope_parameters": LLAMA3,
    **ODD_SHARED,
    "num_attention_heads": {"num_attention_heads": 2, "num_key_value_heads": 2}, "attention_bias": True,
    "q_lora_rank": 9, "kv_lora_rank": 10, "qk_nope_head_dim": 2, "qk_rope_head_dim": 8, "v_head_dim": 7,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, Any] = {
    "sliding_window": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "use_sliding_window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    "max_window_layers": {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 6},
    "layer_types": {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True,
    "mlp_only_layers": [1], "decoder_sparse_step": 2,
}  # fmt: skip
PATTERN = {"layer_types": {"layer_types": SLIDING[::-1], "sliding_window": 6}, "sliding_window": {"sliding_window": 5}}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
}
# By layer type, the parameters of the types that the model has.
OWN_ROPES = {"rope_parameters": {"rope_parameters": ROPES, **PATTERN["layer_types"]}}
UNGATED = {name: value for name, value in GATED.items() if name not in ("rms_norm_eps", "tie_word_embeddings")}
GEMMA: dict[str, Any] = {
    **{name: value for name, value in GATED.items() if name not in ("hidden_act", "tie_word_embeddings")},
    **PATTERN, "hidden_activation": "relu", "tie_word_embeddings": False, "attention_bias": True,
    "query_pre_attn_scalar": 99, "final_logit_softcapping": 7.0,
}  # fmt: skip
COHERE: dict[str, Any] = {
    **UNGATED, "layer_norm_eps": 0.5, "tie_word_embeddings": False, "attention_bias": True, "logit_scale": 0.7,
}  # fmt: skip
PARTLY = {**LLAMA3, "partial_rotary_factor": 0.25}
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 16,
}  # fmt: skip
INDEXED: dict[str, Any] = {
    **{name: value for name, value in ODD_LATENT.items() if name != "q_lora_rank"}, "q_lora_rank": 9,
    "norm_topk_prob": False, "n_group": 3, "topk_group": {"n_group": 3, "topk_group": 2},
    "mlp_layer_types": ["sparse", "dense"], "index_topk": 9, "index_head_dim": 24, "index_n_heads": 5,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    **GATED, "attention_bias": True, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 7,
    "linear_value_head_dim": 9, "linear_num_key_heads": 2, "linear_num_value_heads": 48,
    "layer_types": ["full_attention", "linear_attention"], "head_dim": 24,
    "rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5},
}  # fmt: skip
# Family → field → another value than SMALL's, or all the fields that it needs beside it.
ODD: dict[str, dict[str, Any]] = {
    "llama": {**GATED, "attention_bias": True, "mlp_bias": True},
    "mistral": {**GATED, "sliding_window": 5},
    "qwen2": {**GATED, **WINDOWS},
    "qwen3": {**GATED, **WINDOWS, "attention_bias": True},
    "opt": {
        **{name: value for name, value in COMMON.items() if name not in ("initializer_range", "tie_word_embeddings")},
        "hidden_size": {"hidden_size": 56, "word_embed_proj_dim": 56}, "tie_word_embeddings": False, "ffn_dim": 33,
        "activation_function": "gelu", "init_std": 0.3, "enable_bias": False,
    },
    "gptj": {
        "vocab_size": 77, "n_embd": 56, "n_layer": 3, "n_head": 2, "n_positions": 44, "rotary_dim": 4, "n_inner": 33,
        "activation_function": "relu", "layer_norm_epsilon": 0.5, "initializer_range": 0.3, "tie_word_embeddings": True,
        **TOKENS,
    },
    "mixtral": {**GATED, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen2_moe": {**GATED, **EXPERTS, "qkv_bias": False, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**GATED, **EXPERTS, "attention_bias": True},
    "glm4_moe": {
        **GATED, **ODD_SHARED, "attention_bias": True, "hidden_size": 64, "head_dim": 20,
        "use_qk_norm": True, "norm_topk_prob": False, "n_group": 3, "topk_group": {"n_group": 3, "topk_group": 2},
        "rope_parameters": PARTIAL,
    },
    "minimax_m2": {
        **GATED, "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 20, "rope_parameters": PARTIAL,
    },
    "deepseek_v2": {
        **ODD_LATENT, "topk_method": {**GROUPED, "n_group": 2, "topk_group": 1},
        "n_group": {**GROUPED, "n_group": 3, "topk_group": 1}, "topk_group": {**GROUPED, "n_group": 3, "topk_group": 2},
    },
    "deepseek_v3": {
        **ODD_LATENT, "rope_interleave": False, "norm_topk_prob": False, "n_group": 3,
        "topk_group": {"n_group": 3, "topk_group": 2},
    },
    "glm4_moe_lite": {
        **ODD_LATENT, "rope_interleave": False, "norm_topk_prob": False, "n_group": 3,
        "topk_group": {"n_group": 3, "topk_group": 2}, "mlp_layer_types": ["sparse", "dense"],
        "first_k_dense_replace": {"first_k_dense_replace": 2, "mlp_layer_types": ["dense", "dense"]},
    },
    "dots1": {
        **GATED, **PATTERN, **ODD_SHARED, "attention_bias": True, "norm_topk_prob": True, "n_group": 3,
        "topk_group": {"n_group": 3, "topk_group": 2},
        "max_window_layers": {"max_window_layers": 1, "sliding_window": 6},
    },
    "solar_open": {
        **{name: value for name, value in {**GATED, **ODD_SHARED}.items() if name not in SOLAR_LACKS},
        "attention_bias": True, "norm_topk_prob": False, "n_group": 3, "topk_group": {"n_group": 3, "topk_group": 2},
    },
    "seed_oss": {**GATED, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "ernie4_5": {**GATED, "use_bias": True, "tie_word_embeddings": False},
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": {**INDEXED, "indexer_types": ["full", "shared"]},
    "kimi_linear": {
        **{name: value for name, value in ODD_LATENT.items() if name not in KIMI_LACKS}, "q_lora_rank": 9,
        "num_local_experts": 9, "norm_topk_prob": False, "n_group": 3, "topk_group": {"n_group": 3, "topk_group": 2},
        "mlp_layer_types": ["sparse", "dense"], "layer_types": ["full_attention", "linear_attention"],
        "linear_head_dim": 5, "linear_num_heads": 2, "linear_conv_kernel_dim": 3,
    },
    "nemotron_h": {
        **{name: value for name, value in GATED.items() if name not in NEMOTRON_LACKS},
        "layer_norm_epsilon": 0.5, "mlp_hidden_act": "relu", "mamba_num_heads": 8, "mamba_head_dim": 5,
        "mamba_hidden_act": "relu", "ssm_state_size": 7, "n_groups": 1, "conv_kernel": 3, "chunk_size": 9,
        "time_step_min": 0.1, "use_conv_bias": False, "use_bias": True, "use_mamba_kernels": False,
        "layers_block_type": ["full_attention", "moe"], "n_routed_experts": 9, "num_experts_per_tok": 3,
        "num_hidden_layers": {"layers_block_type": ["mlp"], "num_hidden_layers": 1},
        "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 21, "routed_scaling_factor": 3.5,
        "norm_topk_prob": False, "n_group": 3, "topk_group": {"n_group": 3, "topk_group": 2},
    },
    "qwen3_next": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {
        **{name: value for name, value in HYBRID.items() if name != "intermediate_size"}, "num_experts": 9,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20,
    },
    "llama4_text": {
        **GATED, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 20,
        "attention_bias": True, "use_qk_norm": False, "attn_temperature_tuning": False, "floor_scale": 5,
        "attn_scale": 0.3, "attention_chunk_size": 9, "layer_types": ["full_attention", "chunked_attention"],
        "no_rope_layers": [0, 1], "moe_layers": [1], "interleave_moe_layer_step": 2,
        "num_hidden_layers": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    },
    "gpt_oss": {
        **GATED, **PATTERN, "num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": False,
        "swiglu_alpha": 1.5, "swiglu_limit": 6.0, "head_dim": 20,
    },
    "hunyuan_v1_moe": {
        **{name: value for name, value in GATED.items() if name != "pad_token_id"}, "num_experts": 4,
        "moe_topk": {"moe_topk": 2, "num_experts": 4}, "attention_bias": True, "head_dim": 20, "pad_token_id": 7,
    },
    "granitemoe": {
        **GATED, "num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 49.0,
    },
    "gemma2": {**GEMMA, "attn_logit_softcapping": None},
    "gemma3_text": {**GEMMA, **OWN_ROPES},
    "olmo2": {**GATED, "attention_bias": True},
    "olmo3": {**GATED, **PATTERN, **OWN_ROPES, "attention_bias": True},
    "granite": {
        **GATED, "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
        "residual_multiplier": 0.7, "logits_scaling": 49.0,
    },
    "smollm3": {
        **GATED, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "no_rope_layers": [0, 1], "use_sliding_window": {"use_sliding_window": True, "sliding_window": 6},
        "num_hidden_layers": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
        "sliding_window": {"sliding_window": 5, "use_sliding_window": True},
        "layer_types": {"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": True},
    },
    "starcoder2": {
        **UNGATED, "norm_epsilon": 0.5, "tie_word_embeddings": False, "use_bias": False, "sliding_window": 5,
    },
    "cohere": COHERE,
    "phi3": {
        **GATED, "sliding_window": 5,
        "rope_parameters": {"rope_parameters": LONG, "original_max_position_embeddings": 16},
        "original_max_position_embeddings": {"original_max_position_embeddings": 16, "rope_parameters": LONG},
    },
    "glm": {**GATED, "head_dim": 24, "attention_bias": False, "rope_parameters": PARTLY},
    "glm4": {**GATED, "head_dim": 24, "attention_bias": False, "rope_parameters": PARTLY},
    "cohere2": {**COHERE, **PATTERN},
    "gpt_neox": {
        **COMMON, "intermediate_size": 33, "hidden_act": "relu", "layer_norm_eps": 0.5, "attention_bias": False,
        "use_parallel_residual": False, "hidden_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "falcon": {
        **{name: value for name, value in COMMON.items() if name not in ("initializer_range", "tie_word_embeddings")},
        "initializer_range": 0.3, "tie_word_embeddings": False, "ffn_hidden_size": 33, "activation": "relu",
        "layer_norm_epsilon": 0.5, "bias": True, "rope_parameters": LLAMA3,
        "num_kv_heads": {"num_kv_heads": 2, "new_decoder_architecture": True},
        "new_decoder_architecture": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "multi_query": {"multi_query": False, "num_kv_heads": 4}, "parallel_attn": False,
        "num_ln_in_parallel_attn": {
            "num_ln_in_parallel_attn": 1, "new_decoder_architecture": True, "num_kv_heads": 2,
        },
    },
}  # fmt: skip
OTHER: dict[str, Any] = {
    "is_encoder_decoder": True, "layer_types": SLIDING, "do_layer_norm_before": False, "_remove_final_layer_norm": True,
    "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 24, "use_sliding_window": True,
    "num_key_value_heads": 2, "scoring_func": "tanh", "topk_method": "best", "moe_layer_freq": 2,
    "norm_topk_prob": True, "mlp_bias": True,
    "use_bidirectional_attention": True, "use_qk_norm": True, "alibi": True,
    "moe_latent_size": 8, "n_shared_experts": 2, "residual_in_fp32": True,
    "mla_use_nope": False, "moe_router_activation_func": "softmax",
    "qk_norm_type": "per_head", "use_routing_bias": False, "shared_intermediate_size": 8,
}  # fmt: skip
UNREAD: dict[str, Any] = {
    "transformers_version": "4.0", "architectures": ["XForCausalLM"], "dtype": "float16", "output_hidden_states": True,
    "return_dict": False, "use_cache": False, "chunk_size_feed_forward": 4, "id2label": {0: "a"}, "label2id": {"a": 0},
    "problem_type": "regression", "attention_dropout": 0.5, "pretraining_tp": 2, "dropout": 0.5, "layerdrop": 0.5,
    "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "output_router_logits": True, "sliding_window": 3,
    "router_aux_loss_coef": 0.5, "router_jitter_noise": 0.5, "max_window_layers": 1,
    "layer_types": SLIDING, "head_dim": 32, "num_mtp_layers": 2,
    "eod_token_id": 9, "sep_token_id": 9,
    "residual_dropout": 0.5, "embedding_dropout": 0.5, "attn_logit_softcapping": 5.0, "no_rope_layer_interval": 3,
    "attention_bias": True, "mamba_proj_bias": True, "expand": 3, "mamba_ssm_cache_dtype": "bfloat16",
    "moe_shared_expert_overlap": False, "num_logits_to_keep": 2, "time_step_limit": [0.0, 1.0], "time_step_max": 0.2,
    "time_step_floor": 0.1, "rescale_prenorm_residual": False, "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["moe"],
    "hidden_dropout": 0.5, "classifier_dropout": 0.5, "is_decoder": True,
}  # fmt: skip


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES.get(family, SMALL), **fields}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_class_is_in_one_part_of_the_table(family: str) -> None:
    value = FAMILIES[family]
    kept, fixed, unread = set(kept_fields(value)), set(fixed_fields(value)), set(unread_fields(value))
    assert not kept & fixed
    assert not kept & unread
    assert not fixed & unread
    assert set(listed_fields(value)) <= kept | fixed | unread, "a field that pipeline.families does not name"
    others = (kept | fixed | set(value.unread)) - set(listed_fields(value))
    unlisted = {"mistral": {"layer_types"}, **{name: {"head_dim"} for name in UNLISTED}}
    unlisted |= {"deepseek_v2": {*ROUTING[1:]}, "deepseek_v3": {*ROUTING}}
    unlisted |= {"deepseek_v32": {*ROUTING}, "glm_moe_dsa": {*ROUTING}}
    unlisted["glm4_moe_lite"] = {*ROUTING, "first_k_dense_replace", "num_mtp_layers"}
    unlisted["minimax_m2"] = {*MINIMAX_FIELDS}
    unlisted |= {"kimi_linear": {*KIMI_FIELDS}, "nemotron_h": {"num_hidden_layers"}}
    assert others == unlisted.get(family, set())
    assert set(ODD[family]) == kept
    assert fixed <= set(OTHER)
    assert unread <= set(UNREAD)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in ODD for name in ODD[family]])
def test_a_kept_field_is_read_and_written_back(family: str, name: str) -> None:
    value = ODD[family][name]
    fields = value if isinstance(value, dict) and name in value else {name: value}
    standard, usual = standard_config(config_of(family, **fields)), standard_config(config_of(family))
    held = kept_fields(FAMILIES[family])[name]
    assert standard != usual if held == "kind" else standard[held] != usual[held]
    written = source_config(standard, "float32")
    names = config_class(FAMILIES[family]).attribute_map
    assert {field: written[names.get(field, field)] for field in fields} == fields
    assert {**standard_config(written), "forms": []} == {**standard, "forms": []}


@pytest.mark.parametrize("family", FAMILIES)
def test_another_value_of_a_fixed_field_is_refused_by_name(family: str) -> None:
    for name in fixed_fields(FAMILIES[family]):
        with pytest.raises(InputError, match=rf"config.json: {name}\b.* supported"):
            standard_config(config_of(family, **{name: OTHER[name]}))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unread_field_changes_nothing(family: str) -> None:
    unread = {name: UNREAD[name] for name in unread_fields(FAMILIES[family])}
    assert standard_config(config_of(family, **unread)) == standard_config(config_of(family))


def test_a_field_of_all_families_is_one_of_some_class() -> None:
    assert {*UNREAD_FIELDS} <= {name for family in FAMILIES.values() for name in listed_fields(family)}


def test_a_field_that_only_a_newer_class_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = dataclasses.replace(FAMILIES["smollm3"], unread={})
    monkeypatch.setitem(registry.FAMILIES, "smollm3", older)
    assert standard_config(config_of("smollm3"))["hidden_act"] == "silu"
    with pytest.raises(InputError, match=r"no_rope_layer_interval is 3, a field of smollm3 in transformers .* not kn"):
        standard_config(config_of("smollm3", no_rope_layer_interval=3))


@pytest.mark.parametrize(
    ("family", "stray"),
    [
        ("gptj", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
        ("gptj", {"head_dim": 32}),
        ("opt", {"head_dim": 32}),
    ],
)
def test_a_field_that_the_family_s_model_does_not_read_is_not_read(family: str, stray: dict[str, Any]) -> None:
    assert standard_config(config_of(family, **stray)) == standard_config(config_of(family))


def test_a_width_of_heads_that_only_the_rotation_reads_is_that_of_the_heads() -> None:
    plain = standard_config(config_of("gpt_neox"))
    assert standard_config(config_of("gpt_neox", head_dim=plain["head_dim"])) == plain
    with pytest.raises(InputError, match=rf"head_dim: 2 is not the width of the heads, {plain['head_dim']}, "):
        standard_config(config_of("gpt_neox", head_dim=2))


def test_every_field_of_a_checkpoint_has_a_rule_for_gguf() -> None:
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"dtype"}  # type: ignore[arg-type]
    assert set(FIELDS) == {field.name for field in dataclasses.fields(LayersConfig)} - common  # type: ignore[arg-type]
    assert set(BLOCK) == {*DEFAULT_BLOCK, *BLOCK_DEFAULTS}


QWEN_WINDOW = WINDOWS["layer_types"]
SCALED: dict[str, Any] = {"rope_theta": 10000.0, "factor": 2.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act relu; known are silu, swish"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"mlp_bias": True}, "biases on down, gate, up"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", **SCALED}}, "rope_type dynamic"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8, **SCALED}}, "yarn"),
    ("llama", {"rope_parameters": {"rope_type": "proportional", **SCALED}}, "rope_type proportional"),
    ("llama", {"per_layer_config": {"1": {"intermediate_size": 40}}}, "layers of different sizes"),
    ("mistral", {"sliding_window": 8}, "a sliding window, which both forget"),
    ("gemma2", {}, "a gemma2 model; known are llama, mistral, qwen2"),
    ("qwen2", QWEN_WINDOW, "a sliding window, which both forget"),
    ("qwen3", QWEN_WINDOW, "a sliding window, which both forget"),
    ("qwen3", {}, "layers that differ from Llama's in k_norm, q_norm"),
    ("opt", {}, "block.norm 'layer'; known is 'rms'"),
    ("opt", {}, "block.positions {"),
    ("gptj", {}, "block.rotary 'interleaved'; known is 'half'"),
    ("gptj", {}, "block.parallel True"),
    ("gptj", {}, "block.head_bias True"),
    ("deepseek_v2", {}, "attention of deepseek_v2"),
]


@pytest.mark.parametrize(("family", "fields", "said"), REFUSED)
def test_a_gguf_file_s_limits_are_named(family: str, fields: dict[str, Any], said: str) -> None:
    standard = standard_config(config_of(family, **fields))
    assert said in "; ".join(export_faults(checkpoint_config(standard, standard["forms"], "float32"), "gguf"))


def test_float64_is_no_type_of_llama_cpp_s() -> None:
    standard = standard_config(config_of("llama"))
    config = checkpoint_config(standard, standard["forms"], "float64")
    assert export_faults(config, "gguf") == ["numbers of float64; known are float32, bfloat16, float16"]
    assert not export_faults(config, "dense")
    assert not export_faults(config, "stock")


@pytest.mark.parametrize(("key", "value"), [("embed_scale", 2.0), ("norm_offset", 1.0), ("parallel", True)])
def test_a_block_that_is_not_llama_s_is_refused_everywhere(key: str, value: Any) -> None:
    standard = standard_config(config_of("llama"))
    config = checkpoint_config({**standard, "block": {**standard["block"], key: value}}, standard["forms"], "float32")
    assert any(f"block.{key}" in fault for fault in export_faults(config, "gguf"))
    assert export_faults(config, "dense")
    assert export_faults(config, "stock")
