"""What a decoder layer of the source family is: its modules, and the sizes of one layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED_ROLES = ("input_norm", "q", "k", "v", "o", "up", "down")
OPTIONAL_ROLES = ("q_norm", "k_norm", "mlp_norm", "gate")
ATTENTION_ROLES = ("q", "k", "v", "o", "q_norm", "k_norm")
LINEAR_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
QKVO_ROLES = ("q", "k", "v", "o")
MLP_ROLES = ("gate", "up", "down")
ROWWISE_ROLES = ("o", "down")

# What `block` is when config.json does not say: pre-norm, gated MLP, rotary.
DEFAULT_BLOCK: dict[str, Any] = {
    "embed": "model.embed_tokens", "layers": "model.layers", "final_norm": "model.norm", "head": "lm_head",
    "modules": {
        "input_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    "norm": "rms", "rotary": "half",
}  # fmt: skip
BLOCK_DEFAULTS: dict[str, Any] = {"head_bias": False, "biases": [], "positions": None, "parallel": False}


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one decoder layer and the modules of its roles: all that a stored form must know of it.

    `modules` maps a role to its module path inside the layer; `biases` are the roles whose projection has a bias.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    modules: Mapping[str, str]
    biases: frozenset[str]
    core_format: str = "dense"


def attention_path(modules: Mapping[str, str]) -> str:
    """The deepest module that holds q, k, v, o and their norms: `self_attn`."""
    return _common_parent([modules[r] for r in ATTENTION_ROLES if r in modules])


def mlp_path(modules: Mapping[str, str]) -> str:
    """The deepest module that holds gate, up and down: `mlp`; `mlp_factors` where they lie in the layer itself."""
    return mlp_parent(modules) or "mlp_factors"


def mlp_parent(modules: Mapping[str, str]) -> str:
    """The deepest module that holds gate, up and down: `mlp`; empty where they lie in the layer itself."""
    return _common_parent([modules[r] for r in MLP_ROLES if r in modules])


def _common_parent(paths: list[str]) -> str:
    parents = [path.split(".")[:-1] for path in paths]
    depth = 0
    while all(len(p) > depth and p[depth] == parents[0][depth] for p in parents):
        depth += 1
    return ".".join(parents[0][:depth])


def in_base(path: str) -> str:
    """`model.layers` → `layers`: the path inside the base model."""
    return path.partition(".")[2]
