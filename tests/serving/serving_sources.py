"""Creates tiny source models of several families, and their descriptions for lamina.

The block dictionaries are written out here on purpose: the pipeline has its own family data, which these tests must
not share.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lamina import LaminaConfig, LaminaForCausalLM

LLAMA_MODULES = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
LLAMA_BLOCK: dict[str, Any] = {
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "final_norm": "model.norm",
    "head": "lm_head",
    "head_bias": False,
    "modules": LLAMA_MODULES,
    "biases": [],
    "norm": "rms",
    "rotary": "half",
    "positions": None,
    "parallel": False,
}
QWEN3_MODULES = {**LLAMA_MODULES, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
OPT_BLOCK: dict[str, Any] = {
    "embed": "model.decoder.embed_tokens",
    "layers": "model.decoder.layers",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "head_bias": False,
    "modules": {
        "input_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
    "biases": ["q", "k", "v", "o", "up", "down"],
    "norm": "layer",
    "rotary": None,
    "positions": {"module": "model.decoder.embed_positions", "offset": 2},
    "parallel": False,
}
GPTJ_BLOCK: dict[str, Any] = {
    "embed": "transformer.wte",
    "layers": "transformer.h",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "head_bias": True,
    "modules": {
        "input_norm": "ln_1",
        "q": "attn.q_proj",
        "k": "attn.k_proj",
        "v": "attn.v_proj",
        "o": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
    "biases": ["up", "down"],
    "norm": "layer",
    "rotary": "interleaved",
    "positions": None,
    "parallel": True,
}
OUTPUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
GEMMA2_BLOCK: dict[str, Any] = {
    **LLAMA_BLOCK,
    "modules": {**LLAMA_MODULES, **OUTPUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"},
    "embed_scale": "sqrt(hidden_size)",
    "norm_offset": 1.0,
    "query_scalar": 20,
    "attention_softcap": 2.0,
    "logit_softcap": 3.0,
}
OLMO3_BLOCK: dict[str, Any] = {
    **LLAMA_BLOCK,
    "modules": {
        **{role: path for role, path in QWEN3_MODULES.items() if role not in ("input_norm", "mlp_norm")},
        **OUTPUT_NORMS,
    },
    "head_norms": "all",
}
GRANITE = {"embed_scale": 3.0, "attention_scale": 0.2, "residual_scale": 0.4, "logit_divisor": 3.0}
COHERE2_BLOCK: dict[str, Any] = {
    **LLAMA_BLOCK,
    "modules": {role: path for role, path in LLAMA_MODULES.items() if role != "mlp_norm"},
    "norm": "layer",
    "norm_bias": False,
    "rotary": "interleaved",
    "rotary_layers": "sliding_attention",
    "parallel": True,
    "logit_scale": 0.5,
}
BLOCKS = {
    "llama": LLAMA_BLOCK,
    "mistral": LLAMA_BLOCK,
    "qwen2": {**LLAMA_BLOCK, "biases": ["q", "k", "v"]},
    "qwen3": {**LLAMA_BLOCK, "modules": QWEN3_MODULES},
    "gemma": {**LLAMA_BLOCK, "embed_scale": "sqrt(hidden_size)", "norm_offset": 1.0},
    "gemma2": GEMMA2_BLOCK,
    "olmo3": OLMO3_BLOCK,
    "granite": {**LLAMA_BLOCK, **GRANITE},
    "cohere2": COHERE2_BLOCK,
    "opt": OPT_BLOCK,
    "gptj": GPTJ_BLOCK,
}

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}


def _source_config(name: str) -> PreTrainedConfig:
    """Return a tiny config; head_dim is 12 if a family lets it differ from hidden/heads = 8."""
    llama = {**SMALL, "num_key_value_heads": 3, "head_dim": 12}
    configs: dict[str, Any] = {
        "llama-gqa": lambda: LlamaConfig(**llama),
        "llama-mha": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 6}),
        "llama-mqa-tied": lambda: LlamaConfig(**{**llama, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        "llama-llama3-rope": lambda: LlamaConfig(**llama, rope_parameters=LLAMA3),
        "llama-yarn-rope": lambda: LlamaConfig(
            **llama,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
            },
        ),
        "mistral-window": lambda: MistralConfig(**llama, sliding_window=5),
        "qwen2-tied": lambda: Qwen2Config(**{**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
        "qwen2-mixed-window": lambda: Qwen2Config(
            **{**SMALL, "num_key_value_heads": 2}, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "qwen3": lambda: Qwen3Config(**llama),
        "gemma-tied": lambda: GemmaConfig(**llama),
        "gemma2-tied": lambda: Gemma2Config(
            **{**llama, "attn_implementation": "eager"}, sliding_window=5, query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        ),
        "olmo3": lambda: Olmo3Config(
            **{**SMALL, "num_key_value_heads": 3}, sliding_window=5, layer_types=TYPES, rope_parameters=ROPES
        ),
        "granite": lambda: GraniteConfig(
            **{**SMALL, "num_key_value_heads": 3}, embedding_multiplier=3.0, attention_multiplier=0.2,
            residual_multiplier=0.4, logits_scaling=3.0,
        ),
        "cohere2": lambda: Cohere2Config(
            **{**SMALL, "num_key_value_heads": 3}, sliding_window=5, layer_types=TYPES, logit_scale=0.5
        ),
        "opt-tied": lambda: OPTConfig(**{**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.0}),
        "gptj": lambda: GPTJConfig(
            vocab_size=97, n_embd=48, n_inner=80, n_layer=3, n_head=6, n_positions=128, rotary_dim=4,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ),
    }  # fmt: skip
    config: PreTrainedConfig = configs[name]()
    return config


SOURCES = (
    "llama-gqa", "llama-mha", "llama-mqa-tied", "llama-llama3-rope", "llama-yarn-rope", "mistral-window", "qwen2-tied",
    "qwen2-mixed-window", "qwen3", "gemma-tied", "opt-tied", "gptj", "gemma2-tied", "olmo3", "granite", "cohere2",
)  # fmt: skip
CLASSES: dict[str, Any] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "gemma": GemmaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "olmo3": Olmo3ForCausalLM,
    "granite": GraniteForCausalLM,
    "cohere2": Cohere2ForCausalLM,
    "opt": OPTForCausalLM,
    "gptj": GPTJForCausalLM,
}


def make_source(name: str, seed: int = 0) -> Any:
    """Return a random float32 model; every parameter, norms and biases included, differs from its initial value.

    The state of torch's generator then depends on the arguments alone.
    """
    model, state = _made_source(name, seed)
    torch.set_rng_state(state)
    return deepcopy(model)


@cache
def _made_source(name: str, seed: int) -> tuple[Any, torch.Tensor]:
    """Return the model, which takes longer to make than to copy, and the generator's state behind it."""
    torch.manual_seed(seed)
    config = _source_config(name)
    model = CLASSES[config.model_type](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, torch.get_rng_state()


def describe(source: PreTrainedConfig, forms: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the config.json fields of lamina for a source model."""
    get: Any = source.to_dict().get
    kind, heads = source.model_type, get("num_attention_heads") or get("n_head")
    hidden = get("hidden_size") or get("n_embd")
    head_dim = get("head_dim") or hidden // heads
    rope = get("rope_parameters")
    if kind == "gptj":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": get("rotary_dim") / head_dim}
    return {
        "model_type": "lamina",
        "architectures": ["LaminaForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_lamina.LaminaConfig",
            "AutoModel": "modeling_lamina.LaminaModel",
            "AutoModelForCausalLM": "modeling_lamina.LaminaForCausalLM",
        },
        "source_model_type": kind,
        "vocab_size": get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get("intermediate_size") or get("ffn_dim") or get("n_inner"),
        "num_hidden_layers": get("num_hidden_layers") or get("n_layer"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": get("max_position_embeddings") or get("n_positions"),
        "rope_parameters": rope,
        "norm_eps": get("rms_norm_eps") or get("layer_norm_epsilon") or get("layer_norm_eps") or 1e-5,
        "hidden_act": get("hidden_act") or get("hidden_activation") or get("activation_function"),
        "tie_word_embeddings": get("tie_word_embeddings"),
        "dtype": "float32",
        "bos_token_id": get("bos_token_id"),
        "eos_token_id": get("eos_token_id"),
        "pad_token_id": get("pad_token_id"),
        "sliding_window": get("sliding_window"),
        "layer_types": get("layer_types"),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "block": BLOCKS[kind],
        "forms": forms or [{} for _ in range(get("num_hidden_layers") or get("n_layer"))],
    }


def build(
    source: PreTrainedConfig, tensors: dict[str, torch.Tensor], forms: list[dict[str, Any]] | None = None, **fields: Any
) -> Any:
    """Return the lamina model of a source's description and `fields`, with these tensors, loaded strictly."""
    config = LaminaConfig(**describe(source, forms), **fields)
    model: Any = LaminaForCausalLM(config)
    model.eval().set_attn_implementation("sdpa")
    model.load_state_dict(tensors, strict=True)
    return model


def layer_prefix(source: PreTrainedConfig, layer_idx: int) -> str:
    return f"{BLOCKS[source.model_type]['layers']}.{layer_idx}."


def role_name(source: PreTrainedConfig, layer_idx: int, role: str) -> str:
    path: str = BLOCKS[source.model_type]["modules"][role]
    return layer_prefix(source, layer_idx) + path


def padded_batch(num_tokens: int = 14, vocab: int = 97, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three left-padded sequences of unequal length: ids and attention mask, each (3, num_tokens)."""
    ids = torch.randint(3, vocab, (3, num_tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 8)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask
