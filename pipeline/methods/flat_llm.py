"""FLAT-LLM: value/output by head-wise PCA, MLP by Nyström, ranks by importance. docs/methods.md#flat-llm.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, r and k the ranks kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import FlatLLM
from manifests.records import Curve, FormSpec
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.kernels.elimination import eliminate, prune
from pipeline.kernels.heads import by_heads, diagonal_blocks, encode_heads, of_heads
from pipeline.kernels.nystrom import nested_losses, nested_outputs, refit_with_error, ridge_leverage, select_leverage
from pipeline.kernels.sensitivity import factored, projection_losses, pulled
from pipeline.kernels.spectra import dropped_share, head_pca, output_gram, spectrum, weighted_head_pca
from pipeline.methods.base import MethodBase
from pipeline.methods.by_loss import curve_of
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.importance import preserve_importance

MLP_ROLES = ("gate", "up", "down")
FORMS = {"attention": ("value", "head_pca"), "query_key": ("query_key", "head_low_rank"), "mlp": ("mlp", "pruned")}
HIDDEN, CONTEXT = Moment("down.in"), Moment("o.in")
AFTER_ATTENTION, AFTER_LAYER = Moment("mid", kind="gradient"), Moment("out", kind="gradient")


@dataclass(frozen=True)
class FlatLLMMethod(MethodBase[FlatLLM]):
    """`method: flat_llm` with the settings of its manifest entry."""

    name: ClassVar[str] = "flat_llm"

    @property
    def fixed_ranks(self) -> bool:
        """Whether the entry gives ranks outright."""
        return self.entry.ranks is not None

    @property
    def uniform(self) -> bool:
        """As the entry says."""
        return self.entry.uniform

    @property
    def scores(self) -> frozenset[str]:
        """With `allocation: importance` ranks follow the layers' importance (IPRS)."""
        follows = self.entry.allocation == "importance" and not (self.fixed_ranks or self.uniform)
        return frozenset({"importance"}) if follows else frozenset()

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """Groups `attention` (v, o), `mlp` and `query_key` (q, k) of every chosen layer.

        Raises ValueError on layers that do not exist, and on ranks given for what is off or beyond the full rank.
        """
        groups = []
        for layer in self.chosen_layers(geometry):
            self._check_ranks(layer)
            if self.entry.attention:
                groups.append(Group(layer.index, "attention", ("v", "o"), self._attention_moments(layer)))
            if self.entry.query_key == "head_pca":
                groups.append(Group(layer.index, "query_key", ("q", "k"), _query_key_moments(layer)))
            if self.entry.mlp:
                groups.append(Group(layer.index, "mlp", _mlp_roles(layer), self._mlp_moments()))
        return tuple(groups)

    def _check_ranks(self, geometry: LayerGeometry) -> None:
        given = self.entry.ranks.model_dump() if self.entry.ranks is not None else {}
        on = {"value": self.entry.attention, "mlp": self.entry.mlp, "query_key": self.entry.query_key != "none"}
        full = {"value": geometry.head_dim, "mlp": geometry.intermediate, "query_key": geometry.head_dim}
        for name, rank in given.items():
            if rank is not None and not on[name]:
                raise ValueError(f"ranks.{name}: {rank} is given, but this entry does not compress it")
            if rank is not None and rank > full[name]:
                raise ValueError(f"ranks.{name}: {rank} is beyond the full rank {full[name]} of layer {geometry.index}")

    def _attention_moments(self, geometry: LayerGeometry) -> tuple[Moment, ...]:
        return (self._value_moment(geometry), *((CONTEXT, AFTER_ATTENTION) if self.entry.needs_gradient else ()))

    def _mlp_moments(self) -> tuple[Moment, ...]:
        return (HIDDEN, *((AFTER_LAYER,) if self.entry.needs_gradient else ()))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predicted loss by rank of the values, or by width of the MLP."""
        (variable,) = self.group_variables(group, geometry)
        if group.name == "mlp":
            metric, down_DN = factored(statistics.mean(AFTER_LAYER)[0]), weights["down.weight"].double()
            felt_DN, hidden_NN = metric.factor.T @ down_DN, statistics.mean(HIDDEN)[0]
            chooses_DN = felt_DN if self.entry.weighting == "loss" else down_DN
            priority_N = self._priority(hidden_NN, chooses_DN, variable.least)
            losses = metric.scale * nested_losses(nested_outputs(hidden_NN, felt_DN, priority_N))
            return curve_of(variable, lambda rank: float(losses[rank]), lambda rank: 0)
        output_DF = weights["o.weight"].double()
        encode_Gdd, decode_Gdd, _, _ = self._basis(geometry, output_DF, statistics, geometry.head_dim)
        metric_FF = pulled(output_DF, statistics.mean(AFTER_ATTENTION)[0])
        losses = projection_losses(metric_FF, statistics.mean(CONTEXT)[0], encode_Gdd, decode_Gdd)
        return curve_of(variable, lambda rank: float(losses[rank]), lambda rank: geometry.kv_heads * rank)

    def _priority(self, hidden_NN: Tensor, chooses_DN: Tensor, least: int) -> Tensor:
        """The channels in the order in which widths take them in."""
        if self.entry.selection == "leverage":
            scores_N, _ = ridge_leverage(hidden_NN, self.entry.ridge)
            return torch.sort(scores_N, descending=True, stable=True).indices
        order_n = eliminate(hidden_NN, chooses_DN, least).order
        stays_N = torch.ones(len(hidden_NN), dtype=torch.bool, device=order_n.device).index_fill_(0, order_n, False)
        return torch.cat((stays_N.nonzero()[:, 0], order_n.flip(0)))

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """One rank for each group: `value` (cap d), `query_key` (cap d), `mlp` (cap N)."""
        return (_rank_variable(group, geometry, self.entry.multiple(geometry.hidden)),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """w_l · cap for every variable, with w_l from Algorithm 1 (IPRS) or the ratio itself; or the ranks given."""
        variables = self.rank_variables(geometry)
        if self.entry.ranks is not None:
            given = self.entry.ranks.model_dump()
            return {variable.key: float(given[variable.name] or variable.cap) for variable in variables}
        layers = self.entry.chosen_layers(geometry.num_layers)
        shares = [ratio] * len(layers)
        if self.scores:
            shares = preserve_importance([scores.importance[layer] for layer in layers], ratio)
        share_of = dict(zip(layers, shares, strict=True))
        return {variable.key: share_of[variable.layer] * variable.cap for variable in variables}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Dispatches on the group; see the three functions below."""
        forms = self.forms(group, geometry, ranks)
        if not forms:
            return Solution(dict(weights), {}, {"dense": True})
        if group.name == "attention":
            found = self._compress_attention(geometry, weights, statistics, ranks["value"])
        elif group.name == "query_key":
            found = _compress_query_key(geometry, weights, statistics.moments, ranks["query_key"])
        else:
            found = self._compress_mlp(geometry, weights, statistics, ranks["mlp"])
        return replace(found, forms=forms)

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """By the group: `head_pca`, `pruned`, or `head_low_rank`, where that stores less than the weights."""
        D, d = geometry.hidden, geometry.head_dim
        name, form = FORMS[group.name]
        if group.name == "query_key" and ranks[name] * (D + d) >= d * D:
            return {}
        return dict.fromkeys(group.roles, FormSpec(form=form, rank=ranks[name]))

    def _value_moment(self, geometry: LayerGeometry) -> Moment:
        if self.entry.basis == "context":
            return Moment("o.in", heads=geometry.heads, groups=geometry.kv_heads)
        return Moment("v.out", heads=geometry.kv_heads, groups=geometry.kv_heads)

    def _compress_attention(
        self, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics, rank: int
    ) -> Solution:
        """W̃_v = E W_v and W̃_o = W_o D for the encoder E (r × d) and decoder D (d × r) of each KV head."""
        output_DF = weights["o.weight"].double()
        encoder_Grd, decoder_Gdr, eigenvalues_Gd, clipped = self._basis(geometry, output_DF, statistics, rank)
        tensors = {
            "v.weight": encode_heads(encoder_Grd, weights["v.weight"]),
            "o.weight": by_heads(output_DF, of_heads(decoder_Gdr, geometry.heads)),
        }
        if "v.bias" in weights:
            tensors["v.bias"] = encode_heads(encoder_Grd, weights["v.bias"][:, None])[:, 0]
        if "o.bias" in weights:
            tensors["o.bias"] = weights["o.bias"].double()
        report = {"error": dropped_share(eigenvalues_Gd, rank), "spectrum": spectrum(eigenvalues_Gd)}
        report |= {"clipped": clipped} if clipped else {}
        inputs: dict[str, Callable[[], Tensor]] = {}
        if CONTEXT in statistics.moments:
            inputs["o"] = partial(_encoded, of_heads(encoder_Grd, geometry.heads).double(), statistics)
        return Solution(tensors, {}, report, inputs)

    def _basis(
        self, geometry: LayerGeometry, output_DF: Tensor, statistics: Statistics, rank: int
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Encoder (G, r, d), decoder (G, d, r), eigenvalues (G, d), clipped: as `weighted_head_pca`."""
        moment_Gdd = statistics.moments[self._value_moment(geometry)]
        if self.entry.weighting == "none":
            decoder_Gdr, eigenvalues_Gd = head_pca(moment_Gdd, rank)
            return decoder_Gdr.transpose(1, 2), decoder_Gdr, eigenvalues_Gd, 0
        if self.entry.weighting == "loss":
            metric_FF = pulled(output_DF, statistics.mean(AFTER_ATTENTION)[0])
            gram_Gdd = diagonal_blocks(metric_FF, geometry.heads, geometry.kv_heads)
        else:
            gram_Gdd = output_gram(output_DF, geometry.heads, geometry.kv_heads)
        return weighted_head_pca(moment_Gdd, gram_Gdd, rank)

    def _compress_mlp(
        self, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics, rank: int
    ) -> Solution:
        """Keeps `rank` channels and refits the down projection on them."""
        moment_NN, down_DN = statistics.moments[HIDDEN][0], weights["down.weight"]
        if self.entry.selection == "leverage":
            kept_k, jitter = select_leverage(moment_NN, rank, self.entry.ridge)
            refit_Dk, fallbacks, error = refit_with_error(down_DN, moment_NN, kept_k)
        else:
            felt_DN = None
            if self.entry.weighting == "loss":
                felt_DN = factored(statistics.mean(AFTER_LAYER)[0]).factor.T @ down_DN.double()
            kept_k, refit_Dk, error, jitter, fallbacks = prune(moment_NN, down_DN, rank, felt_DN)
        tensors = {"down.weight": refit_Dk}
        for role in _mlp_roles(geometry)[:-1]:
            tensors[f"{role}.weight"] = weights[f"{role}.weight"][kept_k].double()
            if f"{role}.bias" in weights:
                tensors[f"{role}.bias"] = weights[f"{role}.bias"][kept_k].double()
        if "down.bias" in weights:
            tensors["down.bias"] = weights["down.bias"].double()
        report = {"error": error, **fallbacks} | ({"selection_jitter": jitter} if jitter else {})
        inputs = {"down": lambda: moment_NN[kept_k][:, kept_k] / statistics.tokens}
        outputs = dict.fromkeys((role for role in _mlp_roles(geometry) if role != "down"), kept_k)
        return Solution(tensors, {}, report, inputs, outputs)


def _encoded(encoder_Hrd: Tensor, statistics: Statistics) -> Tensor:
    """The mean moment of what o reads, in each head's basis on both sides."""
    encoded_RF = encode_heads(encoder_Hrd, statistics.mean(CONTEXT)[0])
    return encode_heads(encoder_Hrd, encoded_RF.T.contiguous())


def _compress_query_key(
    geometry: LayerGeometry, weights: Mapping[str, Tensor], moments: Mapping[Moment, Tensor], rank: int
) -> Solution:
    """Q Qᵀ W per head, before RoPE, as two factors: first (n·r × D), second (n × d × r)."""
    tensors: dict[str, Tensor] = {}
    report: dict[str, Any] = {}
    for role, moment in zip(("q", "k"), _query_key_moments(geometry), strict=True):
        basis_ndr, eigenvalues_nd = head_pca(moments[moment], rank)
        tensors[f"{role}.first.weight"] = encode_heads(basis_ndr.transpose(1, 2), weights[f"{role}.weight"])
        tensors[f"{role}.second"] = basis_ndr
        if f"{role}.bias" in weights:
            tensors[f"{role}.bias"] = _project(basis_ndr, weights[f"{role}.bias"])
        report |= {f"{role}_error": dropped_share(eigenvalues_nd, rank), f"{role}_spectrum": spectrum(eigenvalues_nd)}
    return Solution(tensors, {}, report)


def _query_key_moments(geometry: LayerGeometry) -> tuple[Moment, Moment]:
    heads, kv_heads = geometry.heads, geometry.kv_heads
    return Moment("q.out", heads=heads, groups=heads), Moment("k.out", heads=kv_heads, groups=kv_heads)


def _mlp_roles(geometry: LayerGeometry) -> tuple[str, ...]:
    return tuple(role for role in MLP_ROLES if role in geometry.roles)


def _project(basis_ndr: Tensor, bias: Tensor) -> Tensor:
    """Q Qᵀ b per head."""
    bias_nd1 = bias.double().reshape(basis_ndr.shape[0], -1, 1)
    return torch.bmm(basis_ndr, torch.bmm(basis_ndr.transpose(1, 2), bias_nd1)).flatten()


def _rank_variable(group: Group, geometry: LayerGeometry, multiple: int) -> RankVariable:
    D, d, N = geometry.hidden, geometry.head_dim, geometry.intermediate
    H, G = geometry.heads, geometry.kv_heads
    if group.name == "attention":
        per_rank = D * (H + G) + (G if "v" in geometry.biases else 0)
        bias = D if "o" in geometry.biases else 0
        return RankVariable(group.layer, group.name, "value", d, multiple, lambda rank: per_rank * rank + bias)
    if group.name == "query_key":
        bias = H * d * ("q" in geometry.biases) + G * d * ("k" in geometry.biases)
        factored, dense = (H + G) * (D + d), (H + G) * d * D
        return RankVariable(
            group.layer, group.name, "query_key", d, multiple, lambda rank: bias + min(factored * rank, dense)
        )
    rows = [role for role in group.roles if role != "down"]
    per_channel = D * len(group.roles) + sum(role in geometry.biases for role in rows)
    bias = D if "down" in geometry.biases else 0
    return RankVariable(group.layer, group.name, "mlp", N, multiple, lambda rank: per_channel * rank + bias)
