# mypy: allow-untyped-calls
"""Foreign attention: Lamina runs the module of the source's family in transformers, at the sizes of each layer.

`block.foreign` of config.json is the path of the module in a layer. `foreign` holds the fields of the source's config
that the module reads in addition to Lamina's. transformers' modelling code takes seconds to import, and is imported
when the first such module is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .block_lamina import FULL, INDEXED, RECURRENT


@dataclass(frozen=True)
class ForeignLayer:
    """The attention of one layer type of a hybrid.

    Attributes:
        name: the name of its class, without the prefix.
        recurrent: it has a state instead of keys and values, without rotation and attention mask.
        masked: it always needs an attention mask.
        chunked: tokens attend within chunks of `attention_chunk_size` tokens.
        cached: the fields whose sum is the number of cached numbers per token, if it does not cache keys and values.
        shares: it has no indexer, and attends to the tokens that an earlier layer's indexer chose.
        stored: if the files' tensors differ from the module's: tensor of the module -> the stored tensors that are its
            equal parts along the first axis.
    """

    name: str
    recurrent: bool = False
    masked: bool = False
    chunked: bool = False
    cached: tuple[str, ...] = ()
    shares: bool = False
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def cache_numbers(self, sizes: Mapping[str, Any]) -> int:
        """Return the cached numbers per token, from the fields of `foreign` and of Lamina's config."""
        if self.recurrent or self.cached:
            return sum(sizes[name] for name in self.cached)
        return int(2 * sizes["num_key_value_heads"] * sizes["head_dim"])


@dataclass(frozen=True)
class ForeignAttention:
    """Attention of a family in transformers.

    Attributes:
        prefix: the prefix of the names of its classes.
        fields: the fields of the source's config that it reads in addition to Lamina's.
        cached: the fields whose sum is the number of cached numbers per token.
        layers: for a hybrid, the attention of each layer type.
        rotary: the rotation of a hybrid is also the family's; otherwise it is Lamina's.
        package: the package of its module in transformers, if it is not named after the model type.
    """

    prefix: str
    fields: tuple[str, ...]
    cached: tuple[str, ...] = ()
    layers: Mapping[str, ForeignLayer] = field(default_factory=dict)
    rotary: bool = False
    package: str = ""


OTHER_NAMES = dict.fromkeys(
    ("rms_norm_eps", "layer_norm_epsilon"), "norm_eps"
)  # field of a source's config -> Lamina's name for it
WHOLE = "lamina_whole"  # the name of `attend_whole` in transformers
LATENT_FIELDS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias",
)  # fmt: skip
LATENT_CACHE = ("kv_lora_rank", "qk_rope_head_dim")
# Field with the width of a latent -> the roles of its writer, norm and reader.
LATENTS = {
    "kv_lora_rank": ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
    "q_lora_rank": ("q_a_proj", "q_a_layernorm", "q_b_proj"),
}
LATENT_OUTPUT, VALUE_WIDTH = "o_proj", "v_head_dim"
DELTA_FIELDS = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "attention_bias",
)  # fmt: skip
DELTA_LAYERS = {
    RECURRENT: ForeignLayer("GatedDeltaNet", recurrent=True),
    FULL: ForeignLayer("Attention"),
}
KIMI_FIELDS = (*LATENT_FIELDS, "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
KIMI_LAYERS = {
    RECURRENT: ForeignLayer(
        "DeltaAttention",
        recurrent=True,
        stored={
            "conv1d.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
            **{f"forget_gate.{name}": (name,) for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")},
        },
    ),
    FULL: ForeignLayer("Attention", cached=LATENT_CACHE),
}
MAMBA_FIELDS = (
    "mamba_num_heads", "mamba_head_dim", "mamba_hidden_act", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size",
    "time_step_min", "use_conv_bias", "use_bias", "use_mamba_kernels",
)  # fmt: skip
MAMBA_LAYERS = {
    RECURRENT: ForeignLayer("Mamba2Mixer", recurrent=True),
    FULL: ForeignLayer("Attention"),
}
INDEX_FIELDS = (*LATENT_FIELDS, "index_topk", "index_head_dim", "index_n_heads")
INDEX_LAYERS = {  # latent attention to the tokens that an indexer chooses
    INDEXED: ForeignLayer("Attention", masked=True, cached=(*LATENT_CACHE, "index_head_dim")),
}
SHARING_LAYERS = INDEX_LAYERS | {
    FULL: ForeignLayer("Attention", masked=True, cached=LATENT_CACHE, shares=True),
}
CHUNK = "attention_chunk_size"
CHUNKED_FIELDS = (
    "attention_bias", "use_qk_norm", "no_rope_layers", CHUNK, "attn_temperature_tuning", "floor_scale", "attn_scale",
)  # fmt: skip
CHUNKED_LAYERS = {
    "chunked_attention": ForeignLayer("Attention", chunked=True),
    FULL: ForeignLayer("Attention"),
}
FOREIGN = {
    "deepseek_v2": ForeignAttention("DeepseekV2", LATENT_FIELDS, LATENT_CACHE),
    "deepseek_v3": ForeignAttention("DeepseekV3", (*LATENT_FIELDS, "rope_interleave"), LATENT_CACHE),
    "glm4_moe_lite": ForeignAttention("Glm4MoeLite", (*LATENT_FIELDS, "rope_interleave"), LATENT_CACHE),
    "deepseek_v32": ForeignAttention("DeepseekV32", INDEX_FIELDS, layers=INDEX_LAYERS),
    "glm_moe_dsa": ForeignAttention("GlmMoeDsa", (*INDEX_FIELDS, "indexer_types"), layers=SHARING_LAYERS),
    "llama4_text": ForeignAttention("Llama4Text", CHUNKED_FIELDS, layers=CHUNKED_LAYERS, rotary=True, package="llama4"),
    "kimi_linear": ForeignAttention("KimiLinear", KIMI_FIELDS, layers=KIMI_LAYERS),
    "nemotron_h": ForeignAttention("NemotronH", MAMBA_FIELDS, layers=MAMBA_LAYERS),
    "qwen3_next": ForeignAttention("Qwen3Next", DELTA_FIELDS, layers=DELTA_LAYERS),
    "qwen3_5_text": ForeignAttention("Qwen3_5", DELTA_FIELDS, layers=DELTA_LAYERS, package="qwen3_5"),
    "qwen3_5_moe_text": ForeignAttention("Qwen3_5Moe", DELTA_FIELDS, layers=DELTA_LAYERS, package="qwen3_5_moe"),
}


class ForeignConfig:
    """The config of a layer's foreign module: the fields of `foreign`, and all others from Lamina's config.

    Without an attention implementation, as in workers, the module uses `whole`.
    """

    def __init__(self, config: Any, forms: Mapping[str, Any] | None = None, whole: str = WHOLE) -> None:
        self._lamina, self._whole = config, whole
        self._fields: Mapping[str, Any] = narrowed(config.foreign, forms or {})

    @property
    def _attn_implementation(self) -> str:
        return self._lamina._attn_implementation or self._whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_lamina", "_fields", "_whole"):  # copying looks them up before they exist
            raise AttributeError(name)
        return self._fields[name] if name in self._fields else getattr(self._lamina, OTHER_NAMES.get(name, name))


def check_foreign(block: Mapping[str, Any], foreign: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the fault, unless `foreign` describes the module that `block.foreign` places."""
    if not block["foreign"]:
        if foreign:
            raise ValueError("config.json: foreign describes an attention module, but block.foreign places none")
        return
    kind = FOREIGN.get(str(foreign.get("model_type")))
    if kind is None:
        raise ValueError(
            f"config.json: foreign.model_type is {foreign.get('model_type')!r}, this version knows {', '.join(FOREIGN)}"
        )
    if not _fits(block["foreign"], kind):
        known = f"an object with a path for some of {', '.join(kind.layers)}" if kind.layers else "a path"
        raise ValueError(f"config.json: block.foreign is {block['foreign']!r}, needed is {known}")
    if lacking := [name for name in kind.fields if name not in foreign]:
        raise ValueError(f"config.json: foreign lacks {', '.join(lacking)}")
    if unknown := sorted({*foreign} - {"model_type", *kind.fields}):
        raise ValueError(f"config.json: foreign has unknown {', '.join(unknown)}; a newer lamina may know it")


def narrowed(foreign: Mapping[str, Any], forms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `foreign` for a layer with these forms, whose latents and value heads may be narrower."""
    widths = {
        field: spec["rank"]
        for field, (writer, *_) in LATENTS.items()
        if (spec := forms.get(writer, {})).get("form") == "narrow"
    }
    values = forms.get(LATENTS["kv_lora_rank"][-1], {}).get("value_rank")
    return {**foreign, **widths, **({} if values is None else {VALUE_WIDTH: values})}


def check_value_ranks(forms: Mapping[str, Any]) -> None:
    """Raise ValueError unless the writer and the reader of value heads agree on their width."""
    writer = LATENTS["kv_lora_rank"][-1]
    written, read = (forms.get(role, {}).get("value_rank") for role in (writer, LATENT_OUTPUT))
    if written != read:
        raise ValueError(f"value_rank {written} of {writer}, but {read} of {LATENT_OUTPUT}")


def rank_step(foreign: Mapping[str, Any]) -> int:
    """Return the multiple of a latent's width: 2 for DeepSeek-V2, which views the pairs after it as complex numbers."""
    return 2 if foreign["model_type"] == "deepseek_v2" else 1


def _fits(paths: Any, kind: ForeignAttention) -> bool:
    """Return True if `block.foreign` has a path for the family's attention, or for some of a hybrid's layer types."""
    if not kind.layers:
        return isinstance(paths, str)
    return isinstance(paths, dict) and {*paths} <= {*kind.layers} and all(isinstance(p, str) for p in paths.values())


def is_hybrid(foreign: Mapping[str, Any]) -> bool:
    """Return True if layers have attention of several kinds."""
    return bool(foreign) and bool(FOREIGN[foreign["model_type"]].layers)


def has_foreign_rotary(foreign: Mapping[str, Any]) -> bool:
    """Return True if the family's module computes rotations instead of Lamina's."""
    return bool(foreign) and (not is_hybrid(foreign) or FOREIGN[foreign["model_type"]].rotary)


def foreign_layer(foreign: Mapping[str, Any], layer_type: str) -> ForeignLayer:
    """Return the attention of a layer whose attention is foreign."""
    return FOREIGN[foreign["model_type"]].layers.get(layer_type, ForeignLayer("Attention"))


def always_masked(foreign: Mapping[str, Any], layer_type: str) -> bool:
    """Return True if a layer's attention always needs an attention mask."""
    return bool(foreign) and foreign_layer(foreign, layer_type).masked


def foreign_cache_numbers(foreign: Mapping[str, Any]) -> int:
    """Return the numbers that a layer with this attention caches per token."""
    return sum(foreign[name] for name in FOREIGN[foreign["model_type"]].cached)


def attend_whole(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute causal attention of whole sequences without padding, query (B, H, T, d), key and value (B, G, T, …).

    Fused kernels need d = w, so the narrower ones are padded with zeros. Without a fused kernel, a CPU would hold the
    T × T scores of all heads.
    """
    assert attention_mask is None
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    value = nn.functional.pad(value, (0, max(0, missing)))
    query, key = (nn.functional.pad(x, (0, max(0, -missing))) for x in (query, key))
    causal = query.shape[2] > 1
    heads = nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=causal)
    return heads[..., :width].transpose(1, 2).contiguous(), None


def make_foreign_attention(config: Any, layer: int) -> nn.Module:
    """Build the attention module of a layer."""
    import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(WHOLE, attend_whole)
    kind = foreign_layer(config.foreign, config.layer_types[layer])
    read = ForeignConfig(config, config.forms[layer], "sdpa" if kind.masked or kind.chunked else WHOLE)
    attention: nn.Module = _class(config, kind.name)(read, layer)
    hold_as_stored(attention, kind.stored)
    return attention


def hold_as_stored(module: nn.Module, stored: Mapping[str, tuple[str, ...]]) -> None:
    """Hold tensors of a module under the names, and in the parts, of the files; each call joins them.

    `stored`: see `ForeignLayer`.
    """
    for name, parts in stored.items():
        owner, leaf = _owner(module, name)
        pieces = getattr(owner, leaf).detach().chunk(len(parts))
        delattr(owner, leaf)
        for part, piece in zip(parts, pieces, strict=True):
            path, _, own = part.rpartition(".")
            if path and path not in module._modules:
                module.add_module(path, nn.Module())
            module.get_submodule(path).register_parameter(own, nn.Parameter(piece.clone()))
    if stored:
        module.register_forward_pre_hook(partial(_join, stored=stored))
        module.register_forward_hook(partial(_part, stored=stored), always_call=True)


def _join(module: nn.Module, _: Any, stored: Mapping[str, tuple[str, ...]]) -> None:
    """Join the parts of a module's tensors before a call."""
    for name, parts in stored.items():
        pieces = [getattr(*_owner(module, part)) for part in parts]
        setattr(*_owner(module, name), pieces[0].view_as(pieces[0]) if len(pieces) == 1 else torch.cat(pieces))


def _part(module: nn.Module, _: Any, __: Any, stored: Mapping[str, tuple[str, ...]]) -> None:
    """Remove the joined tensors after the call."""
    for owner, leaf in (_owner(module, name) for name in stored):
        vars(owner).pop(leaf, None)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a tensor, and the tensor's name in it."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def make_foreign_rotary(config: Any) -> nn.Module:
    """Build the module that computes the rotations of all layers."""
    rotary: nn.Module = _class(config, "RotaryEmbedding")(ForeignConfig(config))
    return rotary


def _class(config: Any, name: str) -> Any:
    kind = FOREIGN[config.foreign["model_type"]]
    package = kind.package or config.foreign["model_type"]
    return getattr(import_module(f"transformers.models.{package}.modeling_{package}"), kind.prefix + name)
