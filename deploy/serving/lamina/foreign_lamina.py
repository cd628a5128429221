# mypy: allow-untyped-calls
"""Foreign attention: transformers' own module of the source's family, which Lamina runs, at a layer's own sizes.

`block.foreign` of config.json is the path of the module in a layer. `foreign` holds the fields of the source's config
that the module reads besides those of Lamina's. Transformers' modelling code takes seconds to import: it is imported
when the first such module is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class ForeignAttention:
    """Attention of a family in transformers.

    Attributes:
        prefix: of the names of its classes.
        fields: the fields of the source's config that it reads besides those that every Lamina checkpoint has.
        cached: the fields whose sum is the count of numbers that it caches per token.
    """

    prefix: str
    fields: tuple[str, ...]
    cached: tuple[str, ...]


WHOLE = "lamina_whole"  # the name of `attend_whole` in transformers
LATENT_FIELDS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias",
)  # fmt: skip
LATENT_CACHE = ("kv_lora_rank", "qk_rope_head_dim")
# Field that holds the width of a latent -> the roles of the matrix that writes it, of its norm, and of its reader.
LATENTS = {
    "kv_lora_rank": ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
    "q_lora_rank": ("q_a_proj", "q_a_layernorm", "q_b_proj"),
}
LATENT_OUTPUT = "o_proj"
FOREIGN = {
    "deepseek_v2": ForeignAttention("DeepseekV2", LATENT_FIELDS, LATENT_CACHE),
    "deepseek_v3": ForeignAttention("DeepseekV3", (*LATENT_FIELDS, "rope_interleave"), LATENT_CACHE),
}


class ForeignConfig:
    """A config as a layer's foreign module reads it: the fields of `foreign`, and all others of Lamina's config.

    A layer without an attention implementation, as in workers, uses `attend_whole`.
    """

    def __init__(self, config: Any, forms: Mapping[str, Any] | None = None) -> None:
        self._lamina = config
        self._fields: Mapping[str, Any] = narrowed(config.foreign, forms or {})

    @property
    def _attn_implementation(self) -> str:
        return self._lamina._attn_implementation or WHOLE

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_lamina", "_fields"):  # copies ask before these exist
            raise AttributeError(name)
        return self._fields[name] if name in self._fields else getattr(self._lamina, name)


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
    if lacking := [name for name in kind.fields if name not in foreign]:
        raise ValueError(f"config.json: foreign lacks {', '.join(lacking)}")
    if unknown := sorted({*foreign} - {"model_type", *kind.fields}):
        raise ValueError(f"config.json: foreign has unknown {', '.join(unknown)}; a newer lamina may know it")


def narrowed(foreign: Mapping[str, Any], forms: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `foreign` for a layer with these forms, some of whose latents may be narrower."""
    widths = {
        field: spec["rank"]
        for field, (writer, *_) in LATENTS.items()
        if (spec := forms.get(writer, {})).get("form") == "narrow"
    }
    return {**foreign, **widths}


def rank_step(foreign: Mapping[str, Any]) -> int:
    """Return the number of which a latent's width is a multiple: DeepSeek-V2 views pairs behind it as complex."""
    return 2 if foreign["model_type"] == "deepseek_v2" else 1


def output_widths(foreign: Mapping[str, Any], heads: int, hidden: int) -> tuple[int, int]:
    """Return the inputs and outputs of the output projection of latent attention."""
    return heads * foreign["v_head_dim"], hidden


def foreign_cache_numbers(foreign: Mapping[str, Any]) -> int:
    """Return the numbers that a layer with this attention caches per token."""
    return sum(foreign[name] for name in FOREIGN[foreign["model_type"]].cached)


def attend_whole(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute causal attention of whole sequences without padding, query and key (B, H, T, d), value (B, H, T, w).

    Fused kernels need d = w. Zeros fill up the narrower ones; otherwise a CPU holds the T × T scores of all heads.
    """
    assert attention_mask is None
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    value = nn.functional.pad(value, (0, max(0, missing)))
    query, key = (nn.functional.pad(x, (0, max(0, -missing))) for x in (query, key))
    causal = query.shape[2] > 1
    heads = nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=causal)
    return heads[..., :width].transpose(1, 2).contiguous(), None


def make_foreign_attention(config: Any, layer: int) -> nn.Module:
    """Build the attention module of a layer."""
    import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(WHOLE, attend_whole)
    attention: nn.Module = _class(config, "Attention")(ForeignConfig(config, config.forms[layer]), layer)
    return attention


def make_foreign_rotary(config: Any) -> nn.Module:
    """Build the module that computes the rotations of all layers."""
    rotary: nn.Module = _class(config, "RotaryEmbedding")(ForeignConfig(config))
    return rotary


def _class(config: Any, name: str) -> Any:
    kind = config.foreign["model_type"]
    return getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), FOREIGN[kind].prefix + name)
