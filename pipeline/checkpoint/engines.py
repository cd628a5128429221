"""What each engine does with a checkpoint, by its forms, its layers' sizes and its rounding: the card's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina import LayersConfig
from lamina.checking_lamina import READER, READER_VERSION
from lamina.configuration_lamina import tensor_parallel_plan
from pipeline.rounding.schemes import FIELD

GGUF_FAMILIES = ("llama", "mistral")  # RMS norms, gated SiLU, no biases, halves rotated
GGUF_ROPE_TYPES = ("default", "linear", "llama3")  # those that scale frequencies and nothing else


def engine_table(config: Mapping[str, Any], cache_share: float) -> str:
    """The lines of a Markdown table. `cache_share`: bytes that transformers caches for a token, over the dense ones."""
    described, rounded = LayersConfig(**config), bool(config.get(FIELD))
    rows = [
        ("engine", "how", "what is saved there"),
        ("---", "---", "---"),
        ("transformers, 5.14 or newer", *_transformers(rounded, cache_share)),
        ("vLLM with `lamina` installed", "`vllm serve PATH`", _own_class(described, rounded)),
        ("vLLM (Transformers backend)", "`vllm serve PATH --trust-remote-code`", _backend(described, rounded)),
    ]
    export, widths = "python -m pipeline.export PATH", mlp_widths(described)
    sizes = zip(widths, (described.layer_shape(i).intermediate_size for i in range(len(widths))), strict=True)
    cut = "channels of MLPs" if any(kept < whole for kept, whole in sizes) else "nothing"
    if not gguf_faults(described):
        codes = "; codes of 8 and 4 bits of what is not factored" if rounded else ""
        rows.append(("llama.cpp", f"`{export} --to gguf FILE`", cut + codes))
    if not described.layer_sizes:
        target = "stock" if len(set(widths)) == 1 else "dense"
        codes = "; codes of what is not factored" if rounded else ""
        saved = "nothing" if target == "dense" else cut + codes
        rows.append(("any other", f"`{export} --to {target} DEST`", saved))
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else "|---|---|---|" for cells in rows)


def _transformers(rounded: bool, cache_share: float) -> tuple[str, str]:
    how = "as above, or `transformers serve --trust-remote-code`"
    cache = f"{1 - cache_share:.0%} of the cache" if cache_share < 1 else "of the cache nothing"
    if not rounded:
        return how, f"weights; {cache}"
    return f"{how}, after `pip install '{READER}>={READER_VERSION}'`", f"on the disk alone: multiplied out; {cache}"


def _own_class(described: LayersConfig, rounded: bool) -> str:
    shapes = [described.layer_shape(layer) for layer in range(described.num_hidden_layers)]
    if any(shape.head_dim != described.head_dim for shape in shapes):
        return "not served: heads of different widths"
    weights = "weights, where vLLM has a kernel for their bits and widths" if rounded else "weights"
    width, head_dim = described.served_value_width(), described.head_dim
    if width > head_dim:
        return f"{weights}; the cache is larger than the dense model's: heads of {width} numbers, not {head_dim}"
    share = (head_dim - width) / (2 * head_dim)
    return f"{weights}; on CUDA {share:.0%} of the cache" if share > 0 else f"{weights}; of the cache nothing"


def _backend(described: LayersConfig, rounded: bool) -> str:
    heads = {"num_attention_heads", "num_key_value_heads", "head_dim"}
    if any(heads & {*sizes} for sizes in described.layer_sizes):
        return "not served: heads that differ by layer"
    if described.widest_value() > described.head_dim:
        return "not served: values of more numbers than keys"
    weights = "weights; an error where vLLM has no kernel for their bits and widths" if rounded else "weights"
    return f"{weights}; of the cache nothing" + ("" if tensor_parallel_plan(described) else "; one device")


def mlp_widths(described: LayersConfig) -> list[int]:
    """The channels that the MLP of each layer has, before it is factored."""
    forms = (described.form_of(layer, "up") for layer in range(described.num_hidden_layers))
    return [form.inner_width(described.layer_shape(layer), spec) for layer, (form, spec) in enumerate(forms)]


def gguf_faults(described: LayersConfig) -> list[str]:
    """What llama.cpp's architectures `llama` and `deci` have no place for."""
    family, rope = described.source_model_type, described.rope_parameters or {}
    faults = [f"a {family} model; known are {', '.join(GGUF_FAMILIES)}"] if family not in GGUF_FAMILIES else []
    if described.block["biases"]:
        faults.append(f"biases on {', '.join(described.block['biases'])}")
    if any(described.layer_sizes):
        faults.append("layers of different sizes (layer_sizes)")
    if "sliding_attention" in described.layer_types:
        faults.append("a sliding window, which both forget")
    if rope.get("rope_type") not in GGUF_ROPE_TYPES:
        faults.append(f"rope_type {rope.get('rope_type')}; known are {', '.join(GGUF_ROPE_TYPES)}")
    return faults
