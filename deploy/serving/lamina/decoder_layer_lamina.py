# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""A decoder layer over whole sequences: norm, attention, MLP.

This file does not import transformers' modelling code, which takes seconds: layers_lamina adds the parts that need it
(caches, its attention functions, gradient checkpointing).

B batch, T tokens of this call, S cached tokens, D hidden, H query heads, G key/value heads, d head_dim, r a rank or the
width of a value head, c rotary width (c <= d), N MLP width, n heads of a projection (H or G).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .activation_lamina import Channels
from .attention_lamina import attend
from .block_lamina import (
    ATTENTION,
    ATTENTION_ROLES,
    HEAD_NORM_ROLES,
    INDEXED,
    LINEAR_ROLES,
    MLP,
    SINKS,
    SLIDING,
    attention_path,
    clamp_of,
    foreign_path,
    foreign_roles,
    has_part,
)
from .foreign_lamina import foreign_layer, make_foreign_attention
from .layers_config_lamina import LayersConfig
from .mixture_lamina import INPUTS, ROUTER, ROUTER_BIAS, SHARED_GATE, Mixing, Router, split_role
from .norms_lamina import LaminaRMSNorm, make_head_norm, make_norm
from .rotary_lamina import Angles, rotate

WHOLE = {"form": "dense"}
IN_PLACE = ("dense", "narrow")  # forms that a foreign module builds itself


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path below `root`, creating containers as needed."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def find(root: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Return the module at a path. Not cached, because quantizers, adapters and engines replace modules in place."""
    for name in names:
        root = getattr(root, name)
    return root


Names = tuple[str, ...]  # a module path, split
Memo = dict[tuple[Names, tuple[str, ...]], Any]  # outputs of sources in this call, by path and further arguments


class _Roles:
    """Calls the modules of roles, at their paths below this module, once per forward pass."""

    _names: dict[str, Names]
    _sources: dict[str, tuple[Names, tuple[str, ...]]]

    def _source_output(self, role: str, x: Tensor, memo: Memo) -> Any:
        """Return the output of the role's source on x; None if it has none."""
        if role not in self._sources:
            return None
        names, args = self._sources[role]
        if (names, args) not in memo:
            memo[names, args] = find(cast(nn.Module, self), names)(x, *args)
        return memo[names, args]

    def _apply_role(self, role: str, x: Tensor, source: Any = None) -> Tensor:
        module = find(cast(nn.Module, self), self._names[role])
        out: Tensor = module(x) if source is None else module(x, source)
        return out


class SelfAttention(_Roles, nn.Module):
    """Self-attention with r numbers per value head; its projections are children at the block's paths.

    Uses torch's attention kernel on whole sequences.
    """

    sinks: Tensor | None

    def __init__(
        self,
        config: LayersConfig,
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
        self.scaling = config.attention_scale(layer_idx)
        self.softcap = config.block["attention_softcap"]
        sinks = nn.Parameter(torch.zeros(shape.num_attention_heads)) if SINKS in config.block["modules"] else None
        self.register_parameter(SINKS, sinks)
        self._head_norms = config.block["head_norms"]
        self.is_causal = True
        self.interleaved = config.block["rotary"] == "interleaved"
        sliding = config.layer_types[layer_idx] == SLIDING
        self.sliding_window = config.sliding_window if sliding else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map normed hidden states (B, T, D) of whole sequences, without padding, to the block's output, and None."""
        assert attention_mask is None
        assert past_key_values is None
        query, key, value = self._projected(hidden_states, position_embeddings)
        key, value = self._read(hidden_states, key, value, position_embeddings)
        query, key, value = padded(query, key, value, self.head_dim - self.value_dim)
        heads = attend(query, key, value, self.scaling, self.sliding_window, self.softcap, self.sinks)
        return self._output(heads[..., : self.value_dim], hidden_states), None

    def _projected(self, hidden_states: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, d), and keys and values as a cache holds them, with latents not rotated."""
        memo: Memo = {}
        query = self._heads("q", hidden_states, self._source_output("q", hidden_states, memo))
        key, value = (self._stored(role, hidden_states, memo) for role in ("k", "v"))
        query = self._rotated("q", query, angles)
        return query, key if "k" in self._latent else self._rotated("k", key, angles), value

    def _rotated(self, role: str, heads: Tensor, angles: Angles | None) -> Tensor:
        """Rotate queries or keys (B, n, T, d), and norm them if the norms follow the rotation."""
        heads = heads if angles is None else rotate(heads, *angles, self.interleaved)
        late = self._head_norms == "rotated" and f"{role}_norm" in self._names
        return self._apply_role(f"{role}_norm", heads) if late else heads

    def _output(self, heads_BTHw: Tensor, hidden_states: Tensor) -> Tensor:
        """Apply the output projection to the heads' outputs."""
        heads = heads_BTHw.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self._apply_role("o", heads, self._source_output("o", heads, {}))

    def _read(self, x_BTD: Tensor, key: Tensor, value: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """Return keys (B, G, S, d) and values (B, G, S, w) of all slots, computed from latents if these are cached."""
        if "k" in self._latent:
            key = self._rotated("k", self._heads("k", x_BTD, key.squeeze(1)), angles)
        if "v" in self._latent:
            value = self._heads("v", x_BTD, value.squeeze(1)).expand(-1, key.shape[1], -1, -1)
        return key, value

    def _heads(self, role: str, x_BTD: Tensor, source: Any) -> Tensor:
        """Return the normed output of q, k or v (B, heads, T, width), for all cached slots if `source` has latents."""
        width = self.value_dim if role == "v" else self.head_dim
        out, norm = self._apply_role(role, x_BTD, source), f"{role}_norm"
        if norm in self._names and self._head_norms == "all":
            out = self._apply_role(norm, out)
        out_BTGw: Tensor = out.unflatten(-1, (-1, width))
        if norm in self._names and self._head_norms == "each":
            out_BTGw = self._apply_role(norm, out_BTGw)
        return out_BTGw.transpose(1, 2)

    def _stored(self, role: str, x_BTD: Tensor, memo: Memo) -> Tensor:
        """Return the cache's part of k or v, before rotation: (B, heads, T, width), or latents (B, 1, T, r)."""
        source = self._source_output(role, x_BTD, memo)
        return cast(Tensor, source).unsqueeze(1) if role in self._latent else self._heads(role, x_BTD, source)


def padded(query: Tensor, key: Tensor, value: Tensor, missing: int) -> tuple[Tensor, Tensor, Tensor]:
    """Append `missing` zeros to each value head or, if negative, to each query and key head."""
    if missing > 0:
        value = nn.functional.pad(value, (0, missing))
    elif missing < 0:
        query, key = (nn.functional.pad(x, (0, -missing)) for x in (query, key))
    return query, key, value


class DecoderLayer(Mixing, _Roles, nn.Module):
    """A decoder layer. Its state dict has the keys of the source's layer.

    Each role's module is called once per forward pass: q, k and v with the same input, o with (B, T, H·r), heads in
    order, down with the MLP's channels. Forward hooks on `role(...)` see the inputs of statistics. Modules of some
    forms get a second argument. Latent keys and values are computed for all cached tokens.
    """

    attention_class: type[SelfAttention] = SelfAttention  # replaced in transformers' model and in engines

    def __init__(self, config: LayersConfig, layer_idx: int) -> None:
        super().__init__()
        modules = config.layer_modules(layer_idx)
        self.layer_type = config.layer_types[layer_idx]
        self.latent_keys = config.form_of(layer_idx, "k")[0].latent
        self.rotates = config.rotates(layer_idx)
        self.parallel, self.residual_scale = config.block["parallel"], config.block["residual_scale"]
        self._names = {role: tuple(path.split(".")) for role, path in modules.items()}
        self._sources = {}
        foreign = foreign_roles(config.block)
        built: dict[str, nn.Module] = {
            path: _make_role(config, layer_idx, role)
            for role, path in modules.items()
            if role not in (ROUTER_BIAS, SINKS) and role not in foreign
        }
        for role in modules:
            block, local = split_role(role)
            if local not in LINEAR_ROLES:
                continue
            shape, (form, spec) = config.layer_shape(layer_idx, block), config.form_of(layer_idx, role)
            if source := form.source(shape, local, spec):
                self._sources[role] = (tuple(source.path.split(".")), source.args)
                if source.path not in built and (shared := form.shared_module(shape, local, spec)) is not None:
                    built[source.path] = shared
        own_foreign = foreign_path(config.block, self.layer_type)
        kind = foreign_layer(config.foreign, self.layer_type) if own_foreign else None
        self.recurrent, self.masked = (False, False) if kind is None else (kind.recurrent, kind.masked)
        self.indexer = shared_indexer(config, layer_idx) if kind is not None and kind.shares else None
        self.layer_idx = layer_idx
        self.chunk = config.attention_chunk_size if kind is not None and kind.chunked else None
        self.attends, self.has_mlp = (has_part(config.block, self.layer_type, part) for part in (ATTENTION, MLP))
        if self.attends:
            attention = own_foreign or attention_path(modules)
            self._attention = tuple(attention.split("."))
            attach(self, attention, self._make_attention(config, layer_idx))
        inside = (role for role in foreign if role in modules)
        for role in (role for role in inside if config.forms[layer_idx].get(role, WHOLE)["form"] not in IN_PLACE):
            form, spec = config.form_of(layer_idx, role)
            built[modules[role]] = form.module(config.layer_shape(layer_idx), role, spec)
        for path, module in built.items():
            attach(self, path, module)
        self.act_fn = Channels(config.hidden_act, clamp_of(config.block))
        self.weighs_inputs = config.mixture is not None and config.mixture["weighs"] == INPUTS
        self._score_bias = _attach_score_bias(self, config, layer_idx) if ROUTER_BIAS in modules else None

    def _make_attention(self, config: LayersConfig, layer_idx: int) -> nn.Module:
        if foreign_path(config.block, self.layer_type):
            return make_foreign_attention(config, layer_idx)
        depth = len(self._attention)
        inside = {r: names[depth:] for r, names in self._names.items() if r in ATTENTION_ROLES}
        sources = {r: (names[depth:], args) for r, (names, args) in self._sources.items() if r in ATTENTION_ROLES}
        return self.attention_class(config, layer_idx, inside, sources)

    def role(self, role: str) -> nn.Module:
        """Return the module of a role ("q", "down", "input_norm", …). Raises KeyError if the block lacks it."""
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
        """Map hidden states (B, T, D) to the same shape; the other arguments are those of `LayerInputs.of`."""
        if self.attends:
            attention, normed = self._attended(
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                slot_embeddings=slot_embeddings,
                **kwargs,
            )
            if self.parallel:
                normed = self._normed("mlp_norm", hidden_states) if "mlp_norm" in self._names else normed
                return attention + self.written("mlp_out_norm", self._feed_forward(normed)) + hidden_states
            hidden_states = hidden_states + attention
        return self.behind_attention(hidden_states) if self.has_mlp else hidden_states

    def behind_attention(self, stream: Tensor) -> Tensor:
        """Return the layer's output from the residual stream (B, T, D) that its MLP reads, if it is not parallel."""
        return stream + self.written("mlp_out_norm", self._feed_forward(self._normed("mlp_norm", stream)))

    def _attended(
        self, hidden_states: Tensor, slot_embeddings: Angles | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the attention's contribution to the residual stream, and its normed inputs."""
        normed, module = self._normed("input_norm", hidden_states), find(self, self._attention)
        if self.recurrent:
            attention = module(normed, kwargs.get("past_key_values"), kwargs.get("attention_mask"))
            return self.written("attention_out_norm", attention), normed
        chunked = self.chunk is not None and normed.shape[1] > self.chunk
        if (self.masked or chunked) and kwargs.get("attention_mask") is None:  # of whole sequences
            kwargs["attention_mask"] = whole_mask(normed.shape[1], self.chunk, normed.device)
        if slot_embeddings is not None:
            kwargs["slot_embeddings"] = slot_embeddings  # only for latent keys; foreign modules lack the argument
        choices = kwargs.pop("choices", None)
        if self.indexer is not None:
            kwargs["prev_topk_indices"] = all_tokens(normed) if choices is None else choices[self.indexer]
        attention, *others = module(hidden_states=normed, **kwargs)
        if choices is not None and self.indexer is None and others:
            choices[self.layer_idx] = others[-1]
        return self.written("attention_out_norm", attention), normed

    def _normed(self, norm: str, x: Tensor) -> Tensor:
        """Return the output of a norm, or x itself if the block lacks it."""
        return self._apply_role(norm, x) if norm in self._names else x

    def written(self, norm: str, x: Tensor) -> Tensor:
        """Return a block's contribution to the residual stream: its output, normed and scaled."""
        x = self._normed(norm, x)
        return x if self.residual_scale is None else x * self.residual_scale

    def output_gains(self, norm: str) -> tuple[Tensor, float | None]:
        """Return the factors (D or 1) of `written`, and the eps of its norm, or None without a norm."""
        scale = 1.0 if self.residual_scale is None else self.residual_scale
        if norm not in self._names:
            return torch.full((1,), scale), None
        module = cast(LaminaRMSNorm, self.role(norm))
        return scale * (module.offset + module.weight.detach().float()), module.variance_epsilon

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self._mixture(x_BTD) if ROUTER in self._names else self._mlp(x_BTD)

    def _mlp(self, x_BTD: Tensor, block: str = "", scale: Tensor | None = None) -> Tensor:
        """Apply the dense MLP, or the expert `block` with channels multiplied by `scale` (…, 1)."""
        gate, up, down = (f"{block}.{role}" if block else role for role in ("gate", "up", "down"))
        memo: Memo = {}
        readers = (gate, up) if gate in self._names else (up,)
        inner_BTN = self.act_fn(*(self._apply_role(r, x_BTD, self._source_output(r, x_BTD, memo)) for r in readers))
        if scale is None:
            return self._apply_role(down, inner_BTN, self._source_output(down, inner_BTN, {}))
        scale = scale.to(inner_BTN.dtype)
        inner_BTN = inner_BTN * scale
        out_BTD = self._apply_role(down, inner_BTN, self._source_output(down, inner_BTN, {}))
        bias_D = getattr(find(self, self._names[down]), "bias", None)
        return out_BTD if bias_D is None else out_BTD + (scale - 1) * bias_D

    def _router_bias(self) -> Tensor | None:
        """Return the numbers (E) that are added to the scores for the choice of experts, or None."""
        if self._score_bias is None:
            return None
        bias_E: Tensor = getattr(find(self, self._score_bias[:-1]), self._score_bias[-1])
        return bias_E


def shared_indexer(config: LayersConfig, layer_idx: int) -> int:
    """Return the layer whose indexer a layer without an indexer shares."""
    types = config.layer_types[:layer_idx]
    return max(layer for layer, layer_type in enumerate(types) if layer_type == INDEXED)


def all_tokens(x_BTD: Tensor) -> Tensor:
    """Return the choice (B, T, T) of all tokens, which an indexer makes in sequences of at most `index_topk` tokens."""
    batch, count = x_BTD.shape[:2]
    return torch.arange(count, device=x_BTD.device, dtype=torch.int32).expand(batch, count, count)


def whole_mask(num_tokens: int, chunk: int | None, device: torch.device) -> Tensor:
    """Return the causal mask (1, 1, T, T) of a whole sequence, within chunks if there are any."""
    place_T = torch.arange(num_tokens, device=device)
    mask_TT = place_T[:, None] >= place_T
    if chunk is not None:
        mask_TT &= place_T[:, None] // chunk == place_T // chunk
    return mask_TT[None, None]


def _make_role(config: LayersConfig, layer_idx: int, role: str) -> nn.Module:
    if role in HEAD_NORM_ROLES:
        return make_head_norm(config, layer_idx, role)
    if role == ROUTER:
        mixture, sizes = config.mixture, config.layer_mixture(layer_idx)
        assert mixture is not None
        assert sizes is not None
        return Router(mixture, config.hidden_size, sizes)
    if role == SHARED_GATE:
        return nn.Linear(config.hidden_size, 1, bias=False)
    block, local = split_role(role)
    if local not in LINEAR_ROLES:
        return make_norm(config)
    form, spec = config.form_of(layer_idx, role)
    return form.module(config.layer_shape(layer_idx, block), local, spec)


def _attach_score_bias(layer: nn.Module, config: LayersConfig, layer_idx: int) -> Names:
    """Add the score bias (E) to a layer; return its path. It is float32 in every checkpoint."""
    mixture, sizes = config.mixture, config.layer_mixture(layer_idx)
    assert mixture is not None
    assert sizes is not None
    path = tuple(mixture["score_bias"].split("."))
    parameter = nn.Parameter(torch.zeros(sizes.experts, dtype=torch.float32), requires_grad=False)
    find(layer, path[:-1]).register_parameter(path[-1], parameter)
    return path
