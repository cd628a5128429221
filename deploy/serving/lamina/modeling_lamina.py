# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""A decoder-only language model, dense or compressed, that is described by data.

`config.block` says what a decoder layer of the source family is (module paths, biases, norms), `config.forms`
how each projection of each layer is stored. Nothing here knows a family by name, and with `forms` all empty the model
computes what the source does. Self-contained (torch and transformers only): it is copied next to a checkpoint and
loaded with `trust_remote_code`.

B batch, T tokens of this call, S tokens seen, D hidden, H query heads, G key/value heads, d head_dim, r value width
(r <= d), c rotary width (c <= d), N MLP width, n heads of a projection (H or G).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

REQUIRED_ROLES = ("input_norm", "q", "k", "v", "o", "up", "down")
OPTIONAL_ROLES = ("q_norm", "k_norm", "mlp_norm", "gate")
ATTENTION_ROLES = ("q", "k", "v", "o", "q_norm", "k_norm")
LINEAR_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
ROWWISE_ROLES = ("o", "down")
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}

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


# Forms: how the projection of a role is stored ------------------------------------------------------------------------


class HeadLowRank(nn.Module):
    """A projection to n heads, each with two factors: head i is second[i] @ first[i·r:(i+1)·r] x (+ bias).

    `first.weight` is (n·r, D), `second` (n, d, r), `bias` (n·d); the output is (..., n·d), as of a dense projection.
    """

    def __init__(self, in_features: int, out_features: int, head_dim: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.rank = out_features // head_dim, rank
        self.first = nn.Linear(in_features, self.num_heads * rank, bias=False)
        self.second = nn.Parameter(torch.empty(self.num_heads, head_dim, rank))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        latent_BTnr = self.first(x_BTD).unflatten(-1, (self.num_heads, self.rank))
        out_BTC = torch.einsum("...nr,ndr->...nd", latent_BTnr, self.second).flatten(-2)
        return out_BTC if self.bias is None else out_BTC + self.bias


@dataclass(frozen=True)
class Form:
    """A way to store a projection: which roles may have it, its largest rank, who must share it, how it is built."""

    roles: tuple[str, ...]
    rank_limit: str | None  # the config field that a rank must not exceed; None: the form has no rank
    together: bool  # all of `roles` that the block has take it at one rank, or none does
    build: Callable[[int, int, bool, int, int], nn.Module]  # in, out, bias, head_dim, rank


def _linear(in_features: int, out_features: int, bias: bool, head_dim: int, rank: int) -> nn.Module:
    return nn.Linear(in_features, out_features, bias=bias)  # the rank is already in the widths


def _head_low_rank(in_features: int, out_features: int, bias: bool, head_dim: int, rank: int) -> nn.Module:
    return HeadLowRank(in_features, out_features, head_dim, rank, bias)


FORMS: dict[str, Form] = {
    "dense": Form(LINEAR_ROLES, None, False, _linear),
    "head_pca": Form(("v", "o"), "head_dim", True, _linear),
    "pruned": Form(("gate", "up", "down"), "intermediate_size", True, _linear),
    "head_low_rank": Form(("q", "k"), "head_dim", False, _head_low_rank),
}


# Configuration --------------------------------------------------------------------------------------------------------


class LaminaConfig(PreTrainedConfig):
    """config.json of a checkpoint: the usual fields under their usual names, plus `block` and `forms`.

    `layer_types` null means sliding everywhere when `sliding_window` is set, full otherwise.
    Raises ValueError for a block that cannot be built and for forms that do not fit it, naming layer and role.
    """

    model_type = "lamina"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    ignore_keys_at_rope_validation = {"partial_rotary_factor"}  # noqa: RUF012 - the base class declares the type
    _auto_class: ClassVar[str | None] = "AutoConfig"  # so that save_pretrained copies this file

    source_model_type: str | None = None
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    sliding_window: int | None = None
    layer_types: list[str] = field(default_factory=list)
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    block: dict[str, Any] = field(default_factory=dict)
    forms: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self, **kwargs: Any) -> None:
        self.block = {**BLOCK_DEFAULTS, **copy.deepcopy(self.block or DEFAULT_BLOCK)}
        self.forms = self.forms or [{} for _ in range(self.num_hidden_layers)]
        # Spelled out: transformers' mask and cache helpers read the list as soon as the attribute exists.
        layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
        self.layer_types = self.layer_types or [layer_type] * self.num_hidden_layers
        classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        kwargs.setdefault("auto_map", {auto: f"modeling_lamina.Lamina{name}" for auto, name in classes.items()})
        super().__post_init__(**kwargs)
        _check_block(self)
        _check_forms(self)
        if self.block["rotary"] is None:
            self.rope_parameters = None  # the base class filled in a default
        self.base_model_tp_plan = _tensor_parallel_plan(self)  # type: ignore[misc]


def _check_block(config: LaminaConfig) -> None:
    block, modules = config.block, config.block.get("modules", {})
    required = {*DEFAULT_BLOCK}
    if missing := sorted(required - {*block}) + [f"modules.{r}" for r in REQUIRED_ROLES if r not in modules]:
        raise ValueError(f"block lacks {', '.join(missing)}")
    roles = {*REQUIRED_ROLES, *OPTIONAL_ROLES}
    if unknown := sorted({*block} - required - {*BLOCK_DEFAULTS}) + sorted({*modules} - roles):
        raise ValueError(f"block has unknown {', '.join(unknown)}; a newer lamina may know it")
    for key, allowed in (("norm", ("rms", "layer")), ("rotary", ("half", "interleaved", None))):
        if block[key] not in allowed:
            raise ValueError(f"block.{key} is {block[key]!r}, allowed are {allowed}")
    if "mlp_norm" not in modules and not block["parallel"]:
        raise ValueError("block.modules lacks mlp_norm, which only a parallel block can do without")
    if stray := [role for role in block["biases"] if role not in LINEAR_ROLES or role not in modules]:
        raise ValueError(f"block.biases names {', '.join(stray)}, not a projection of block.modules")
    paths = [block["embed"], block["layers"], block["final_norm"]]
    paths += [block["positions"]["module"]] if block["positions"] else []
    if len({path.split(".")[0] for path in paths}) > 1 or not all("." in path for path in paths):
        raise ValueError(f"block: {', '.join(paths)} must lie below one base module (as in model.layers)")
    if not _attention_path(modules):
        raise ValueError("block.modules: q, k, v and o must lie below one attention module")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(f"{config.num_attention_heads} query heads over {config.num_key_value_heads} KV heads")
    layer_types = config.layer_types
    if len(layer_types) != config.num_hidden_layers or not {*layer_types} <= {*MASKS}:
        raise ValueError(f"layer_types must be {config.num_hidden_layers} of {', '.join(MASKS)}, not {layer_types}")
    if "sliding_attention" in layer_types and config.sliding_window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is null")


def _check_forms(config: LaminaConfig) -> None:
    modules = config.block["modules"]
    if len(config.forms) != config.num_hidden_layers:
        raise ValueError(f"forms has {len(config.forms)} entries for {config.num_hidden_layers} layers")
    for layer_idx, forms in enumerate(config.forms):
        for role, spec in forms.items():
            where, form = f"layer {layer_idx}, {role}", FORMS.get(spec.get("form", ""))
            if role not in modules:
                raise ValueError(f"{where}: block.modules has no such role")
            if form is None:
                raise ValueError(f"{where}: unknown form {spec.get('form')!r}, this version knows {', '.join(FORMS)}")
            if role not in form.roles:
                raise ValueError(f"{where}: {spec['form']} is for {', '.join(form.roles)}")
            if extra := {*spec} - {"form"} - ({"rank"} if form.rank_limit else set()):
                raise ValueError(f"{where}: {spec['form']} has no {', '.join(sorted(extra))}")
            if form.rank_limit:
                rank, limit = spec.get("rank"), getattr(config, form.rank_limit)
                if type(rank) is not int or not 1 <= rank <= limit:
                    raise ValueError(f"{where}: {spec['form']} rank {rank}, allowed is 1 to {form.rank_limit} {limit}")
            for other in form.roles if form.together else ():
                if other in modules and forms.get(other) != spec:
                    raise ValueError(f"{where}: {spec} needs the same on {other}, which has {forms.get(other, 'none')}")


def _attention_path(modules: dict[str, str]) -> str:
    """The deepest module that holds q, k, v, o and their norms: `self_attn`."""
    parents = [modules[r].split(".")[:-1] for r in ATTENTION_ROLES if r in modules]
    depth = 0
    while all(len(p) > depth and p[depth] == parents[0][depth] for p in parents):
        depth += 1
    return ".".join(parents[0][:depth])


def _in_base(path: str) -> str:
    """`model.layers` → `layers`: the path inside the base model."""
    return path.partition(".")[2]


def _tensor_parallel_plan(config: LaminaConfig) -> dict[str, str] | None:
    """Columns for what makes heads or MLP channels, rows for what reads them; None where factors would be cut."""
    if any(FORMS[spec["form"]].build is not _linear for layer in config.forms for spec in layer.values()):
        return None
    prefix, modules = _in_base(config.block["layers"]), config.block["modules"]
    styles = {role: "rowwise" if role in ROWWISE_ROLES else "colwise" for role in LINEAR_ROLES if role in modules}
    return {f"{prefix}.*.{modules[role]}": style for role, style in styles.items()}


# Parts ----------------------------------------------------------------------------------------------------------------


class LaminaRMSNorm(nn.Module):
    """x / rms(x) · weight, the root mean square in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


def make_norm(config: LaminaConfig) -> nn.Module:
    """The norm that the layers and the end of the stack use: weight (D), and bias (D) for `layer`."""
    kind = LaminaRMSNorm if config.block["norm"] == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class LaminaRotaryEmbedding(nn.Module):
    """cos and sin of the position angles, each (B, T, c), for every rope type of transformers.

    Build it off the meta device: `inv_freq` is computed, not loaded.
    """

    inv_freq: Tensor

    def __init__(self, config: LaminaConfig, device: torch.device | None = None) -> None:
        super().__init__()
        assert config.rope_parameters is not None
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        self.interleaved = config.block["rotary"] == "interleaved"
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        default = self.compute_default_rope_parameters
        init = default if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: LaminaConfig, device: torch.device | None = None, **kwargs: Any
    ) -> tuple[Tensor, float]:
        """theta^(-2i/c) for i < c/2; the name is what transformers looks for when it fills in buffers."""
        rope = config.rope_parameters or {}
        width = round(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float, device=device) / width
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    @dynamic_rope_update  # type: ignore[untyped-decorator]
    def forward(self, x_BTD: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids_BT[..., None].float() * self.inv_freq.to(device=x_BTD.device, dtype=torch.float)
        angles_BTc = freqs.repeat_interleave(2, -1) if self.interleaved else torch.cat((freqs, freqs), dim=-1)
        cos_BTc, sin_BTc = angles_BTc.cos() * self.attention_scaling, angles_BTc.sin() * self.attention_scaling
        return cos_BTc.to(x_BTD.dtype), sin_BTc.to(x_BTD.dtype)


def rotate(x_BHTd: Tensor, cos_BTc: Tensor, sin_BTc: Tensor, interleaved: bool) -> Tensor:
    """RoPE on the first c of d numbers; pairs are (i, i + c/2), or (2i, 2i + 1) when interleaved."""
    width = cos_BTc.shape[-1]
    turned, rest = x_BHTd[..., :width], x_BHTd[..., width:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * cos_BTc.unsqueeze(1) + other * sin_BTc.unsqueeze(1)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention written out; key (B, G, S, d), value (B, G, S, r) → ((B, T, H, r), weights (B, H, T, S))."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path below `root`, making plain containers on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def _find(root: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Looked up at each call, not remembered: quantizers, adapters and engines replace modules in place."""
    for name in names:
        root = getattr(root, name)
    return root


def _run(root: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    out: Tensor = _find(root, names)(x)
    return out


# The decoder layer ----------------------------------------------------------------------------------------------------


class LaminaAttention(nn.Module):
    """Self-attention with r <= d numbers per value head; its projections are children at the block's paths."""

    def __init__(self, config: LaminaConfig, layer_idx: int, value_dim: int, names: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.value_dim, self._names = config.head_dim, value_dim, names
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        self.interleaved = config.block["rotary"] == "interleaved"
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

    def _heads(self, role: str, x_BTD: Tensor, width: int) -> Tensor:
        out_BTGw = _run(self, self._names[role], x_BTD).view(*x_BTD.shape[:-1], -1, width)
        if f"{role}_norm" in self._names:
            out_BTGw = _run(self, self._names[f"{role}_norm"], out_BTGw)
        return out_BTGw.transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query = self._heads("q", hidden_states, self.head_dim)
        key = self._heads("k", hidden_states, self.head_dim)
        value = self._heads("v", hidden_states, self.value_dim)
        if position_embeddings is not None:
            query = rotate(query, *position_embeddings, self.interleaved)
            key = rotate(key, *position_embeddings, self.interleaved)
        padding = self._value_padding(query.shape[2])
        if self.value_dim < self.head_dim:
            value = value.contiguous()  # engines that widen values by .view refuse a slice of a fused projection
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if padding:
            value = nn.functional.pad(value, (0, padding))

        # This assignment and the one call below are what vLLM looks for in the source.
        attention_interface: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if padding:
            attn_output = attn_output[..., : self.value_dim]
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return _run(self, self._names["o"], attn_output), attn_weights

    def _value_padding(self, num_queries: int) -> int:
        """Zeros to add to each value head for the kernel, never for the cache.

        Fused kernels want r = d; without them a prefill builds the T × S scores (4 times slower, and the memory).
        One query has no such scores, and there reading r instead of d numbers per token wins.
        """
        kernel = self.config._attn_implementation or ""
        fused = "flash" in kernel or ("sdpa" in kernel and num_queries > 1)
        return self.head_dim - self.value_dim if fused else 0


class LaminaDecoderLayer(GradientCheckpointingLayer):
    """One decoder layer; state dict keys are those of the source's layer.

    Each role's module is called once per forward: q, k and v on one input, o on (B, T, H·r) with the heads in order,
    down on the MLP's hidden values, so that forward hooks on `role(...)` see what statistics are taken of.
    """

    def __init__(self, config: LaminaConfig, layer_idx: int) -> None:
        super().__init__()
        block, forms = config.block, config.forms[layer_idx]
        modules: dict[str, str] = block["modules"]
        self.layer_type = config.layer_types[layer_idx]
        self.parallel = block["parallel"]
        self._names = {role: tuple(path.split(".")) for role, path in modules.items()}
        value_dim = forms.get("v", {}).get("rank", config.head_dim)
        attention = _attention_path(modules)
        self._attention = tuple(attention.split("."))
        inside = {r: names[len(self._attention) :] for r, names in self._names.items() if r in ATTENTION_ROLES}
        _attach(self, attention, LaminaAttention(config, layer_idx, value_dim, inside))
        for role, path in modules.items():
            _attach(self, path, _make_role(config, role, forms))
        self.act_fn = ACT2FN[config.hidden_act]

    def role(self, role: str) -> nn.Module:
        """The module of a role ("q", "down", "input_norm", …); raises KeyError for one that the block lacks."""
        return _find(self, self._names[role])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        normed = self._apply_role("input_norm", hidden_states)
        attention, _ = _find(self, self._attention)(
            hidden_states=normed,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        if self.parallel:
            normed = self._apply_role("mlp_norm", hidden_states) if "mlp_norm" in self._names else normed
            return attention + self._mlp(normed) + hidden_states  # type: ignore[no-any-return]
        hidden_states = hidden_states + attention
        return hidden_states + self._mlp(self._apply_role("mlp_norm", hidden_states))

    def _apply_role(self, role: str, x: Tensor) -> Tensor:
        return _run(self, self._names[role], x)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        up_BTN = self._apply_role("up", x_BTD)
        if "gate" not in self._names:
            return self._apply_role("down", self.act_fn(up_BTN))
        return self._apply_role("down", self.act_fn(self._apply_role("gate", x_BTD)) * up_BTN)


def _make_role(config: LaminaConfig, role: str, forms: dict[str, dict[str, Any]]) -> nn.Module:
    if role in ("q_norm", "k_norm"):
        return LaminaRMSNorm(config.head_dim, config.norm_eps)
    if role not in LINEAR_ROLES:
        return make_norm(config)
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    value_dim = forms.get("v", {}).get("rank", config.head_dim)
    inner = forms.get("down", {}).get("rank", config.intermediate_size)
    widths = {
        "q": (hidden, heads * config.head_dim), "k": (hidden, kv_heads * config.head_dim),
        "v": (hidden, kv_heads * value_dim), "o": (heads * value_dim, hidden),
        "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
    }  # fmt: skip
    spec = forms.get(role, {"form": "dense"})
    bias = role in config.block["biases"]
    return FORMS[spec["form"]].build(*widths[role], bias, config.head_dim, spec.get("rank", 0))


class LayerInputs(NamedTuple):
    """What every layer gets besides the hidden states: positions, their angles, one mask per layer type."""

    position_ids: Tensor
    position_embeddings: tuple[Tensor, Tensor] | None
    masks: dict[str, Any]  # by layer type: a tensor, None (plainly causal), or flex attention's BlockMask

    def of(self, layer: LaminaDecoderLayer) -> dict[str, Any]:
        """The keyword arguments of `layer.forward`."""
        return {
            "attention_mask": self.masks[layer.layer_type],
            "position_embeddings": self.position_embeddings,
            "position_ids": self.position_ids,
        }


def default_position_ids(
    config: LaminaConfig, hidden_BTD: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None
) -> Tensor:
    """Positions (B or 1, T) of the tokens of this call.

    Rotary: the cache slot, whatever the padding. Learned: counted over the unpadded tokens of `attention_mask` (B, S),
    -1 on padding, as models with an offset table do.
    """
    num_tokens = hidden_BTD.shape[1]
    if config.block["positions"] and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        mask_BS = attention_mask.long()
        return (mask_BS.cumsum(1) * mask_BS - 1)[:, -num_tokens:]
    seen = past_key_values.get_seq_length() if past_key_values is not None else 0
    return (torch.arange(num_tokens, device=hidden_BTD.device) + seen).unsqueeze(0)


def prepare_layer_inputs(
    config: LaminaConfig,
    rotary: LaminaRotaryEmbedding | None,
    hidden_BTD: Tensor,
    attention_mask: Tensor | dict[str, Any] | None = None,
    past_key_values: Cache | None = None,
    position_ids: Tensor | None = None,
) -> LayerInputs:
    """Positions, rotary angles and masks for the layers of `config`, from the hidden states before any of them.

    `attention_mask` (B, S) is 1 on real tokens; None means no padding. A dict of ready masks passes through.
    Raises ValueError when `config._attn_implementation` is not set (a model sets it; for a lone layer say "sdpa").
    """
    if config._attn_implementation is None:
        raise ValueError('no attention implementation: set config._attn_implementation, e.g. to "sdpa", before this')
    if position_ids is None:
        padding = attention_mask if isinstance(attention_mask, Tensor) else None
        position_ids = default_position_ids(config, hidden_BTD, padding, past_key_values)
    if isinstance(attention_mask, dict):
        masks: dict[str, Any] = attention_mask  # generate() makes them ahead of a compiled forward
    else:
        masks = {
            layer_type: make_mask(
                config=config,
                inputs_embeds=hidden_BTD,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer_type, make_mask in MASKS.items()
            if layer_type in config.layer_types
        }
    angles = None if rotary is None else rotary(hidden_BTD, position_ids)
    return LayerInputs(position_ids, angles, masks)


# The model ------------------------------------------------------------------------------------------------------------


class LaminaPreTrainedModel(PreTrainedModel):
    config: LaminaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LaminaDecoderLayer"]  # noqa: RUF012 - the base class declares the types
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": LaminaDecoderLayer, "attentions": LaminaAttention}  # noqa: RUF012

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        self.base_model_prefix = config.block["embed"].partition(".")[0]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HeadLowRank):
            initialization.normal_(module.second, std=self.config.initializer_range)
            if module.bias is not None:
                initialization.zeros_(module.bias)


class LaminaModel(LaminaPreTrainedModel):
    """Embedding, decoder layers and final norm, at the block's paths below the base module."""

    _auto_class = "AutoModel"

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        block, positions = config.block, config.block["positions"]
        self._names = {key: tuple(_in_base(block[key]).split(".")) for key in ("embed", "layers", "final_norm")}
        layers = nn.ModuleList([LaminaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        _attach(self, _in_base(block["embed"]), nn.Embedding(config.vocab_size, config.hidden_size))
        if positions:
            self._names["positions"] = tuple(_in_base(positions["module"]).split("."))
            table = nn.Embedding(config.max_position_embeddings + positions["offset"], config.hidden_size)
            _attach(self, _in_base(positions["module"]), table)
        _attach(self, _in_base(block["layers"]), layers)
        _attach(self, _in_base(block["final_norm"]), make_norm(config))
        self.rotary_emb = LaminaRotaryEmbedding(config) if block["rotary"] else None
        self.gradient_checkpointing = False
        self._keys_to_ignore_on_load_unexpected = [rf"^{block['head']}\."]  # the causal model's file, loaded as a base
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return _find(self, self._names["embed"])

    def set_input_embeddings(self, value: nn.Module) -> None:
        _attach(self, ".".join(self._names["embed"]), value)

    def get_decoder(self) -> "LaminaModel":
        return self

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden_BTD: Tensor = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        inputs = prepare_layer_inputs(
            self.config, self.rotary_emb, hidden_BTD, attention_mask, past_key_values, position_ids
        )
        if positions := self.config.block["positions"]:
            hidden_BTD = hidden_BTD + _find(self, self._names["positions"])(inputs.position_ids + positions["offset"])
        for layer in _find(self, self._names["layers"]).children():
            mine = inputs.of(layer)  # type: ignore[arg-type]
            hidden_BTD = layer(hidden_BTD, past_key_values=past_key_values, use_cache=use_cache, **mine, **kwargs)
        hidden_BTD = _run(self, self._names["final_norm"], hidden_BTD)
        return BaseModelOutputWithPast(last_hidden_state=hidden_BTD, past_key_values=past_key_values)


class LaminaForCausalLM(LaminaPreTrainedModel, GenerationMixin):
    """The base model under its source's name (`model`, `transformer`) and the language-model head."""

    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        self._head = tuple(config.block["head"].split("."))
        base = LaminaModel(config)
        base._keys_to_ignore_on_load_unexpected = set()  # here a stray head tensor is an error worth seeing
        self.add_module(self.base_model_prefix, base)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.block["head_bias"])
        _attach(self, config.block["head"], head)
        self._tied_weights_keys = {f"{config.block['head']}.weight": f"{config.block['embed']}.weight"}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.get_decoder().get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.get_decoder().set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return _find(self, self._head)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        _attach(self, ".".join(self._head), new_embeddings)

    def get_decoder(self) -> LaminaModel:
        return cast(LaminaModel, getattr(self, self.base_model_prefix))

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
