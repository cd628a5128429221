"""The models that each export target can express. The command refuses others; the card omits the target.

`dense` and `stock` write a config.json of the source's family, which is read back and compared
(`pipeline.families.source_config`). A GGUF file has the fields of llama.cpp's architectures: `llama` and `deci` for
dense models, ARCHITECTURES for mixtures. FIELDS and BLOCK have a rule for every field of a checkpoint's config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lamina import LayersConfig
from lamina.block_lamina import BLOCK_DEFAULTS, MLP_ROLES, POSITIVE_NUMBERS
from lamina.foreign_lamina import LATENTS, VALUE_WIDTH, narrowed
from lamina.mixture_lamina import ROUTER, SHARED
from manifests.engines import FAST_LEVELS
from manifests.errors import InputError
from pipeline.checkpoint.expert_codes import code_faults
from pipeline.checkpoint.gguf_names import BIASES as GGUF_BIASES
from pipeline.checkpoint.gguf_names import LAYER_NAMES
from pipeline.checkpoint.nf4 import is_nf4
from pipeline.families.config_fields import own_name
from pipeline.families.foreign import LATENT_MODULES
from pipeline.families.registry import FAMILIES as SOURCES
from pipeline.families.registry import geometry_of
from pipeline.families.source_config import source_config
from pipeline.rounding.schemes import TABLES, rounded_modules

ExportTarget = Literal["dense", "stock", "gguf"]
TARGETS: tuple[ExportTarget, ...] = ("dense", "stock", "gguf")
FAMILIES = ("llama", "mistral", "qwen2")  # the dense sources of llama.cpp's `llama`
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "deepseek_v3": "deepseek2"}  # for mixtures
ROPE_TYPES = ("default", "linear", "llama3")  # types that only scale frequencies
ACTIVATIONS = ("silu", "swish")  # two names of one function
DTYPES = ("float32", "bfloat16", "float16")
_, READER, _ = MLP_ROLES  # of a gated MLP and of one without a gate
OTHER_ROLES = {  # of mixtures -> the roles of attention that differ from a dense layer's
    "qwen3_moe": {"q_norm", "k_norm"},
    "deepseek_v3": {*LATENT_MODULES, "q", "k", "v", "o"},
}

Rule = Callable[[LayersConfig], str | None]


def export_faults(config: Mapping[str, Any], target: ExportTarget, multiply_out: bool = False) -> list[str]:
    """Return the properties of a checkpoint with this config.json that the target cannot express.

    `multiply_out`: allow multiplying out weights with tables of levels, and all where transformers reads no codes.
    """
    config = counted(config)
    described = LayersConfig(**config)
    faults = _value_faults(config, described)
    tables = [*(config.get(TABLES) or {}).values()]
    if target == "gguf":  # keeps the codes
        tables = [scheme for scheme in tables if scheme["levels"] not in FAST_LEVELS["llama.cpp"]]
    kept = target == "dense" or (target == "stock" and is_nf4(config))
    if tables and not kept and not multiply_out:
        kinds = " and ".join(sorted({scheme["levels"] for scheme in tables}))
        faults.append(
            f"{kinds} levels (quantize.levels) of {len(tables)} matrices; --multiply-out stores them unrounded"
        )
    if target == "stock" and not multiply_out:
        faults += [f"{fault}; --multiply-out stores all matrices unrounded" for fault in code_faults(config)]
    if target == "gguf":
        faults = gguf_faults(described) + faults
        if not is_mixture(config) or faults:
            return faults
    if target != "dense" and is_mixture(config):
        if len(widths := expert_widths(described)) > 1:
            faults.append(
                f"mixtures of experts of {min(widths)} to {max(widths)} channels, and an ordinary "
                f"{config['source_model_type']} model has one width; {{method: loss_aware, shapes: stock}} keeps to one"
            )
    elif target == "stock":
        faults += _width_faults(config, mlp_widths(described))
    try:
        written_config(config, "dense" if target == "dense" else "stock")
    except InputError as error:
        faults.append(str(error))
    return faults


def refuse_faults(config: Mapping[str, Any], target: ExportTarget, multiply_out: bool = False) -> None:
    """Raise InputError with all `export_faults`, if any, and the targets without faults."""
    if not (faults := export_faults(config, target, multiply_out)):
        return
    possible = (other for other in TARGETS if other != target and not export_faults(config, other, multiply_out))
    others = [f"--to {other}" for other in possible]
    remedy = f"; possible targets: {', '.join(others)}" if others else ""
    reasons = "; ".join(faults)
    if target == "gguf":
        own = ARCHITECTURES.get(config["source_model_type"])
        which = f"architecture {own} has" if own else "architectures llama and deci have"
        reasons = f"llama.cpp's {which} no place for {'; for '.join(faults)}"
    raise InputError(f"--to {target}: {reasons}{remedy}")


def written_config(config: Mapping[str, Any], target: ExportTarget) -> dict[str, Any]:
    """Return the config.json of the dense model; with `stock`, of the first MLP's or expert's width and the widest
    latents.

    Raises InputError if the family cannot express it.
    """
    if target == "stock" and config.get("foreign"):
        sizes = [narrowed(config["foreign"], forms) for forms in config["forms"]]
        widest = {
            name: max(layer[name] for layer in sizes)
            for name in (*LATENTS, VALUE_WIDTH)
            if sizes[0].get(name) is not None
        }
        config = {**config, "foreign": {**config["foreign"], **widest}}
    if target == "stock" and is_mixture(config):
        widths = stock_widths(config)
        layers = [None if sizes is None else {**sizes, **widths} for sizes in config["mixture"]["layers"]]
        config = {**config, "mixture": {**config["mixture"], "layers": layers}}
        family = SOURCES[config["source_model_type"]]
        of_dense = own_name(family, "intermediate_size")
        if family.mixture is not None and family.mixture.sizes["width"] == of_dense:  # one for experts and dense MLPs
            config = {**config, "intermediate_size": widths["width"]}
    elif target == "stock":
        config = {**config, "intermediate_size": mlp_widths(LayersConfig(**config))[0]}
    return source_config(config, config["dtype"])


def counted(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config whose mixtures have the stored number of experts, without the forms that count them."""
    if config.get("mixture") is None:
        return config
    layers = [
        None if sizes is None else {**sizes, "experts": forms.get(ROUTER, {"rank": sizes["experts"]})["rank"]}
        for sizes, forms in zip(config["mixture"]["layers"], config["forms"], strict=True)
    ]
    forms = [{role: form for role, form in each.items() if role != ROUTER} for each in config["forms"]]
    return {**config, "forms": forms, "mixture": {**config["mixture"], "layers": layers}}


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Return True if any layer of the model is a mixture of experts."""
    return any((config.get("mixture") or {}).get("layers", ()))


def expert_widths(described: LayersConfig) -> set[int]:
    """Return the numbers of channels of routed experts, factored or not."""
    blocks = (
        (layer, block)
        for layer in range(described.num_hidden_layers)
        if described.layer_mixture(layer) is not None
        for block in described.mlp_blocks(layer)
        if block != SHARED
    )
    forms = ((layer, block, *described.form_of(layer, f"{block}.{READER}")) for layer, block in blocks)
    return {form.inner_width(described.layer_shape(layer, block), spec) for layer, block, form, spec in forms}


def stock_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return `width` of the routed experts and, if the config has it, `shared_width` of the shared one, in a stock
    export of a mixture.

    In some families, the shared expert is padded by zero channels to a multiple of a routed one.
    """
    widths = {"width": min(expert_widths(LayersConfig(**config)))}
    shared = max((sizes or {}).get("shared_width", 0) for sizes in config["mixture"]["layers"])
    family = SOURCES[config["source_model_type"]].mixture
    if shared and family is not None:
        widths["shared_width"] = family.padded_shared(shared, widths["width"])
    return widths


def mlp_widths(described: LayersConfig) -> list[int]:
    """Return the number of channels of each layer's MLP, factored or not."""
    forms = (described.form_of(layer, READER) for layer in range(described.num_hidden_layers))
    return [form.inner_width(described.layer_shape(layer), spec) for layer, (form, spec) in enumerate(forms)]


def gguf_faults(described: LayersConfig) -> list[str]:
    """Return the properties, apart from forms, that llama.cpp's architectures cannot express."""
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
    """Return the layers whose value heads no dense model can have, judged by forms and rounding."""
    faults, geometry = [], geometry_of(config)
    for layer in geometry.layers:
        form, spec = described.form_of(layer.index, "v")
        width = form.head_width(described.layer_shape(layer.index), spec)
        for block in layer.attentions:
            value, output = block.value_output
            if width > block.head_dim and rounded_modules(config, [layer.path(output.role)]):
                faults.append(
                    f"layer {layer.index}: values of {width} numbers a head, of which o is rounded: no dense model "
                    f"with heads of {block.head_dim} numbers does the same"
                )
            if spec.get("absorbed") and value.bias and not output.bias:
                faults.append(f"layer {layer.index}: the bias of v went into o, which has none in a dense model")
    return faults


def _in_file(_: LayersConfig) -> None:
    """Accept a field that has a key or a tensor in the file."""


def _harmless(_: LayersConfig) -> None:
    """Accept a field that is left out because it changes no logits."""


def _unless_known(noun: str, value: Any, supported: tuple[Any, ...]) -> str | None:
    return None if value in supported else f"{noun.format(value)}; known are {', '.join(map(str, supported))}"


def _family(described: LayersConfig) -> str | None:
    return _unless_known("a {} model", described.source_model_type, (*FAMILIES, *ARCHITECTURES))


def _activation(described: LayersConfig) -> str | None:
    return _unless_known("hidden_act {}", described.hidden_act, ACTIVATIONS)


def _layer_sizes(described: LayersConfig) -> str | None:
    return "layers of different sizes (layer_sizes)" if any(described.layer_sizes) else None


def _layer_types(described: LayersConfig) -> str | None:
    return "a sliding window, which both forget" if "sliding_attention" in described.layer_types else None


def _rope(described: LayersConfig) -> str | None:
    rope, architecture = described.rope_parameters or {}, ARCHITECTURES.get(described.source_model_type or "")
    types: tuple[str, ...] = ROPE_TYPES if architecture is None else ("default",)
    if architecture == "deepseek2":
        types = ("default", "yarn")
    if fault := _unless_known("rope_type {}", rope.get("rope_type"), types):
        return fault
    if rope["rope_type"] != "yarn":
        return None
    scale = rope.get("mscale_all_dim")
    if not scale or rope.get("mscale") != scale or rope.get("attention_factor") is not None:
        return f"YaRN with mscale {rope.get('mscale')} and mscale_all_dim {scale}, which must be equal there"
    return None if rope.get("truncate", True) else "YaRN with truncate: false"


def _mixture(described: LayersConfig) -> str | None:
    family, mixture = described.source_model_type, described.mixture
    if mixture is None or not is_mixture({"mixture": mixture}):
        return f"a {family} model without experts" if family in ARCHITECTURES else None
    if family not in ARCHITECTURES:
        return "mixtures of experts"
    if family == "deepseek_v3":
        return None
    if None in mixture["layers"]:
        return "dense MLPs between mixtures of experts"
    return None if mixture["renormalise"] else "weights of experts that do not add up to 1 (norm_topk_prob: false)"


def _wrapper(described: LayersConfig) -> str | None:
    return f"the towers of a {described.wrapper['model_type']} model" if described.wrapper else None


def _foreign(described: LayersConfig) -> str | None:
    foreign = described.foreign
    if not foreign:
        return None
    if described.source_model_type not in ARCHITECTURES:
        return f"attention of {foreign['model_type']}"
    return None if foreign["rope_interleave"] else "latent attention that rotates halves (rope_interleave: false)"


def _dtype(described: LayersConfig) -> str | None:
    return _unless_known("numbers of {}", str(described.dtype).removeprefix("torch."), DTYPES)


# Field of a checkpoint's config -> a rule that returns why a GGUF file cannot express it.
FIELDS: Mapping[str, Rule] = {
    "source_model_type": _family,
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "norm_eps", "tie_word_embeddings", "forms",
        ),
        _in_file,
    ),
    "hidden_act": _activation,
    "layer_sizes": _layer_sizes,
    "mixture": _mixture,
    "layer_types": _layer_types,
    "sliding_window": _harmless,  # see layer_types
    "rope_parameters": _rope,
    "dtype": _dtype,
    "source_dtypes": _in_file,
    "foreign": _foreign,
    "wrapper": _wrapper,
    "level_tables": _in_file,  # IQ4_NL's own; others multiplied out, see `export_faults`
    "stored_formats": _in_file,  # decoded
    "block": _in_file,  # see BLOCK
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _harmless),  # the tokenizer gives them
    **dict.fromkeys(("attention_dropout", "initializer_range"), _harmless),  # training
    **dict.fromkeys(("use_cache", "core_format", "unused_tensors"), _harmless),  # how a model is loaded and run
}  # fmt: skip


def _block_is(name: str, needed: Any) -> Rule:
    def fault(described: LayersConfig) -> str | None:
        value = described.block[name]
        return None if value == needed else f"block.{name} {value!r}; known is {needed!r}"

    return fault


def _biases(described: LayersConfig) -> str | None:
    """Find biases that llama.cpp lacks: of mixtures, outside of attention, and of queries wider than the model."""
    biases, heads = {*described.block["biases"]}, described.num_attention_heads
    if others := biases - {*(GGUF_BIASES if described.mixture is None else ())}:
        return f"biases on {', '.join(sorted(others))}"
    if "q" in biases and heads * described.head_dim != described.hidden_size:
        return f"a bias on q, whose {heads} heads of {described.head_dim} are not the {described.hidden_size} of hidden"
    return None


def _modules(described: LayersConfig) -> str | None:
    other = {*described.block["modules"]} ^ {*LAYER_NAMES}
    other -= OTHER_ROLES.get(described.source_model_type or "", set())
    return f"layers that differ from Llama's in {', '.join(sorted(other))}" if other else None


# Key of the config's block -> such a rule.
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
    "foreign": _harmless,  # see the config's `foreign`
    **{name: _block_is(name, BLOCK_DEFAULTS[name]) for name in ("alone", "rotary_layers", *POSITIVE_NUMBERS)},
    **dict.fromkeys(("norm_bias", "head_norms"), _harmless),  # of norms that `norm` and `modules` rule out
}
