"""Creates small real inputs for tests: random models, saved like models on the hub, and text."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deploy.quickstart.text import story_text
from pipeline.families.registry import FAMILIES as REGISTERED


def _of_kind(mixture: bool, first: tuple[str, ...]) -> tuple[str, ...]:
    """Return the families whose attention methods compress, with or without mixtures, some of them first."""
    kind = (name for name, family in REGISTERED.items() if not family.foreign and bool(family.mixture) == mixture)
    return tuple(dict.fromkeys((*first, *kind)))


# Samples of tests are drawn in this order; families that are not named follow.
FAMILIES = _of_kind(False, (
    "llama", "mistral", "qwen2", "qwen3", "opt", "gptj", "gemma2", "granite", "olmo3", "cohere2", "gemma3_text",
    "olmo2", "smollm3", "starcoder2", "cohere", "phi3", "glm", "glm4", "gpt_neox", "falcon", "seed_oss",
    "ernie4_5",
))  # fmt: skip
MIXTURES = _of_kind(True, (
    "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss", "granitemoe", "hunyuan_v1_moe",
    "dots1", "solar_open",
))  # fmt: skip
FOREIGN = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # mixtures whose attention no method compresses
CHUNKED = ("llama4_text",)  # attention within chunks, which is copied, and weighed inputs of experts
HYBRIDS = (  # two kinds of attention, which no method compresses; mixtures in most
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "nemotron_h",
)
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # latent attention with an indexer, which is copied
ALL_FAMILIES = (*FAMILIES, *MIXTURES, *FOREIGN, *HYBRIDS, *INDEXED, *CHUNKED)
GEOMETRY: dict[str, Any] = {  # grouped heads, head_dim other than hidden_size / heads, three layers
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


TYPES = ("sliding_attention", "full_attention")
DELTA: dict[str, Any] = {  # of Qwen's hybrids
    "layer_types": ("linear_attention", "full_attention"), "linear_conv_kernel_dim": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
OWN_FIELDS: dict[str, dict[str, Any]] = {  # beside GEOMETRY; every kind of layer is among the first two
    "gemma2": {
        "sliding_window": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 6.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {
        "sliding_window": 16, "query_pre_attn_scalar": 20, "layer_types": TYPES, "final_logit_softcapping": 9.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    },
    "olmo3": {"sliding_window": 16, "layer_types": TYPES},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 0.5,
    },
    "smollm3": {"no_rope_layers": (1, 0)},
    "starcoder2": {"sliding_window": 16},
    "cohere": {"logit_scale": 1.0},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": False},
    "ernie4_5": {"use_bias": True},
    "cohere2": {"logit_scale": 1.0, "sliding_window": 16, "layer_types": TYPES},
    "llama4_text": {
        "layer_types": ("chunked_attention", "full_attention"), "no_rope_layers": (1, 0), "attention_chunk_size": 16,
        "floor_scale": 6, "attn_scale": 0.4, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA),
}  # fmt: skip
OWN_NAMES: dict[str, dict[str, Any]] = {  # of families whose configs call the same sizes otherwise
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48, "do_layer_norm_before": True, "dropout": 0.0},
    "gpt_neox": {
        "intermediate_size": 80,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "falcon": {
        "ffn_hidden_size": 80,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "bias": True,
        "tie_word_embeddings": False,
    },
    "gptj": {"n_inner": 80, "rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {  # of mixtures, beside GEOMETRY: six experts, of which a token passes two
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [0], "head_dim": 12,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
    },
    "minimax_m2": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 16,
        "layer_types": TYPES, "swiglu_alpha": 1.3, "swiglu_limit": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "hunyuan_v1_moe": {
        "num_experts": 6, "moe_topk": 2, "intermediate_size": 24,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 5.0, "factor": 1.0},
    },
    "granitemoe": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 12,
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 0.5,
    },
    "llama4_text": {
        "num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 80,
        "moe_layers": [1, 2],
    },
    "qwen3_next": {**SHARED_EXPERT, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": SHARED_EXPERT,
    "deepseek_v2": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "n_group": 3, "topk_group": 2,
    },
}  # fmt: skip
LATENT: dict[str, Any] = {  # no two sizes of the attention alike
    "intermediate_size": 80, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 20,
    "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
OWN_NAMES |= {"deepseek_v2": LATENT, "deepseek_v3": LATENT}
LISTED = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
OWN_NAMES["glm4_moe_lite"] = LISTED | {"mlp_layer_types": ("dense", "sparse", "sparse")}
GROUPED: dict[str, Any] = EXPERTS["deepseek_v3"]
EXPERTS |= {"glm4_moe_lite": GROUPED, "solar_open": GROUPED}
EXPERTS["dots1"] = GROUPED | {"first_k_dense_replace": 1, "sliding_window": 16, "layer_types": TYPES}
INDEX: dict[str, Any] = {**LATENT, "index_topk": 300, "index_head_dim": 10, "index_n_heads": 3}
OWN_NAMES |= {"deepseek_v32": INDEX, "glm_moe_dsa": {**INDEX, "indexer_types": ("full", "shared")}}
EXPERTS |= {"deepseek_v32": EXPERTS["deepseek_v3"], "glm_moe_dsa": EXPERTS["deepseek_v3"]}
OWN_NAMES["kimi_linear"] = {
    **{name: value for name, value in LATENT.items() if name not in ("rope_parameters", "q_lora_rank")},
    "layer_types": DELTA["layer_types"], "linear_head_dim": 6, "linear_num_heads": 3, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS["kimi_linear"] = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2,
}  # fmt: skip
OWN_NAMES["nemotron_h"] = {
    "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 6,
    "ssm_state_size": 10, "n_groups": 2, "conv_kernel": 3, "chunk_size": 16, "num_hidden_layers": 4, "use_bias": True,
    "layers_block_type": ("full_attention", "moe", "linear_attention", "mlp"),
}  # fmt: skip
EXPERTS["nemotron_h"] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2,
    "moe_shared_expert_intermediate_size": 20,
}  # fmt: skip
COMMON_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a small model of a family, with `overrides`."""
    own = OWN_NAMES.get(family)
    sizes = GEOMETRY if own is None else {**{name: GEOMETRY[name] for name in COMMON_NAMES}, **own}
    fields = {**sizes, **EXPERTS.get(family, {}), **OWN_FIELDS.get(family, {}), **overrides}
    cycles = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}  # as long as the layers
    count = fields.get("num_hidden_layers", fields.get("n_layer", 0))
    fields |= {name: (value * count)[:count] for name, value in cycles.items()}
    config: PreTrainedConfig = CONFIG_MAPPING[family](**fields)
    return config


def model_class(family: str) -> Any:
    """Return the class of a family's models in transformers."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


MADE: dict[str, dict[str, bytes]] = {}  # arguments of `make_model` -> files, as tests ask for the same models again


def make_model(
    directory: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "40KB",
    peaked: bool = True,
    **overrides: Any,
) -> Path:
    """Saves a random model of `family` with a tokenizer in several shards; returns `directory`.

    `peaked`: by `randomise_`, with a loss above that of equal probabilities; else transformers' initial weights.
    `overrides` go to the config (`tie_word_embeddings=True`, `num_hidden_layers=5`, ...).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    key = repr((family, seed, dtype, max_shard_size, peaked, sorted(overrides.items())))
    if key not in MADE:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: Any = model_class(family)(make_config(family, **overrides))
        if peaked:
            randomise_(model, seed)
        with tempfile.TemporaryDirectory() as place:
            model.to(dtype).save_pretrained(place, max_shard_size=max_shard_size)
            make_tokenizer(model.config.vocab_size).save_pretrained(place)
            MADE[key] = {path.name: path.read_bytes() for path in Path(place).iterdir()}
    for name, content in MADE[key].items():
        (directory / name).write_bytes(content)
    return directory


def randomise_(model: Any, seed: int) -> Any:
    """Draws a model's parameters, in float32.

    Weights are large enough for peaked logits, norms are not 1 and biases not 0, so that nothing is right by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    # Norms of Qwen's hybrids multiply by 1 + weight; twice as much would make their logits sensitive to rounding.
    usual = 0.0 if OWN_FIELDS.get(model.config.get_text_config().model_type) is DELTA else 1.0
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        is_scale = name.endswith("weight") and ("norm" in name or "ln_" in name)
        parameter.data = usual + 0.2 * noise if is_scale else 0.15 * noise
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("correction_bias"):  # of a router
            buffer.data = 0.15 * torch.randn(buffer.shape, generator=generator)
    return model


def read_layer(directory: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer of a checkpoint, by names relative to the layer."""
    tensors = {name: tensor for shard in directory.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def make_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with <s> = 0 (which begins every text) and </s> = 1, trained on generated text."""
    tokenizer = Tokenizer.from_str(_trained_bpe(vocab_size))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@cache
def _trained_bpe(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([story_text(50_000, seed=0)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(tokenizer.to_str())


def write_text(path: str | Path, num_bytes: int = 100_000, seed: int = 0) -> Path:
    """Writes stories of about `num_bytes` bytes, one to a line; returns `path`."""
    path = Path(path)
    path.write_text(story_text(num_bytes, seed), encoding="utf-8")
    return path
