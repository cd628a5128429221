"""Qwen's hybrids: gated delta networks (arXiv 2412.06464) in most layers, attention with gated outputs in the others.

Both are copied, and run by transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lamina.foreign_lamina import DELTA_FIELDS
from pipeline.families.blocks import Copied
from pipeline.families.foreign import ForeignBlock, ForeignFamily, size_faults, switch_faults
from pipeline.families.llama import BLOCK, MODULES

LINEAR, FULL = "linear_attention", "full_attention"
PATHS = {LINEAR: "linear_attn", FULL: "self_attn"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
Widths = tuple[int, int, int]  # of all keys, of all values, heads of values
ReaderShapes = Callable[[Widths], dict[str, int]]


def readers_of_next(widths: Widths) -> dict[str, int]:
    """Return the outputs of Qwen3-Next's matrices that read the layer's input."""
    keys, values, heads = widths
    return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}


def readers_apart(widths: Widths) -> dict[str, int]:
    """Return the outputs of Qwen3.5's matrices that read the layer's input."""
    keys, values, heads = widths
    return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}


def hybrid_modules(readers: ReaderShapes) -> dict[str, str]:
    """Map the roles of a layer of either type, with a dense MLP, to their paths."""
    inside = [*readers((1, 1, 1)), "conv1d", "norm", "out_proj"]
    modules = {f"{LINEAR}.{name}": f"{PATHS[LINEAR]}.{name}" for name in inside}
    modules[f"{LINEAR}.decay"] = PATHS[LINEAR]
    modules |= {f"{FULL}.{name}": f"{PATHS[FULL]}.{name}" for name in (*PROJECTIONS, "q_norm", "k_norm")}
    own = {role: path for role, path in MODULES.items() if role not in ("q", "k", "v", "o")}
    return {"input_norm": own.pop("input_norm"), **modules, **own}


def hybrid_block(readers: ReaderShapes) -> dict[str, Any]:
    """Return the block of a family of hybrids."""
    return BLOCK | {
        "modules": hybrid_modules(readers),
        "biases": {f"{FULL}.{name}": "attention_bias" for name in PROJECTIONS},
        "foreign": PATHS,
        "norm_offset": 1.0,
    }


def delta_family(model_type: str, readers: ReaderShapes) -> ForeignFamily:
    """Return the foreign attention of a family."""
    layers: dict[str, Callable[[Mapping[str, Any]], ForeignBlock]] = {
        LINEAR: partial(_delta_network, readers=readers),
        FULL: _gated_attention,
    }
    return ForeignFamily(model_type, None, "", _faults, layers)


def _delta_network(sizes: Mapping[str, Any], readers: ReaderShapes) -> ForeignBlock:
    """Return a gated delta network, which has a state (key width, value width) for each value head."""
    heads, hidden = sizes["linear_num_value_heads"], sizes["hidden_size"]
    keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    values = heads * sizes["linear_value_head_dim"]
    channels = 2 * keys + values
    shapes: dict[str, tuple[int, ...]] = {name: (rows, hidden) for name, rows in readers((keys, values, heads)).items()}
    shapes |= {
        "conv1d": (channels, 1, sizes["linear_conv_kernel_dim"]),
        "norm": (sizes["linear_value_head_dim"],),
        "out_proj": (hidden, values),
    }
    copied = [Copied(f"{LINEAR}.{name}", (("weight", shape),)) for name, shape in shapes.items()]
    copied.append(Copied(f"{LINEAR}.decay", (("A_log", (heads,)), ("dt_bias", (heads,)))))
    return ForeignBlock(None, tuple(copied), (), heads, channels, 0)


def _gated_attention(sizes: Mapping[str, Any]) -> ForeignBlock:
    """Return grouped attention whose query matrix also computes a gate for each number of the heads' outputs."""
    head_dim, hidden = sizes["head_dim"], sizes["hidden_size"]
    queries, keys = (sizes[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"q_proj": (2 * queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes["o_proj"] = (hidden, queries)
    biased = sizes["attention_bias"]
    copied = [
        Copied(f"{FULL}.{name}", (("weight", shape), *([("bias", shape[:1])] if biased else [])))
        for name, shape in shapes.items()
    ]
    norms = ("q_norm", "k_norm")
    copied += [Copied(f"{FULL}.{name}", (("weight", (head_dim,)),)) for name in norms]
    scores = tuple(f"{FULL}.{name}" for name in norms)
    return ForeignBlock(None, tuple(copied), scores, sizes["num_attention_heads"], 2 * queries, 2 * keys)


def _faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module can be built."""
    sizes = {name: fields[name] for name in DELTA_FIELDS if name != "attention_bias"}
    faults = size_faults(sizes, sizes)
    if not faults and sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        faults.append(
            f"linear_num_value_heads: {sizes['linear_num_value_heads']} is not a multiple of linear_num_key_heads: "
            f"{sizes['linear_num_key_heads']}"
        )
    return faults + switch_faults(fields, ["attention_bias"])
