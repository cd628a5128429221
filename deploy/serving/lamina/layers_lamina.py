# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""One decoder layer: norm, attention, MLP; and the embedding table.

B batch, T tokens of this call, S cached tokens, D hidden, H query heads, G key/value heads, d head_dim, r a rank or the
width of a value head, c rotary width (c <= d), N MLP width, n heads of a projection (H or G).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .block_lamina import ATTENTION_ROLES, LINEAR_ROLES, attention_path
from .configuration_lamina import LaminaConfig
from .latent_attention_lamina import attend_in_blocks, check_groups, check_room
from .rotary_lamina import Angles, rotate, rotate_once


class LaminaRMSNorm(nn.Module):
    """x / rms(x) · weight, the root mean square in float32; with an offset · (offset + weight), all in float32."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.variance_epsilon, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """x (…, width) → the same shape and dtype."""
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (self.offset + self.weight.float())).to(dtype) if self.offset else self.weight * x.to(dtype)


def make_norm(config: LaminaConfig) -> nn.Module:
    """The norm that the layers and the end of the stack use: weight (D), and bias (D) for `layer`."""
    if config.block["norm"] == "layer":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return LaminaRMSNorm(config.hidden_size, config.norm_eps, config.block["norm_offset"])


class ScaledEmbedding(nn.Embedding):
    """Embeddings (…, D) of token ids (…), times `embed_scale` in the weight's dtype."""

    def __init__(self, num_embeddings: int, embedding_dim: int, embed_scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.embed_scale = embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (…) → embeddings (…, D)."""
        return super().forward(ids) * self.weight.new_full((), self.embed_scale)


def make_embedding(config: LaminaConfig) -> nn.Embedding:
    """The table (V, D) of token embeddings, scaled where the block says so."""
    scale, width = config.block["embed_scale"], config.hidden_size
    if scale is None:
        return nn.Embedding(config.vocab_size, width)
    return ScaledEmbedding(config.vocab_size, width, width**0.5 if scale == "sqrt(hidden_size)" else float(scale))


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


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path below `root`, making plain containers on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def find(root: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Looked up at each call, not remembered: quantizers, adapters and engines replace modules in place."""
    for name in names:
        root = getattr(root, name)
    return root


Names = tuple[str, ...]  # a module path, split
Memo = dict[tuple[Names, tuple[str, ...]], Any]  # what sources gave in this call, by path and further arguments


class _Roles:
    """Calls the modules of roles at their paths below this module, each once per forward."""

    _names: dict[str, Names]
    _sources: dict[str, tuple[Names, tuple[str, ...]]]

    def _given(self, role: str, x: Tensor, memo: Memo) -> Any:
        """The output of the role's source on x; None if it has none."""
        if role not in self._sources:
            return None
        names, args = self._sources[role]
        if (names, args) not in memo:
            memo[names, args] = find(cast(nn.Module, self), names)(x, *args)
        return memo[names, args]

    def _apply_role(self, role: str, x: Tensor, given: Any = None) -> Tensor:
        module = find(cast(nn.Module, self), self._names[role])
        out: Tensor = module(x) if given is None else module(x, given)
        return out


class LaminaAttention(_Roles, nn.Module):
    """Self-attention with r numbers per value head; its projections are children at the block's paths.

    A layer with latent keys or values caches one head for each of both: latents, or all dense heads side by side.
    """

    block = 512  # cached tokens whose keys are made of latents at a time

    def __init__(
        self,
        config: LaminaConfig,
        layer_idx: int,
        names: dict[str, Names],
        sources: dict[str, tuple[Names, tuple[str, ...]]],
    ) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self._names, self._sources = names, sources
        form, spec = config.form_of(layer_idx, "v")
        shape = config.layer_shape(layer_idx)
        self.head_dim, self.value_dim = shape.head_dim, form.head_width(shape, spec)
        self._latent = {role for role in ("k", "v") if config.form_of(layer_idx, role)[0].latent}
        self.num_key_value_groups = shape.num_attention_heads // shape.num_key_value_heads
        self.scaling = shape.head_dim**-0.5
        self.is_causal = True
        self.interleaved = config.block["rotary"] == "interleaved"
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        slot_embeddings: Angles | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Normed hidden states (B, T, D) → (what is added to the residual (B, T, D), weights (B, H, T, S) or None).

        `attention_mask` is the mask of the layer's type; the angles are cos and sin (B, T, c) of this call's tokens,
        `slot_embeddings` those (1, S, c) of all cached slots, for latent keys.
        """
        memo: Memo = {}
        query = self._heads("q", hidden_states, self._given("q", hidden_states, memo))
        key, value = (self._stored(role, hidden_states, memo) for role in ("k", "v"))
        if position_embeddings is not None:
            query = rotate(query, *position_embeddings, self.interleaved)
            if "k" not in self._latent:
                key = rotate(key, *position_embeddings, self.interleaved)
        if self.value_dim < self.head_dim:
            value = value.contiguous()  # engines that widen values by .view refuse a slice of a fused projection
        if past_key_values is not None:
            key, value = self._update(past_key_values, key, value)
            if self._in_blocks(query, attention_mask):
                read = partial(self._read_block, hidden_states, key, value, slot_embeddings)
                mixed = attend_in_blocks(query, read, key.shape[2], attention_mask, self.scaling, self.block)
                return self._output(self._of_heads(hidden_states, mixed), hidden_states), None
        key, value = self._read(hidden_states, key, value, slot_embeddings or position_embeddings)
        padding = self._padding(query.shape[2])
        if padding > 0:
            value = nn.functional.pad(value, (0, padding))
        elif padding < 0:
            query, key = (nn.functional.pad(x, (0, -padding)) for x in (query, key))

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
        if padding > 0:
            attn_output = attn_output[..., : self.value_dim]
        return self._output(attn_output, hidden_states), attn_weights

    def _output(self, heads_BTHw: Tensor, hidden_states: Tensor) -> Tensor:
        """The output projection of what the heads give."""
        heads = heads_BTHw.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self._apply_role("o", heads, self._given("o", heads, {}))

    def _read(self, x_BTD: Tensor, key: Tensor, value: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, d) and values (B, G, S, w) of all slots, made of their latents where those are cached."""
        if "k" in self._latent:
            key = self._heads("k", x_BTD, key.squeeze(1))
            key = key if angles is None else rotate(key, *angles, self.interleaved)
        if "v" in self._latent:
            value = self._heads("v", x_BTD, value.squeeze(1)).expand(-1, key.shape[1], -1, -1)
        return key, value

    def _read_block(
        self, x_BTD: Tensor, key: Tensor, value: Tensor, angles: Angles | None, slots: slice
    ) -> tuple[Tensor, Tensor]:
        """Keys (B, G, s, d) of some slots, made of their latents; values (B, G, s, w), or latents (B, 1, s, r)."""
        key, value = key[:, :, slots], value[:, :, slots]
        if "k" in self._latent:
            key = self._heads("k", x_BTD, key.squeeze(1))
            if angles is not None:
                mine = angles[0][:, slots], angles[1][:, slots]
                key = rotate(key, *mine, True) if self.interleaved else rotate_once(key, *mine)
        return key, value

    def _of_heads(self, x_BTD: Tensor, mixed_BTHw: Tensor) -> Tensor:
        """What the heads give (B, T, H, w), of mixed values or of mixed latents (B, T, H, r).

        Values are linear in their latents, and the weights add up to 1: v turns one mixture for each query head where
        it would turn every cached token.
        """
        if "v" not in self._latent:
            return mixed_BTHw
        num_tokens, num_heads = mixed_BTHw.shape[1:3]
        of_all = self._heads("v", x_BTD, mixed_BTHw.flatten(1, 2))  # (B, G or 1, T·H, w): by every KV head
        groups = of_all.shape[1]
        of_all = of_all.unflatten(2, (num_tokens, groups, num_heads // groups))
        return cast(Tensor, of_all.diagonal(dim1=1, dim2=3).permute(0, 1, 4, 2, 3).flatten(2, 3))

    def _in_blocks(self, query: Tensor, mask: Any) -> bool:
        """Whether to read latents block by block: in decoding, where making all keys at once costs time and memory.

        A prefill reads them once for many queries, a compiled graph would hold every block, and other implementations
        of attention have a reason to be chosen.
        """
        decoding = query.shape[2] == 1 and not torch.is_grad_enabled()
        plain = self.config._attn_implementation == "sdpa" and (mask is None or isinstance(mask, Tensor))
        return bool(self._latent) and decoding and plain and not torch.compiler.is_compiling()

    def _heads(self, role: str, x_BTD: Tensor, given: Any) -> Tensor:
        """The output of q, k or v, normed: (B, heads, T, width); of all cached slots if latents of them are given."""
        width = self.value_dim if role == "v" else self.head_dim
        out_BTGw: Tensor = self._apply_role(role, x_BTD, given).unflatten(-1, (-1, width))
        if f"{role}_norm" in self._names:
            out_BTGw = self._apply_role(f"{role}_norm", out_BTGw)
        return out_BTGw.transpose(1, 2)

    def _stored(self, role: str, x_BTD: Tensor, memo: Memo) -> Tensor:
        """What the cache gets of k or v, but for the rotation: (B, heads, T, width), or latents (B, 1, T, r)."""
        given = self._given(role, x_BTD, memo)
        return cast(Tensor, given).unsqueeze(1) if role in self._latent else self._heads(role, x_BTD, given)

    def _update(self, cache: Cache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All cached keys and values. Static caches take the number of heads from the keys, so it must be common."""
        check_groups(cache, self.layer_idx, key, value)
        if not self._latent:
            check_room(cache, self.layer_idx, key, value)
            return cache.update(key, value, self.layer_idx)
        widths = {"k": self.head_dim, "v": self.value_dim}
        key, value = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (key, value))
        check_room(cache, self.layer_idx, key, value)
        key, value = (
            x if role in self._latent else x.squeeze(1).unflatten(-1, (-1, widths[role])).transpose(1, 2)
            for role, x in zip(widths, cache.update(key, value, self.layer_idx), strict=True)
        )
        return key, value

    def _padding(self, num_queries: int) -> int:
        """Zeros to add to each value head (or, negative, to query and key heads) for the kernel, never for the cache.

        Fused kernels want r = d; without them a prefill builds the T × S scores (4 times slower, and the memory).
        One query has no such scores, and there reading r instead of d numbers per token wins.
        """
        kernel = self.config._attn_implementation or ""
        fused = "flash" in kernel or ("sdpa" in kernel and num_queries > 1)
        return self.head_dim - self.value_dim if fused else 0


class LaminaDecoderLayer(_Roles, GradientCheckpointingLayer):
    """One decoder layer; state dict keys are those of the source's layer.

    Each role's module is called once per forward: q, k and v on one input, o on (B, T, H·r) with the heads in order,
    down on the MLP's hidden values, so that forward hooks on `role(...)` see what statistics are taken of. Some forms'
    modules get a second argument, and latent keys and values are those of all cached tokens.
    """

    attention_class = LaminaAttention  # an engine's model has its own

    def __init__(self, config: LaminaConfig, layer_idx: int) -> None:
        super().__init__()
        modules: dict[str, str] = config.block["modules"]
        shape = config.layer_shape(layer_idx)
        self.layer_type = config.layer_types[layer_idx]
        self.latent_keys = config.form_of(layer_idx, "k")[0].latent
        self.parallel = config.block["parallel"]
        self._names = {role: tuple(path.split(".")) for role, path in modules.items()}
        self._sources = {}
        made: dict[str, nn.Module] = {path: _make_role(config, layer_idx, role) for role, path in modules.items()}
        for role in LINEAR_ROLES:
            form, spec = config.form_of(layer_idx, role)
            if role in modules and (source := form.source(shape, role, spec)):
                self._sources[role] = (tuple(source.path.split(".")), source.args)
                if source.path not in made and (shared := form.shared_module(shape, role, spec)) is not None:
                    made[source.path] = shared
        attention = attention_path(modules)
        self._attention = tuple(attention.split("."))
        depth = len(self._attention)
        inside = {r: names[depth:] for r, names in self._names.items() if r in ATTENTION_ROLES}
        sources = {r: (names[depth:], args) for r, (names, args) in self._sources.items() if r in ATTENTION_ROLES}
        attach(self, attention, self.attention_class(config, layer_idx, inside, sources))
        for path, module in made.items():
            attach(self, path, module)
        self.act_fn = ACT2FN[config.hidden_act]

    def role(self, role: str) -> nn.Module:
        """The module of a role ("q", "down", "input_norm", …); raises KeyError for one that the block lacks."""
        return find(self, self._names[role])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Angles | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        slot_embeddings: Angles | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states (B, T, D) → (B, T, D); the other arguments are those of `LayerInputs.of`."""
        normed = self._apply_role("input_norm", hidden_states)
        attention, _ = find(self, self._attention)(
            hidden_states=normed,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            slot_embeddings=slot_embeddings,
            **kwargs,
        )
        if self.parallel:
            normed = self._apply_role("mlp_norm", hidden_states) if "mlp_norm" in self._names else normed
            return attention + self._mlp(normed) + hidden_states  # type: ignore[no-any-return]
        hidden_states = hidden_states + attention
        return hidden_states + self._mlp(self._apply_role("mlp_norm", hidden_states))

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        memo: Memo = {}
        inner_BTN = self._apply_role("up", x_BTD, self._given("up", x_BTD, memo))
        if "gate" in self._names:
            gate_BTN = self._apply_role("gate", x_BTD, self._given("gate", x_BTD, memo))
            inner_BTN = self.act_fn(gate_BTN) * inner_BTN
        else:
            inner_BTN = self.act_fn(inner_BTN)
        return self._apply_role("down", inner_BTN, self._given("down", inner_BTN, {}))


def _make_role(config: LaminaConfig, layer_idx: int, role: str) -> nn.Module:
    if role in ("q_norm", "k_norm"):
        return LaminaRMSNorm(config.layer_shape(layer_idx).head_dim, config.norm_eps, config.block["norm_offset"])
    if role not in LINEAR_ROLES:
        return make_norm(config)
    form, spec = config.form_of(layer_idx, role)
    return form.module(config.layer_shape(layer_idx), role, spec)
