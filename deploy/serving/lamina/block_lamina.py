"""The block: a decoder layer of the source family as data, its modules and the sizes of one layer.

The pipeline reads the same description: of norms, of sizes, and of the values that a config may have.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .activation_lamina import is_activation
from .norms_lamina import NORMS

REQUIRED_ROLES = ("q", "k", "v", "o", "up", "down")
INPUT_NORM_ROLES = ("input_norm", "mlp_norm")  # norms of the inputs of attention and MLP
OUTPUT_NORM_ROLES = ("attention_out_norm", "mlp_out_norm")  # norms of a block's output, before the residual addition
HEAD_NORM_ROLES = ("q_norm", "k_norm")
SINKS = "sinks"  # the path of the module that holds one score for each query head, to which no value belongs
OPTIONAL_ROLES = (*INPUT_NORM_ROLES, *OUTPUT_NORM_ROLES, *HEAD_NORM_ROLES, "gate", SINKS)
ATTENTION_ROLES = ("q", "k", "v", "o", "q_norm", "k_norm")
LINEAR_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
QKVO_ROLES = ("q", "k", "v", "o")
MLP_ROLES = ("gate", "up", "down")
ROWWISE_ROLES = ("o", "down")
ATTENTION, MLP = "attention", "mlp"

# The default of `block`: pre-norm, gated MLP, rotary. It holds paths of modules, the roles of a layer with their paths
# inside it, `norm` ("rms" or "layer") and `rotary` ("half", "interleaved" or None).
DEFAULT_BLOCK: dict[str, Any] = {
    "embed": "model.embed_tokens", "layers": "model.layers", "final_norm": "model.norm", "head": "lm_head",
    "modules": {
        "input_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    "norm": "rms", "rotary": "half",
}  # fmt: skip
# Optional fields of a block.
BLOCK_DEFAULTS: dict[str, Any] = {
    "head_bias": False,
    "biases": [],  # the roles whose projection has a bias
    "positions": None,  # a table of learned positions: {"module": path, "offset": row of the first token}
    "parallel": False,  # attention and MLP both read the layer's input
    "embed_scale": None,  # token embeddings are multiplied by this number, or by "sqrt(hidden_size)"
    "norm_offset": 0.0,  # RMS norms multiply by this + weight
    # The path of an attention module of transformers (foreign_lamina), below which its roles lie; or for some layer
    # types the path of theirs, whose roles are called LAYER_TYPE.NAME.
    "foreign": None,
    "alone": None,  # layer type -> ATTENTION or MLP, for types whose layers have only this block, after its norm
    "norm_bias": True,  # LayerNorms have a bias
    "head_norms": "each",  # q_norm and k_norm norm each head, or "all" heads together, or each head once "rotated"
    "rotary_layers": None,  # a list with 1 for each layer that rotates queries and keys, or their type; null: all do
    "query_scalar": None,  # scores are divided by the root of this number; null: of head_dim
    "attention_scale": None,  # scores are multiplied by this number instead
    "attention_softcap": None,  # scores s become c · tanh(s / c)
    "glu_alpha": None,  # channels are those of gpt-oss (activation_lamina.Channels) with this alpha
    "glu_limit": None,  # and this limit
    "residual_scale": None,  # the outputs of attention and MLP are multiplied by this number
    "logit_scale": None,  # logits are multiplied by this number,
    "logit_divisor": None,  # divided by this one,
    "logit_softcap": None,  # and then soft-capped as scores are
}
POSITIVE_NUMBERS = (
    "query_scalar", "attention_scale", "attention_softcap", "residual_scale", "logit_scale", "logit_divisor",
    "logit_softcap", "glu_alpha", "glu_limit",
)  # fmt: skip


# Keys that vLLM does not compute around our layers, and those that Lamina's class for vLLM does not compute either.
BACKEND_LACKS = ("attention_softcap", "logit_scale", "logit_divisor", "logit_softcap")
VLLM_LACKS = (*BACKEND_LACKS, "head_norms", "residual_scale", "rotary_layers")

CHOICES: dict[str, tuple[Any, ...]] = {
    "norm": tuple(NORMS),
    "rotary": ("half", "interleaved", None),
    "norm_bias": (True, False),
    "head_norms": ("each", "all", "rotated"),
}

# The sizes in which a layer may differ from the model.
LAYER_FIELDS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
MAX_LAYERS = 10_000  # a config makes lists of this length
MAX_SIZE = 2**31

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT, INDEXED = "linear_attention", "indexed_attention"  # types of layers with foreign attention


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one decoder layer and the modules of its roles, for stored forms.

    `modules` maps a role to its module path inside the layer; `biases` are the roles whose projection has a bias;
    `foreign` holds the sizes of foreign attention.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    modules: Mapping[str, str]
    biases: frozenset[str]
    core_format: str = "dense"
    foreign: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value_dim(self) -> int:
        """Return the numbers of a value head of the source."""
        return int(self.foreign.get("v_head_dim", self.head_dim))

    def widths(self, role: str, value_dim: int | None = None, channels: int | None = None) -> tuple[int, int]:
        """Return the inputs and outputs of a projection; `value_dim` and `channels`: other ones than the source's."""
        hidden, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        value = self.head_dim if value_dim is None else value_dim
        inner = self.intermediate_size if channels is None else channels
        return {
            "q": (hidden, heads * self.head_dim), "k": (hidden, kv_heads * self.head_dim),
            "v": (hidden, kv_heads * value), "o": (heads * value, hidden),
            "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
        }[role]  # fmt: skip

    def norm_width(self, role: str, block: Mapping[str, Any]) -> int:
        """Return the width of a norm: of hidden states, of each query or key head, or of all of them together."""
        if role not in HEAD_NORM_ROLES:
            return self.hidden_size
        heads = self.num_attention_heads if role == "q_norm" else self.num_key_value_heads
        return self.head_dim * (heads if block.get("head_norms") == "all" else 1)


def sizes_of_layer(fields: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the LAYER_FIELDS of a layer: the model's, or those of `layer_sizes`."""
    own = fields.get("layer_sizes") or ()
    return {name: fields[name] for name in LAYER_FIELDS} | (own[layer] if own else {})


def rotary_width(rope: Mapping[str, Any], head_dim: int) -> int:
    """Return the count of a head's first numbers that rotate."""
    share: float = rope.get("partial_rotary_factor", 1.0)
    return round(head_dim * share)


def has_norm_bias(block: Mapping[str, Any]) -> bool:
    """Return True if the norms of layers, other than those of heads, have biases."""
    norm = NORMS[block["norm"]](1, 0.0, {**BLOCK_DEFAULTS, **block})
    return getattr(norm, "bias", None) is not None


def value_faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults in the values of a config: sizes, epsilon, activation, tied embeddings, window."""
    faults, own, count = size_faults(fields), fields.get("layer_sizes") or [], fields.get("num_hidden_layers")
    if not isinstance(own, list) or not all(isinstance(sizes, Mapping) for sizes in own):
        faults.append(f"layer_sizes: {own!r:.80} is not a list of the sizes by layer")
    elif own and len(own) != count:
        faults.append(f"layer_sizes: {len(own)} entries for {count!r:.80} layers")
    elif not faults:
        each = ((layer, size_faults({**fields, **sizes})) for layer, sizes in enumerate(own))
        faults += [f"layer {layer}: {fault}" for layer, of_layer in each for fault in of_layer]
    epsilon, activation, window = (fields.get(name) for name in ("norm_eps", "hidden_act", "sliding_window"))
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not 0 <= epsilon < 1:
        faults.append(f"norm epsilon: {epsilon!r:.80} is not a number from 0 to 1")
    if not isinstance(activation, str) or not is_activation(activation):
        faults.append(f"activation: {activation!r:.80} is not an activation of transformers")
    if not isinstance(fields.get("tie_word_embeddings"), bool):
        faults.append(f"tie_word_embeddings: {fields.get('tie_word_embeddings')!r:.80} is neither true nor false")
    if window is not None and (type(window) is not int or window < 1):
        faults.append(f"sliding_window: {window!r:.80} is not a positive integer")
    return faults


def size_faults(sizes: Mapping[str, Any]) -> list[str]:
    """Return the faults in the sizes of a model or of one of its layers."""
    faults = [
        f"{name}: {sizes.get(name)!r:.80} is not a positive integer below {limit}"
        for name in COUNTS
        for limit in (MAX_LAYERS + 1 if name == "num_hidden_layers" else MAX_SIZE,)
        if type(sizes.get(name)) is not int or not 1 <= sizes[name] < limit
    ]
    if not faults and sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        faults.append(
            f"num_attention_heads: {sizes['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads: {sizes['num_key_value_heads']}"
        )
    return faults


def check_block(block: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the fault, unless `block` describes a layer that can be built."""
    modules, required, foreign = block.get("modules", {}), {*DEFAULT_BLOCK}, foreign_roles(block)
    needed = [role for role in REQUIRED_ROLES if not (block.get("foreign") and role in ATTENTION_ROLES)]
    if missing := sorted(required - {*block}) + [f"modules.{r}" for r in needed if r not in modules]:
        raise ValueError(f"block lacks {', '.join(missing)}")
    roles = {*needed, *OPTIONAL_ROLES, *foreign}
    if unknown := sorted({*block} - required - {*BLOCK_DEFAULTS}) + sorted({*modules} - roles):
        raise ValueError(f"block has unknown {', '.join(unknown)}; a newer lamina may know it")
    for key, allowed in CHOICES.items():
        if block[key] not in allowed:
            raise ValueError(f"block.{key} is {block[key]!r}, allowed are {allowed}")
    for key in POSITIVE_NUMBERS:
        if block[key] is not None and not (_is_number(block[key]) and block[key] > 0):
            raise ValueError(f"block.{key} is {block[key]!r}, allowed are null and a positive number")
    if (block["glu_alpha"] is None) != (block["glu_limit"] is None):
        raise ValueError("block has one of glu_alpha and glu_limit, which go together")
    scale, offset = block["embed_scale"], block["norm_offset"]
    if scale not in (None, "sqrt(hidden_size)") and not (_is_number(scale) and scale > 0):
        raise ValueError(f"block.embed_scale is {scale!r}, allowed are a positive number and 'sqrt(hidden_size)'")
    if not _is_number(offset) or (offset and block["norm"] != "rms"):
        raise ValueError(f"block.norm_offset is {offset!r}, which is a number, and 0 unless norm is 'rms'")
    if odd := {*(block["alone"] or {}).values()} - {ATTENTION, MLP}:
        raise ValueError(f"block.alone has {', '.join(map(str, odd))}, allowed are {ATTENTION} and {MLP}")
    for before, after in zip(INPUT_NORM_ROLES, OUTPUT_NORM_ROLES, strict=True):
        spared = before == "mlp_norm" and block["parallel"]
        if not {before, after} & {*modules} and not spared:
            only = " or a parallel one" if before == "mlp_norm" else ""
            raise ValueError(f"block.modules lacks {before}, which only a block with {after}{only} can do without")
    if {*OUTPUT_NORM_ROLES} & {*modules} and block["norm"] != "rms":
        raise ValueError("block.modules has norms of outputs, which are RMS norms only; block.norm is 'layer'")
    if stray := [role for role in block["biases"] if role not in {*LINEAR_ROLES, *foreign} or role not in modules]:
        raise ValueError(f"block.biases names {', '.join(stray)}, not a projection of block.modules")
    paths = [block["embed"], block["layers"], block["final_norm"]]
    paths += [block["positions"]["module"]] if block["positions"] else []
    if len({path.split(".")[0] for path in paths}) > 1 or not all("." in path for path in paths):
        raise ValueError(f"block: {', '.join(paths)} must lie below one base module (as in model.layers)")
    if not block["foreign"] and not attention_path(modules):
        raise ValueError("block.modules: q, k, v and o must lie below one attention module")


def clamp_of(block: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return alpha and limit of clamped channels; None for others."""
    alpha, limit = block.get("glu_alpha"), block.get("glu_limit")
    return None if alpha is None or limit is None else (alpha, limit)


def foreign_roles(block: Mapping[str, Any]) -> list[str]:
    """Return the roles of the modules inside of foreign attention, of all layer types."""
    foreign, modules = block.get("foreign"), block.get("modules", {})
    if isinstance(foreign, Mapping):
        return [role for role in modules if role.partition(".")[0] in foreign]
    return [role for role, module in modules.items() if foreign and module.startswith(f"{foreign}.")]


def foreign_path(block: Mapping[str, Any], layer_type: str) -> str | None:
    """Return the path of the foreign attention of a layer; None if its attention is Lamina's own."""
    foreign = block.get("foreign")
    return foreign.get(layer_type) if isinstance(foreign, Mapping) else foreign


def has_part(block: Mapping[str, Any], layer_type: str, part: str) -> bool:
    """Return True if layers of a type have this part, ATTENTION or MLP; most have both."""
    return bool((block.get("alone") or {}).get(layer_type, part) == part)


def modules_of_type(block: Mapping[str, Any], layer_type: str) -> dict[str, str]:
    """Map the roles of a layer of this type, with a dense MLP, to their module paths."""
    modules, foreign = block["modules"], block.get("foreign")
    if not isinstance(foreign, Mapping):
        return dict(modules)
    absent = {role for role in foreign_roles(block) if role.partition(".")[0] != layer_type}
    absent |= {*ATTENTION_ROLES, SINKS} if layer_type in foreign else set()
    if not has_part(block, layer_type, ATTENTION):
        absent |= {*ATTENTION_ROLES, SINKS, "input_norm", "attention_out_norm"}
    if not has_part(block, layer_type, MLP):
        absent |= {*MLP_ROLES, "mlp_norm", "mlp_out_norm"}
    return {role: path for role, path in modules.items() if role not in absent}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def attention_path(modules: Mapping[str, str]) -> str:
    """Return the path of the deepest module that holds q, k, v, o and their norms: `self_attn`."""
    return _common_parent([modules[r] for r in ATTENTION_ROLES if r in modules])


def mlp_path(modules: Mapping[str, str]) -> str:
    """Return the path of the module that holds gate, up and down: `mlp`; `mlp_factors` if it is the layer itself."""
    return mlp_parent(modules) or "mlp_factors"


def mlp_parent(modules: Mapping[str, str]) -> str:
    """Return the path of the deepest module that holds gate, up and down: `mlp`; empty if it is the layer itself."""
    return _common_parent([modules[r] for r in MLP_ROLES if r in modules])


def _common_parent(paths: list[str]) -> str:
    parents = [path.split(".")[:-1] for path in paths]
    depth = 0
    while all(len(p) > depth and p[depth] == parents[0][depth] for p in parents):
        depth += 1
    return ".".join(parents[0][:depth])


def in_base(path: str) -> str:
    """Return the path inside the base model: `model.layers` → `layers`."""
    return path.partition(".")[2]
