"""Random small models of every family, by number: odd geometries, dtypes and file layouts. Built by transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from tests.factories import EXPERTS, FAMILIES, model_class

TOKENIZER_SIZE = 261
BOS, EOS = 0, 1
UNGATED = {"opt", "gptj", "gpt_neox", "falcon", "starcoder2"}  # families whose MLP has no gate
INNER = (  # the widths of MLPs and experts, by family
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
CHOSEN = ("num_experts_per_tok", "moe_topk")  # experts of a token, by family
FILES = "files"  # the names of tensors that `save_pretrained` writes
DTYPES = ("float32", "float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "silu", "silu", "gelu", "relu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu")
ROPE_TYPES = ("default", "default", "default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class ModelSpec:
    """A source checkpoint.

    Attributes:
        config: fields of the family's config.
        dtype: of matrices.
        float_vectors: biases and norms are float32 whatever `dtype` is.
        shard_size: of a file, as `save_pretrained` takes it.
        tokenizer: a key of `pair_writing.TOKENIZERS`.
        naming: of the tensors, a key of `tests.renamed_models.RENAMED`, or FILES.
        skewed: routers leave experts with few tokens, or with none.
        encoded: the format of `tests.encoders` in which linears are stored; empty for none.
        fields: further fields of config.json.
        refused: a word in the message that refuses the model; empty for a model that may be taken.
    """

    family: str
    config: dict[str, Any]
    dtype: str
    float_vectors: bool
    shard_size: str
    seed: int
    tokenizer: str = "bos"
    naming: str = FILES
    skewed: bool = False
    encoded: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def gated(self) -> bool:
        """True if MLPs have a gate."""
        return self.family not in UNGATED

    @property
    def grouped(self) -> bool:
        """True if every width that a projection reads is a multiple of 32."""
        return not any(size % 32 for size in self._widths)

    @property
    def width(self) -> int:
        """The most numbers that a projection reads."""
        return max(self._widths)

    @property
    def _widths(self) -> list[int]:
        hidden, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        inner = [width for name in INNER if (width := self.config.get(name))] or [4 * hidden]
        return [width for width in (hidden, heads * self.config.get("head_dim", 0), *inner) if width]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def is_mixture(self) -> bool:
        """True if layers have experts."""
        return self.family in EXPERTS

    @property
    def chosen_experts(self) -> int:
        """The number of experts that a token passes."""
        return int(next(self.config[name] for name in CHOSEN if name in self.config))

    def build(self) -> Any:
        """Build the model, on the default device."""
        built = model_class(self.family)
        return built(built.config_class(**self.config))


def draw_model(random: Random) -> ModelSpec:
    """Draw a model that transformers can build."""
    while True:
        family = random.choice(tuple(FAMILIES))
        config, dtype, float_vectors = _config(family, random), random.choice(DTYPES), random.random() < 0.25
        shard_size, seed = random.choice(("20KB", "5GB")), random.randrange(2**31)
        spec = ModelSpec(family, config, dtype, float_vectors, shard_size, seed)
        if builds(spec):
            return spec


def builds(spec: ModelSpec) -> bool:
    """Return True if transformers builds the model."""
    try:
        with torch.device("meta"):
            spec.build()
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, ZeroDivisionError, StrictDataclassError):
        return False
    return True


def _config(family: str, random: Random) -> dict[str, Any]:
    """Draw fields under the family's names; a third have sizes that scales of 32 columns fit."""
    if random.random() < 0.33:
        sizes = {"heads": random.choice((2, 4)), "head_dim": 16, "hidden": 32 * random.randint(1, 2), "inner": 96}
        return _fields(family, random, **sizes)
    heads = random.choice((1, 2, 2, 3, 4, 4, 6))
    head_dim = random.choice((4, 6, 8, 8, 10, 12, 16))
    hidden = heads * max(1, random.choice((16, 24, 33, 40, 48, 64)) // heads)
    return _fields(family, random, heads, head_dim, hidden, random.choice((5, 13, 24, 37, 48, 64, 80, 96)))


def _fields(family: str, random: Random, heads: int, head_dim: int, hidden: int, inner: int) -> dict[str, Any]:
    kv_heads = random.choice([count for count in range(1, heads + 1) if heads % count == 0])
    config: dict[str, Any] = {
        "vocab_size": random.choice((TOKENIZER_SIZE, 263, 288, 301, 320)),
        "hidden_size": hidden,
        "num_hidden_layers": random.choice((1, 2, 2, 3, 4)),
        "num_attention_heads": heads,
        "max_position_embeddings": random.choice((20, 24, 33, 64, 128)),
        "tie_word_embeddings": random.random() < 0.4,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    if family == "opt":
        return config | _opt_fields(random, heads * head_dim, inner)
    if family == "gptj":
        return config | _gptj_fields(random, heads, head_dim, inner)
    if family == "falcon":
        return config | _falcon_fields(random, heads, kv_heads, head_dim, inner)
    config |= {
        "intermediate_size": inner,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads if family == "gpt_neox" else head_dim,
        "hidden_act": random.choice(ACTIVATIONS),
        "rms_norm_eps": random.choice((1e-6, 1e-5, 1e-2)),
        "rope_parameters": _rope(random, head_dim, config["max_position_embeddings"]),
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = random.random() < 0.3
    if family == "llama":
        config["mlp_bias"] = random.random() < 0.3
    if family == "mistral":
        config["sliding_window"] = random.choice((None, 3, 8, 4096))
    if family in ("qwen2", "qwen3") and random.random() < 0.6:
        config |= _window_fields(random, config["num_hidden_layers"])
    return config


def _window_fields(random: Random, layers: int) -> dict[str, Any]:
    fields = {"use_sliding_window": random.random() < 0.8, "sliding_window": random.choice((3, 6, 4096))}
    if random.random() < 0.4:
        kinds = ("full_attention", "sliding_attention")
        return fields | {"layer_types": [random.choice(kinds) for _ in range(layers)]}
    return fields | {"max_window_layers": random.randrange(layers + 1)}


def _opt_fields(random: Random, hidden: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "ffn_dim": inner,
        "word_embed_proj_dim": random.choice((*[hidden] * 14, 12)),
        "do_layer_norm_before": random.random() < 0.95,
        "enable_bias": random.random() < 0.8,
        "layer_norm_elementwise_affine": random.random() < 0.95,
        "activation_function": random.choice(("relu", "relu", "gelu", "silu")),
        "dropout": 0.0,
    }


def _gptj_fields(random: Random, heads: int, head_dim: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": heads * head_dim,
        "n_inner": random.choice((inner, inner, None)),
        "rotary_dim": random.choice([size for size in (2, 4, 6, head_dim) if size <= head_dim]),
        "activation_function": random.choice(("gelu_new", "gelu_new", "gelu", "relu")),
        "layer_norm_epsilon": random.choice((1e-5, 1e-3)),
        "tie_word_embeddings": random.random() < 0.15,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _falcon_fields(random: Random, heads: int, kv_heads: int, head_dim: int, inner: int) -> dict[str, Any]:
    """Draw the fields of its three kinds of layers; a draw with alibi is refused."""
    return {
        "hidden_size": heads * head_dim,
        "ffn_hidden_size": inner,
        "new_decoder_architecture": random.random() < 0.5,
        "num_kv_heads": kv_heads,
        "multi_query": random.random() < 0.5,
        "parallel_attn": random.random() < 0.7,
        "num_ln_in_parallel_attn": random.choice((None, 1, 2)),
        "bias": random.random() < 0.4,
        "alibi": random.random() < 0.05,
        "activation": random.choice(("gelu", "gelu", "relu", "silu")),
        "layer_norm_epsilon": random.choice((1e-5, 1e-3)),
        "rope_parameters": _rope(random, head_dim, random.choice((32, 64))),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _rope(random: Random, head_dim: int, positions: int) -> dict[str, Any]:
    kind = random.choice(ROPE_TYPES)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": random.choice((100.0, 10000.0, 500000.0))}
    if kind != "default":
        rope["factor"] = random.choice((1.5, 2.0, 8.0))
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = max(17, positions // 2)
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        for name, spread in (("short_factor", 1.0), ("long_factor", 8.0)):
            rope[name] = [round(1 + random.random() * spread, 3) for _ in range(head_dim // 2)]
    if kind == "default" and head_dim % 4 == 0 and random.random() < 0.03:
        rope["partial_rotary_factor"] = 0.5
    return rope
