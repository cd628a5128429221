"""FLAT-LLM: value/output by head-wise PCA, MLP by Nyström, ranks by importance. docs/methods.md#flat-llm.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, r and k the ranks kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import FlatLLM
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, MLPBlock, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry, foreign_attention_fault
from pipeline.kernels.elimination import eliminate, prune
from pipeline.kernels.heads import diagonal_blocks, encode_heads, project_heads, repeat_groups
from pipeline.kernels.nystrom import nested_losses, nested_outputs, refit_with_error, ridge_leverage, select_leverage
from pipeline.kernels.sensitivity import factored, projection_losses, pullback
from pipeline.kernels.spectra import dropped_share, head_pca, output_gram, spectrum, weighted_head_pca
from pipeline.methods.base import MethodBase
from pipeline.methods.by_loss import curve_of
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.methods.tensors import biases_of, channel_priority, encoded_values
from pipeline.ranks.budget import RankVariable

VALUE, QUERY_KEY, MLP = "value", "query_key", "mlp"  # rank variables
FORMS = {VALUE: "head_pca", QUERY_KEY: "head_low_rank", MLP: "pruned"}


@dataclass(frozen=True)
class FlatLLMMethod(MethodBase[FlatLLM]):
    """`method: flat_llm` with the settings of its manifest entry."""

    name: ClassVar[str] = "flat_llm"

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry gives ranks."""
        return self.entry.ranks is not None

    @property
    def uniform(self) -> bool:
        """Return True if the entry asks for the same rank in every layer."""
        return self.entry.uniform

    @property
    def narrows_alike(self) -> bool:
        """Return True if the entry cuts MLPs alone, in all layers by the same rank, and trains nothing."""
        entry = self.entry
        alone = entry.mlp and not entry.attention and entry.query_key == "none"
        return alone and entry.layers == "all" and (self.uniform or self.fixed_ranks) and entry.refine is None

    @property
    def scores(self) -> frozenset[str]:
        """Return `importance` for `allocation: importance` (IPRS), unless ranks are fixed or uniform."""
        follows = self.entry.allocation == "importance" and not (self.fixed_ranks or self.uniform)
        return frozenset({"importance"}) if follows else frozenset()

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim groups `attention` (v, o), `query_key` (q, k) and the MLP of every chosen layer.

        Raises ValueError on layers that do not exist, and on ranks of parts that are off or above the full rank.
        """
        groups = []
        for layer in self.chosen_layers(geometry):
            self._check_ranks(layer)
            groups += [group for block in layer.attentions for group in self._attention_groups(layer, block)]
            if self.entry.mlp:
                groups += [Group(layer.index, mlp.name, mlp.roles, self._mlp_moments(mlp)) for mlp in layer.mlps]
        return tuple(groups)

    def _attention_groups(self, layer: LayerGeometry, block: AttentionBlock) -> Iterator[Group]:
        if self.entry.attention:
            yield Group(layer.index, block.name, roles_of(block.value_output), self._attention_moments(block))
        if self.entry.query_key == "head_pca":
            yield Group(layer.index, "query_key", roles_of(block.query_key), _query_key_moments(block))

    def _check_ranks(self, geometry: LayerGeometry) -> None:
        ranks = self.entry.ranks.model_dump() if self.entry.ranks is not None else {}
        on = {"value": self.entry.attention, "mlp": self.entry.mlp, "query_key": self.entry.query_key != "none"}
        full = {name: block.head_dim for block in geometry.attentions for name in ("value", "query_key")}
        full["mlp"] = max((mlp.width for mlp in geometry.mlps), default=0)
        for name, rank in ranks.items():
            if rank is not None and not on[name]:
                raise ValueError(f"ranks.{name}: {rank} is given, but this entry does not compress it")
            if rank is not None and name not in full:
                raise ValueError(f"ranks.{name}: {rank} is given, but {foreign_attention_fault([geometry])}")
            if rank is not None and rank > full[name]:
                raise ValueError(f"ranks.{name}: {rank} is above the full rank {full[name]} of layer {geometry.index}")

    def _attention_moments(self, block: AttentionBlock) -> tuple[Moment, ...]:
        by_loss = (input_moment(block.writer), output_gradient(block.writer)) if self.entry.needs_gradient else ()
        return (self._value_moment(block), *by_loss)

    def _mlp_moments(self, block: MLPBlock) -> tuple[Moment, ...]:
        gradients = (output_gradient(block.writer),) if self.entry.needs_gradient else ()
        return (input_moment(block.writer), *gradients)

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predict the loss at each rank of the values, or at each width of the MLP."""
        (variable,) = self.group_variables(group, geometry)
        block = geometry.block_of(group.roles[0])
        writer = block.writer
        metric_DD, input_FF = statistics.mean(output_gradient(writer))[0], statistics.mean(input_moment(writer))[0]
        output_DF = weights[writer.weight_key].double()
        if isinstance(block, MLPBlock):
            metric, down_DN, hidden_NN = factored(metric_DD), output_DF, input_FF
            weighted_DN = metric.factor.T @ down_DN
            chooses_DN = weighted_DN if self.entry.weighting == "loss" else down_DN
            priority_N = self._priority(hidden_NN, chooses_DN, variable.least)
            losses = metric.scale * nested_losses(nested_outputs(hidden_NN, weighted_DN, priority_N))
            return curve_of(variable, lambda rank: float(losses[rank]), lambda rank: 0)
        attention = geometry.attention
        encode_Gdd, decode_Gdd, _, _ = self._basis(attention, output_DF, statistics, attention.head_dim)
        losses = projection_losses(pullback(output_DF, metric_DD), input_FF, encode_Gdd, decode_Gdd)
        return curve_of(variable, lambda rank: float(losses[rank]), lambda rank: attention.kv_heads * rank)

    def _priority(self, hidden_NN: Tensor, chooses_DN: Tensor, least: int) -> Tensor:
        """Return the channels by priority: a width keeps the first ones."""
        if self.entry.selection == "leverage":
            scores_N, _ = ridge_leverage(hidden_NN, self.entry.ridge)
            return torch.sort(scores_N, descending=True, stable=True).indices
        return channel_priority(eliminate(hidden_NN, chooses_DN, least).order, len(hidden_NN))

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose one rank for each group: `value` (cap d), `query_key` (cap d), `mlp` (cap N)."""
        return (_rank_variable(group, geometry, self.entry.multiple(geometry.hidden)),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the entry's ranks, or w_l · cap, where w_l is from Algorithm 1 (IPRS) or is the ratio."""
        variables = self.rank_variables(geometry)
        if self.entry.ranks is not None:
            fixed = self.entry.ranks.model_dump()
            return {variable.key: float(fixed[variable.name] or variable.cap) for variable in variables}
        share_of = self.layer_shares(geometry, ratio, scores.importance if self.scores else None)
        return {variable.key: share_of[variable.layer] * variable.cap for variable in variables}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Compress values and output, queries and keys, or an MLP."""
        forms = self.forms(group, geometry, ranks)
        if not forms:
            return Solution(dict(weights), {}, {"dense": True})
        name = _variable_name(group, geometry)
        if name == VALUE:
            solution = self._compress_attention(geometry.attention, weights, statistics, ranks[name])
        elif name == QUERY_KEY:
            solution = _compress_query_key(geometry.attention, weights, statistics.moments, ranks[name])
        else:
            solution = self._compress_mlp(geometry.mlp_of(group.roles[0]), weights, statistics, ranks[name])
        return replace(solution, forms=forms)

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to the form of its group. Roles for which `head_low_rank` would save nothing are left out."""
        name = _variable_name(group, geometry)
        if name == QUERY_KEY:
            D, d = geometry.hidden, geometry.attention.head_dim
            if ranks[name] * (D + d) >= d * D:
                return {}
        return dict.fromkeys(group.roles, FormSpec(form=FORMS[name], rank=ranks[name]))

    def _value_moment(self, block: AttentionBlock) -> Moment:
        if self.entry.basis == "context":
            return Moment(block.writer.reads, heads=block.heads, groups=block.kv_heads)
        return Moment(f"{block.value.role}.out", heads=block.kv_heads, groups=block.kv_heads)

    def _compress_attention(
        self, block: AttentionBlock, weights: Mapping[str, Tensor], statistics: Statistics, rank: int
    ) -> Solution:
        """Return W̃_v = E W_v and W̃_o = W_o D, for the encoder E (r × d) and the decoder D (d × r) of each KV head."""
        value, writer = block.value_output
        output_DF = weights[writer.weight_key].double()
        encoder_Grd, decoder_Gdr, eigenvalues_Gd, clipped = self._basis(block, output_DF, statistics, rank)
        output_DR = project_heads(output_DF, repeat_groups(decoder_Gdr, block.heads))
        tensors = encoded_values(weights, value, encoder_Grd) | {writer.weight_key: output_DR}
        tensors |= biases_of(weights, (writer,))
        report = {"error": dropped_share(eigenvalues_Gd, rank), "spectrum": spectrum(eigenvalues_Gd)}
        report |= {"clipped": clipped} if clipped else {}
        inputs: dict[str, Callable[[], Tensor]] = {}
        if (context := input_moment(writer)) in statistics.moments:
            inputs[writer.role] = partial(
                _encoded, repeat_groups(encoder_Grd, block.heads).double(), context, statistics
            )
        return Solution(tensors, {}, report, inputs)

    def _basis(
        self, block: AttentionBlock, output_DF: Tensor, statistics: Statistics, rank: int
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return encoder (G, r, d), decoder (G, d, r), eigenvalues (G, d) and clipped, as `weighted_head_pca`."""
        moment_Gdd = statistics.moments[self._value_moment(block)]
        if self.entry.weighting == "none":
            decoder_Gdr, eigenvalues_Gd = head_pca(moment_Gdd, rank)
            return decoder_Gdr.transpose(1, 2), decoder_Gdr, eigenvalues_Gd, 0
        if self.entry.weighting == "loss":
            metric_FF = pullback(output_DF, statistics.mean(output_gradient(block.writer))[0])
            gram_Gdd = diagonal_blocks(metric_FF, block.heads, block.kv_heads)
        else:
            gram_Gdd = output_gram(output_DF, block.heads, block.kv_heads)
        return weighted_head_pca(moment_Gdd, gram_Gdd, rank)

    def _compress_mlp(
        self, block: MLPBlock, weights: Mapping[str, Tensor], statistics: Statistics, rank: int
    ) -> Solution:
        """Keep `rank` channels and refit the matrix that writes on them."""
        writer = block.writer
        moment_NN, down_DN = statistics.moments[input_moment(writer)][0], weights[writer.weight_key]
        if self.entry.selection == "leverage":
            kept_k, jitter = select_leverage(moment_NN, rank, self.entry.ridge)
            refit_Dk, fallbacks, error = refit_with_error(down_DN, moment_NN, kept_k)
        else:
            weighted_DN = None
            if self.entry.weighting == "loss":
                weighted_DN = factored(statistics.mean(output_gradient(writer))[0]).factor.T @ down_DN.double()
            kept_k, refit_Dk, error, jitter, fallbacks = prune(moment_NN, down_DN, rank, weighted_DN)
        tensors = {writer.weight_key: refit_Dk}
        tensors |= {reader.weight_key: weights[reader.weight_key][kept_k].double() for reader in block.readers}
        tensors |= {key: bias[kept_k] for key, bias in biases_of(weights, block.readers).items()}
        tensors |= biases_of(weights, (writer,))
        report = {"error": error, **fallbacks} | ({"selection_jitter": jitter} if jitter else {})
        inputs = {writer.role: lambda: moment_NN[kept_k][:, kept_k] / statistics.tokens}
        outputs = dict.fromkeys(roles_of(block.readers), kept_k)
        return Solution(tensors, {}, report, inputs, outputs)


def _encoded(encoder_Hrd: Tensor, context: Moment, statistics: Statistics) -> Tensor:
    """Return the mean moment of the output projection's input, in each head's basis on both sides."""
    encoded_RF = encode_heads(encoder_Hrd, statistics.mean(context)[0])
    return encode_heads(encoder_Hrd, encoded_RF.T.contiguous())


def _compress_query_key(
    block: AttentionBlock, weights: Mapping[str, Tensor], moments: Mapping[Moment, Tensor], rank: int
) -> Solution:
    """Factor Q Qᵀ W per head, before RoPE: first (n·r × D), second (n × d × r)."""
    tensors: dict[str, Tensor] = {}
    report: dict[str, Any] = {}
    for matrix, moment in zip(block.query_key, _query_key_moments(block), strict=True):
        role = matrix.role
        basis_ndr, eigenvalues_nd = head_pca(moments[moment], rank)
        tensors[f"{role}.first.weight"] = encode_heads(basis_ndr.transpose(1, 2), weights[matrix.weight_key])
        tensors[f"{role}.second"] = basis_ndr
        if matrix.bias:
            tensors[matrix.bias_key] = _project(basis_ndr, weights[matrix.bias_key])
        report |= {f"{role}_error": dropped_share(eigenvalues_nd, rank), f"{role}_spectrum": spectrum(eigenvalues_nd)}
    return Solution(tensors, {}, report)


def _query_key_moments(block: AttentionBlock) -> tuple[Moment, Moment]:
    heads, kv_heads = block.heads, block.kv_heads
    return (
        Moment(f"{block.query.role}.out", heads=heads, groups=heads),
        Moment(f"{block.key.role}.out", heads=kv_heads, groups=kv_heads),
    )


def _project(basis_ndr: Tensor, bias: Tensor) -> Tensor:
    """Return Q Qᵀ b per head."""
    bias_nd1 = bias.double().reshape(basis_ndr.shape[0], -1, 1)
    return torch.bmm(basis_ndr, torch.bmm(basis_ndr.transpose(1, 2), bias_nd1)).flatten()


def _variable_name(group: Group, geometry: LayerGeometry) -> str:
    """Return the name of the rank variable of a group."""
    for block in geometry.attentions:
        if group.roles in (roles_of(block.value_output), roles_of(block.query_key)):
            return VALUE if group.roles == roles_of(block.value_output) else QUERY_KEY
    return MLP


def _rank_variable(group: Group, geometry: LayerGeometry, multiple: int) -> RankVariable:
    name = _variable_name(group, geometry)
    if name == MLP:
        block = geometry.mlp_of(group.roles[0])
        return RankVariable(group.layer, group.name, name, block.width, multiple, block.numbers)
    attention = geometry.attention
    D, d, H, G = geometry.hidden, attention.head_dim, attention.heads, attention.kv_heads
    if name == VALUE:
        per_rank = D * (H + G) + (G if attention.value.bias else 0)
        bias = attention.writer.biases
        return RankVariable(group.layer, group.name, name, d, multiple, lambda rank: per_rank * rank + bias)
    bias = sum(matrix.biases for matrix in attention.query_key)
    factored, dense = (H + G) * (D + d), (H + G) * d * D
    return RankVariable(group.layer, group.name, name, d, multiple, lambda rank: bias + min(factored * rank, dense))
