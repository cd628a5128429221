"""Checks whether DeepSeek's class with dense MLPs can describe a model whose attention becomes latent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.families.dense import BLOCK

LATENT_FORM = "mla"
ACTIVATION = "silu"
ROPE_TYPES = ("default", "llama3")
# Keys of the block in which models may differ from the class -> the property's name in messages.
DIFFERENCES = {
    "positions": "learned positions",
    "parallel": "attention and MLP side by side",
    "embed_scale": "scaled embeddings",
    "norm_offset": "norms with an offset",
    "rotary_layers": "layers without rotation",
    "query_scalar": "a scale of scores of its own",
    "attention_scale": "a scale of scores of its own",
    "attention_softcap": "soft-capped scores",
    "residual_scale": "scaled residuals",
    "logit_scale": "scaled logits",
    "logit_divisor": "scaled logits",
    "logit_softcap": "soft-capped logits",
    "head_bias": "a head with a bias",
}


def latent_class_faults(standard: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the properties of a model that DeepSeek's class with latent attention and dense MLPs cannot express."""
    return tuple(dict.fromkeys(_faults(standard))) or tuple(_name_faults(standard["block"]))


def _name_faults(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield modules that Llama, whose names the class has, lacks or names differently."""
    modules, known = block["modules"], BLOCK["modules"]
    if further := [role for role in modules if role not in known]:
        yield f"further modules: {', '.join(further)}"
    renamed = [role for role, path in known.items() if modules.get(role) != path]
    renamed += [key for key in ("embed", "layers", "final_norm", "head") if block[key] != BLOCK[key]]
    if renamed:
        yield f"other names of {', '.join(renamed)}"


def _faults(standard: Mapping[str, Any]) -> Iterator[str]:
    block, modules = standard["block"], standard["block"]["modules"]
    if standard.get("foreign"):
        yield "attention that is latent already"
        return
    if any((standard.get("mixture") or {}).get("layers", ())):
        yield "mixtures of experts"
    if block["rotary"] is None:
        yield "no rotation"
    elif block["rotary"] != "half":
        yield "rotation of neighbouring dimensions"
    else:
        yield from _rope_faults(standard["rope_parameters"], standard["head_dim"])
    if block["norm"] != "rms":
        yield "LayerNorms"
    if {"q_norm", "k_norm"} & {*modules}:
        yield "norms of queries and keys"
    if {"attention_out_norm", "mlp_out_norm"} & {*modules}:
        yield "norms behind attention and MLP"
    if "gate" not in modules:
        yield "MLPs without a gate"
    elif standard["hidden_act"] not in (ACTIVATION, "swish"):
        yield f"the activation {standard['hidden_act']}"
    if block["biases"]:
        yield f"biases of {', '.join(block['biases'])}"
    if standard["sliding_window"] is not None:
        yield "sliding windows"
    if standard.get("layer_sizes"):
        yield "layers of different sizes"
    for key, difference in DIFFERENCES.items():
        if block.get(key):
            yield difference


def _rope_faults(rope: Mapping[str, Any] | None, head_dim: int) -> Iterator[str]:
    kind = (rope or {}).get("rope_type")
    if kind not in ROPE_TYPES:
        yield f"rotation of type {kind}" if kind else "a rotation for each type of layer"
    elif (rope or {}).get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial rotation"
    if head_dim % 2:
        yield "heads of an odd width"


def rope_frequencies(standard: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the angle per position of each pair of a head's dimensions; empty if there are `latent_class_faults`."""
    if latent_class_faults(standard):
        return ()
    rope, width = standard["rope_parameters"], standard["head_dim"]
    plain = (rope["rope_theta"] ** (-2 * pair / width) for pair in range(width // 2))
    return tuple(plain) if rope["rope_type"] == "default" else tuple(_llama3(plain, rope))


def _llama3(frequencies: Iterable[float], rope: Mapping[str, Any]) -> Iterator[float]:
    """Scale low frequencies as Llama 3.1 does."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    for frequency in frequencies:
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield frequency * (share + (1.0 - share) / factor)


def plain_pairs(frequencies: Iterable[float]) -> int:
    """Count the leading frequencies that are powers of one base, as the class requires."""
    angles = [*frequencies]
    ratio = angles[1] if len(angles) > 1 else 1.0
    return next(
        (at for at, angle in enumerate(angles) if not math.isclose(angle, ratio**at, rel_tol=1e-6)), len(angles)
    )
