"""The parts of a model that vLLM does not compute as transformers does."""

from typing import Any

from .block_lamina import (
    BACKEND_LACKS,
    BLOCK_DEFAULTS,
    MLP_ROLES,
    OUTPUT_NORM_ROLES,
    SINKS,
    VLLM_LACKS,
    clamp_of,
)
from .layers_config_lamina import LayersConfig
from .mixture_lamina import SHARED

WHOLE_FORMS = ("dense", "pruned")  # of the experts that a fused kernel takes


def vllm_lacks(config: LayersConfig, own_class: bool) -> str | None:
    """Name what vLLM would not compute of a model, in Lamina's class for vLLM or in its Transformers backend."""
    block = config.block
    lacking = [key for key in (VLLM_LACKS if own_class else BACKEND_LACKS) if block[key] != BLOCK_DEFAULTS[key]]
    lacking += ["attention sinks"] if SINKS in block["modules"] else []
    if own_class:
        lacking += [role for role in OUTPUT_NORM_ROLES if role in block["modules"]]
        lacking += ["a rotation for each layer type"] if config.has_own_ropes() else []
    if config.stored_formats and not own_class:
        lacking += ["weights in stored formats of the source"]
    elif config.stored_formats and getattr(config, "quantization_config", None):
        lacking += ["weights in stored formats of the source beside rounded ones"]
    return ", ".join(lacking) or None


def fused_width(config: LayersConfig, layer: int) -> int | None:
    """Return the width of a layer's routed experts if a fused kernel takes them: whole matrices of one width."""
    if config.mixture is None or config.mixture["biases"] or clamp_of(config.block):
        return None
    widths = set()
    for block in (block for block in config.mlp_blocks(layer) if block not in ("", SHARED)):
        forms = {role: config.form_of(layer, f"{block}.{role}") for role in MLP_ROLES}
        if any(spec["form"] not in WHOLE_FORMS for _, spec in forms.values()):
            return None
        form, spec = forms["up"]
        widths.add(form.inner_width(config.layer_shape(layer, block), spec))
    return widths.pop() if len(widths) == 1 else None


def unlike_experts(config: LayersConfig) -> list[int]:
    """Return the layers whose experts no fused kernel takes."""
    mixtures = (layer for layer in range(config.num_hidden_layers) if config.layer_mixture(layer) is not None)
    return [layer for layer in mixtures if fused_width(config, layer) is None]


def foreign_rotation(config: LayersConfig) -> str | None:
    """Explain how vLLM's rotation would differ from transformers'; None if it does not."""
    faults = (_foreign_rope(config.rope_of(layer_type)) for layer_type in dict.fromkeys(config.layer_types))
    return next(filter(None, faults), None)


def _foreign_rope(rope: dict[str, Any]) -> str | None:
    if rope.get("rope_type") == "longrope":
        return "rope_type longrope: vLLM chooses factors by the longest sequence that it may serve"
    if rope.get("rope_type") == "proportional" and rope.get("factor", 1.0) != 1.0:
        return f"rope_type proportional: vLLM ignores its factor {rope['factor']:g}"
    return None
