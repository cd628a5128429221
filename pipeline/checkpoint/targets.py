"""What each export cannot say of a checkpoint: one answer for the command, which refuses, and for the model card.

`dense` and `stock` write a config.json of the source's family, which is read back and compared with what it should say
(`pipeline.families.source_config`). A GGUF file says what llama.cpp's architectures `llama` and `deci` read: FIELDS and
BLOCK name every field of a checkpoint's config with what becomes of it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lamina import LayersConfig
from manifests.errors import InputError
from pipeline.families.registry import geometry_of
from pipeline.families.source_config import source_config
from pipeline.rounding.schemes import rounded_modules

Target = Literal["dense", "stock", "gguf"]
TARGETS: tuple[Target, ...] = ("dense", "stock", "gguf")
FAMILIES = ("llama", "mistral")  # whose sources llama.cpp's `llama` was made for
ROPE_TYPES = ("default", "linear", "llama3")  # those that scale frequencies and nothing else
ACTIVATIONS = ("silu", "swish")  # of the gated MLP: two names of one function
DTYPES = ("float32", "bfloat16", "float16")
ROLES = ("input_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")  # that a layer of both has, and no other

Rule = Callable[[LayersConfig], str | None]


def export_faults(config: Mapping[str, Any], target: Target) -> list[str]:
    """What of a checkpoint with this config.json the target has no place for; empty where it is exported whole."""
    described = LayersConfig(**config)
    faults = _value_faults(config, described)
    if target == "gguf":
        return gguf_faults(described) + faults
    width = config["intermediate_size"]
    if target == "stock":
        widths = mlp_widths(described)
        width = widths[0]
        faults += _width_faults(config, widths)
    try:
        written_config(config, width)
    except InputError as error:
        faults.append(str(error))
    return faults


def refuse_faults(config: Mapping[str, Any], target: Target) -> None:
    """Raises InputError with all of `export_faults`, and the targets that have none."""
    if not (faults := export_faults(config, target)):
        return
    others = [f"--to {other}" for other in TARGETS if other != target and not export_faults(config, other)]
    remedy = f"; what it can be: {', '.join(others)}" if others else ""
    if target == "gguf":
        said = f"llama.cpp's architectures llama and deci have no place for {'; for '.join(faults)}"
    else:
        said = "; ".join(faults)
    raise InputError(f"--to {target}: {said}{remedy}")


def written_config(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """config.json of the dense model with MLPs of this width. Raises InputError where the family's cannot say it."""
    return source_config({**config, "intermediate_size": width}, config["dtype"])


def mlp_widths(described: LayersConfig) -> list[int]:
    """The channels that the MLP of each layer has, before it is factored."""
    forms = (described.form_of(layer, "up") for layer in range(described.num_hidden_layers))
    return [form.inner_width(described.layer_shape(layer), spec) for layer, (form, spec) in enumerate(forms)]


def gguf_faults(described: LayersConfig) -> list[str]:
    """What llama.cpp's architectures `llama` and `deci` have no place for."""
    return [fault for rule in (*FIELDS.values(), *BLOCK.values()) if (fault := rule(described))]


def _width_faults(config: Mapping[str, Any], widths: list[int]) -> list[str]:
    if len(set(widths)) == 1:
        return []
    return [
        f"the layers' MLPs are {min(widths)} to {max(widths)} wide, and an ordinary {config['source_model_type']} "
        "model has one width; compress with {method: flat_llm, uniform: true}, with `allocation: loss`, too, or with "
        "ranks: {mlp: WIDTH} in its entry; --to dense fills up with zeros"
    ]


def _value_faults(config: Mapping[str, Any], described: LayersConfig) -> list[str]:
    """Value heads that are no product of dense ones, as far as forms and rounding show it."""
    faults, geometry = [], geometry_of(config)
    for layer in geometry.layers:
        form, spec = described.form_of(layer.index, "v")
        width = form.head_width(described.layer_shape(layer.index), spec)
        value, output = layer.attention.value_output
        if width > layer.attention.head_dim and rounded_modules(config, [layer.path(output.role)]):
            faults.append(
                f"layer {layer.index}: values of {width} numbers a head, of which o is rounded: no dense model with "
                f"heads of {layer.attention.head_dim} numbers does the same"
            )
        if spec.get("absorbed") and value.bias and not output.bias:
            faults.append(f"layer {layer.index}: the bias of v went into o, which has none in a dense model")
    return faults


def _in_file(_: LayersConfig) -> None:
    """The file has a key or a tensor for it."""


def _harmless(_: LayersConfig) -> None:
    """Left out: it changes no logits."""


def _one_of(name: str, known: tuple[Any, ...]) -> Rule:
    def fault(described: LayersConfig) -> str | None:
        value = getattr(described, name)
        return None if value in known else f"{name} {value}; known are {', '.join(map(str, known))}"

    return fault


def _family(described: LayersConfig) -> str | None:
    family = described.source_model_type
    return None if family in FAMILIES else f"a {family} model; known are {', '.join(FAMILIES)}"


def _layer_sizes(described: LayersConfig) -> str | None:
    return "layers of different sizes (layer_sizes)" if any(described.layer_sizes) else None


def _layer_types(described: LayersConfig) -> str | None:
    return "a sliding window, which both forget" if "sliding_attention" in described.layer_types else None


def _rope(described: LayersConfig) -> str | None:
    rope_type = (described.rope_parameters or {}).get("rope_type")
    return None if rope_type in ROPE_TYPES else f"rope_type {rope_type}; known are {', '.join(ROPE_TYPES)}"


def _dtype(described: LayersConfig) -> str | None:
    dtype = str(described.dtype).removeprefix("torch.")
    return None if dtype in DTYPES else f"numbers of {dtype}; known are {', '.join(DTYPES)}"


# Every field of a checkpoint's config: what a GGUF file says of it, or cannot say.
FIELDS: Mapping[str, Rule] = {
    "source_model_type": _family,
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "norm_eps", "tie_word_embeddings", "forms",
        ),
        _in_file,
    ),
    "hidden_act": _one_of("hidden_act", ACTIVATIONS),
    "layer_sizes": _layer_sizes,
    "layer_types": _layer_types,
    "sliding_window": _harmless,  # but for layers that slide
    "rope_parameters": _rope,
    "dtype": _dtype,
    "source_dtypes": _in_file,
    "block": _in_file,  # by BLOCK
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _harmless),  # the vocabulary is left out
    **dict.fromkeys(("attention_dropout", "initializer_range"), _harmless),  # training
    **dict.fromkeys(("use_cache", "core_format", "unused_tensors"), _harmless),  # how a model is loaded and run
}  # fmt: skip


def _block_is(name: str, needed: Any) -> Rule:
    def fault(described: LayersConfig) -> str | None:
        value = described.block[name]
        return None if value == needed else f"block.{name} {value!r}; known is {needed!r}"

    return fault


def _biases(described: LayersConfig) -> str | None:
    return f"biases on {', '.join(described.block['biases'])}" if described.block["biases"] else None


def _modules(described: LayersConfig) -> str | None:
    other = {*described.block["modules"]} ^ {*ROLES}
    return f"layers that differ from Llama's in {', '.join(sorted(other))}" if other else None


# The same of every key of the block.
BLOCK: Mapping[str, Rule] = {
    **dict.fromkeys(("embed", "layers", "final_norm", "head"), _harmless),  # names of modules
    "modules": _modules,
    "biases": _biases,
    "norm": _block_is("norm", "rms"),
    "rotary": _block_is("rotary", "half"),
    "head_bias": _block_is("head_bias", False),
    "positions": _block_is("positions", None),
    "parallel": _block_is("parallel", False),
    "embed_scale": _block_is("embed_scale", None),
    "norm_offset": _block_is("norm_offset", 0.0),
}
