"""Random configs of each family: the logits of transformers' own model, and cached decoding equal to a prefill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.core_model_loading import revert_weight_conversion

from lamina import LaminaConfig, LaminaForCausalLM
from pipeline.families.fused import fused_tensors
from pipeline.families.registry import checkpoint_config, geometry_of, standard_config
from pipeline.families.source_config import source_config
from tests.factories import FAMILIES, randomise_

LIMIT, CONFIGS, TOKENS = 2e-6, 20, 21
TYPES = ("sliding_attention", "full_attention")


def random_config(family: str, seed: int) -> dict[str, Any]:
    """Return config.json of a small model, each of its own shape."""
    draw = random.Random(f"{family} {seed}")
    groups, kv_heads = draw.choice((1, 2, 3)), draw.choice((1, 2, 4))
    heads, layers, head_dim = groups * kv_heads, draw.choice((2, 3, 5)), draw.choice((8, 12, 16))
    theta = draw.choice((50.0, 10000.0))
    common: dict[str, Any] = {
        "vocab_size": draw.choice((50, 101)), "hidden_size": heads * head_dim, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": 64, "tie_word_embeddings": draw.random() < 0.5,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    gated = {
        **common, "intermediate_size": draw.choice((40, 77)), "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "hidden_size": heads * draw.choice((8, 12, 20)),  # which head_dim does not follow from
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }  # fmt: skip
    trained = {"factor": 4.0, "original_max_position_embeddings": 8}
    stretched = {
        "rope_parameters": {
            "rope_theta": theta,
            **draw.choice((
                {"rope_type": "default"},
                {"rope_type": "linear", "factor": 4.0},
                {"rope_type": "llama3", **trained, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                {"rope_type": "yarn", **trained},
                {"rope_type": "dynamic", "factor": 2.0},
            )),
        }
    }  # fmt: skip
    biased = {"attention_bias": draw.random() < 0.5}
    types = [draw.choice(TYPES) for _ in range(layers)]
    windows = {"sliding_window": draw.choice((3, 9)), "layer_types": types}
    scaled = {"rope_type": "linear", "rope_theta": 10 * theta, "factor": 4.0}
    ropes = {"rope_parameters": dict(zip(TYPES, (gated["rope_parameters"], scaled), strict=True))}
    gemma = {
        **gated, **windows, **biased, "head_dim": draw.choice((8, 16)), "query_pre_attn_scalar": draw.choice((7, 16)),
        "final_logit_softcapping": draw.choice((None, 4.0)),
    }  # fmt: skip
    partly = {"rope_parameters": {**gated["rope_parameters"], "partial_rotary_factor": draw.choice((0.5, 1.0))}}
    longrope = {
        "rope_type": "longrope", "rope_theta": theta, "partial_rotary_factor": 0.5,
        "short_factor": [1.0 + 0.1 * i for i in range(head_dim // 4)],
        "long_factor": [4.0 + 0.1 * i for i in range(head_dim // 4)],
    }  # fmt: skip
    square = {"hidden_size": common["hidden_size"]}  # by which transformers checks the factors
    own: Mapping[str, dict[str, Any]] = {
        "llama": {**gated, **stretched, **biased, "mlp_bias": draw.random() < 0.5},
        "mistral": {**gated, **stretched, "sliding_window": draw.choice((None, 5))},
        "qwen2": {**gated, **stretched, **windows, "use_sliding_window": True},
        "qwen3": {**gated, **stretched, **windows, **biased, "use_sliding_window": True},
        "opt": {**common, "ffn_dim": 40, "word_embed_proj_dim": heads * head_dim, "dropout": 0.0},
        "gptj": {
            **{name: common[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
            "n_embd": heads * head_dim, "n_layer": layers, "n_head": heads, "n_positions": 64, "n_inner": 40,
            "rotary_dim": draw.choice((4, 8)),
        },
        "gemma2": {**gemma, "attn_logit_softcapping": draw.choice((None, 3.0))},
        "gemma3_text": {**gemma, **ropes},
        "olmo2": {**gated, **stretched, **biased},
        "olmo3": {**gated, **biased, **windows, **ropes},
        "granite": {
            **gated, **stretched, **biased, "mlp_bias": draw.random() < 0.5,
            "embedding_multiplier": draw.choice((1.0, 12.0)),
            "attention_multiplier": draw.choice((0.0625, 0.3)), "residual_multiplier": draw.choice((0.22, 1)),
            "logits_scaling": draw.choice((1.0, 16)),
        },
        "smollm3": {**gated, **stretched, **biased, "no_rope_layers": [draw.choice((0, 1)) for _ in range(layers)]},
        "starcoder2": {**gated, **stretched, "use_bias": draw.random() < 0.5, "sliding_window": draw.choice((None, 5))},
        "phi3": {
            **gated, "sliding_window": draw.choice((None, 5)), "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
            **draw.choice(({}, {"rope_parameters": longrope, "original_max_position_embeddings": 40, **square})),
        },
        "glm": {**gated, **biased, "head_dim": head_dim, **partly},
        "glm4": {**gated, **biased, "head_dim": head_dim, **partly},
        "cohere": {**gated, **stretched, **biased, "logit_scale": draw.choice((0.0625, 1.0))},
        "cohere2": {**gated, **biased, **windows, "logit_scale": draw.choice((0.0625, 1.0))},
        "seed_oss": {
            **gated, **stretched, **biased, "attention_out_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5,
        },
        "ernie4_5": {**gated, **stretched, "use_bias": draw.random() < 0.5},
        "gpt_neox": {
            **common, **biased, **partly, "intermediate_size": draw.choice((40, 77)),
            "use_parallel_residual": draw.random() < 0.5, "tie_word_embeddings": False,
        },
        "falcon": {
            **common, "ffn_hidden_size": draw.choice((40, 77)), "bias": draw.random() < 0.5,
            "rope_parameters": gated["rope_parameters"],
            **draw.choice((
                {"new_decoder_architecture": True, "num_kv_heads": kv_heads},
                {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": 1},
                {"multi_query": True},
                {"multi_query": False},
                {"multi_query": True, "parallel_attn": False},
                {"multi_query": False, "parallel_attn": False},
            )),
        },
    }  # fmt: skip
    return {"model_type": family, **own.get(family, {**gated, **stretched})}


def models(family: str, seed: int) -> tuple[Any, Any]:
    """Return transformers' model of a random config and ours, with the same weights."""
    config = random_config(family, seed)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).eval()
    standard = standard_config(source.config.to_dict())
    assert {**standard_config(source_config(standard, "float32")), "forms": standard["forms"]} == standard
    written = checkpoint_config(standard, standard["forms"], "float32")
    apart = ("model_type", "architectures", "dtype")
    ours: Any = LaminaForCausalLM(LaminaConfig(**{name: written[name] for name in written if name not in apart}))
    tensors = revert_weight_conversion(randomise_(source, seed), source.state_dict())  # the names in files
    geometry = geometry_of(standard)
    expected = geometry.expected_tensors()
    for name, whole in fused_tensors(geometry).items():
        numbers = tensors.pop(name).flatten()
        for part in whole.parts:
            within = part.within(numbers[part.begin : part.end].view(part.block))
            tensors[part.name] = within.reshape(part.shape)
    assert expected.items() <= {name: tuple(tensor.shape) for name, tensor in tensors.items()}.items()
    ours.eval().load_state_dict(tensors)
    if source.config._attn_implementation == "eager":  # the kernels of "sdpa" round otherwise
        ours.set_attn_implementation("eager")
    return source, ours


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, CONFIGS))])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, seed: int) -> None:
    source, ours = models(family, seed)
    ids_BT = torch.randint(3, 50, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected_BTV, found_BTV = (model(ids_BT).logits for model in (source, ours))
        assert relative(found_BTV, expected_BTV) < LIMIT
        cache, cuts = DynamicCache(config=ours.config), (0, 9, *range(10, TOKENS + 1))
        parts = [
            ours(ids_BT[:, start:stop], past_key_values=cache, use_cache=True).logits
            for start, stop in itertools.pairwise(cuts)
        ]
        assert relative(torch.cat(parts, dim=1), found_BTV) < 10 * LIMIT
