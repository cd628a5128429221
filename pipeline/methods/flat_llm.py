"""FLAT-LLM: value/output by head-wise PCA, MLP by Nyström, ranks by importance. docs/methods.md#flat-llm.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, r and k the ranks kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from pipeline.methods.base import Group, Method
from pipeline.methods.by_loss import curve_of
from pipeline.methods.method import Moment, Ranks, Scores, Solution
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.methods.tensors import biases_of, channel_priority, encoded_values, kept_channels
from pipeline.methods.work import Work, elimination, spectra
from pipeline.ranks.budget import RankKey, RankVariable

VALUE, QUERY_KEY, MLP = "value", "query_key", "mlp"  # rank variables


class Values(Group[FlatLLM]):
    """Values and output: W̃_v = E W_v and W̃_o = W_o D, for the encoder E (r × d) and decoder D (d × r) of each KV head.

    The moment of the values comes first, then those that predict the loss.
    """

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a rank, at most d."""
        block = self.geometry.attention
        per_rank = self.geometry.hidden * (block.heads + block.kv_heads) + block.kv_heads * block.value.bias
        bias = block.writer.biases
        return (self.variable(VALUE, block.head_dim, lambda rank: per_rank * rank + bias),)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map both roles to `head_pca`."""
        return dict.fromkeys(self.roles, FormSpec(form="head_pca", rank=ranks[VALUE]))

    def curve(self) -> Curve:
        """Predict the loss at each rank."""
        block, (variable,) = self.geometry.attention, self.variables()
        output_DF, metric_DD = self.weight(block.writer).double(), self.mean(output_gradient(block.writer))
        encode_Gdd, decode_Gdd, _, _ = self._basis(output_DF, block.head_dim)
        input_FF = self.mean(input_moment(block.writer))
        losses = projection_losses(pullback(output_DF, metric_DD), input_FF, encode_Gdd, decode_Gdd)
        return curve_of(variable, lambda rank: float(losses[rank]), lambda rank: block.kv_heads * rank)

    def solve(self, ranks: Ranks) -> Solution:
        """Project values and output to the basis of each head."""
        block, rank = self.geometry.attention, ranks[VALUE]
        value, writer = block.value_output
        output_DF = self.weight(writer).double()
        encoder_Grd, decoder_Gdr, eigenvalues_Gd, clipped = self._basis(output_DF, rank)
        output_DR = project_heads(output_DF, repeat_groups(decoder_Gdr, block.heads))
        tensors = encoded_values(self.weights, value, encoder_Grd) | {writer.weight_key: output_DR}
        tensors |= biases_of(self.weights, (writer,))
        report = {"error": dropped_share(eigenvalues_Gd, rank), "spectrum": spectrum(eigenvalues_Gd)}
        report |= {"clipped": clipped} if clipped else {}
        inputs: dict[str, Callable[[], Tensor]] = {}
        if (context := input_moment(writer)) in self.statistics.moments:
            encoder_Hrd = repeat_groups(encoder_Grd, block.heads).double()
            inputs[writer.role] = lambda: _encoded(encoder_Hrd, self.mean(context))
        return Solution(tensors, self.forms(ranks), report, inputs)

    def _basis(self, output_DF: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return encoder (G, r, d), decoder (G, d, r), eigenvalues (G, d) and clipped, as `weighted_head_pca`."""
        block, moment_Gdd = self.geometry.attention, self.statistics.moments[self.moments[0]]
        if self.entry.weighting == "none":
            decoder_Gdr, eigenvalues_Gd = head_pca(moment_Gdd, rank)
            return decoder_Gdr.transpose(1, 2), decoder_Gdr, eigenvalues_Gd, 0
        if self.entry.weighting == "loss":
            metric_FF = pullback(output_DF, self.mean(output_gradient(block.writer)))
            gram_Gdd = diagonal_blocks(metric_FF, block.heads, block.kv_heads)
        else:
            gram_Gdd = output_gram(output_DF, block.heads, block.kv_heads)
        return weighted_head_pca(moment_Gdd, gram_Gdd, rank)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the eigenproblems of all moments."""
        return spectra(self.moments, self.geometry)

    def curve_work(self, tokens: int) -> Work:
        """Count the eigenproblems of the heads, and the metric of their values."""
        hidden, features = self.geometry.attention.writer.shape
        return spectra(self.moments[:1], self.geometry) + Work(2.0 * hidden * features * (hidden + features))


class QueryKey(Group[FlatLLM]):
    """Queries and keys: Q Qᵀ W per head, before RoPE. `moments`: of the outputs of q, and of k."""

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a rank, at most d."""
        block, D = self.geometry.attention, self.geometry.hidden
        heads, d, bias = block.heads + block.kv_heads, block.head_dim, self.bias_numbers
        return (self.variable(QUERY_KEY, d, lambda rank: bias + min(heads * (D + d) * rank, heads * d * D)),)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map both roles to `head_low_rank`, unless it saves nothing."""
        D, d = self.geometry.hidden, self.geometry.attention.head_dim
        if ranks[QUERY_KEY] * (D + d) >= d * D:
            return {}
        return dict.fromkeys(self.roles, FormSpec(form="head_low_rank", rank=ranks[QUERY_KEY]))

    def solve(self, ranks: Ranks) -> Solution:
        """Return factors of q and k: first (n·r × D), second (n × d × r)."""
        rank, forms = ranks[QUERY_KEY], self.forms(ranks)
        if not forms:
            return self.dense()
        tensors: dict[str, Tensor] = {}
        report: dict[str, Any] = {}
        for matrix, moment in zip(self.matrices, self.moments, strict=True):
            role = matrix.role
            basis_ndr, eigenvalues_nd = head_pca(self.statistics.moments[moment], rank)
            tensors[f"{role}.first.weight"] = encode_heads(basis_ndr.transpose(1, 2), self.weight(matrix))
            tensors[f"{role}.second"] = basis_ndr
            if matrix.bias:
                tensors[matrix.bias_key] = _project(basis_ndr, self.weights[matrix.bias_key])
            report[f"{role}_error"] = dropped_share(eigenvalues_nd, rank)
            report[f"{role}_spectrum"] = spectrum(eigenvalues_nd)
        return Solution(tensors, forms, report)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the eigenproblems of all heads."""
        return spectra(self.moments, self.geometry)


class Channels(Group[FlatLLM]):
    """An MLP, of which some channels are kept, and whose writer is refitted to them."""

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a width, at most N."""
        return (self.variable(MLP, self.mlp.width, self.mlp.numbers),)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to `pruned`."""
        return dict.fromkeys(self.roles, FormSpec(form="pruned", rank=ranks[MLP]))

    def curve(self) -> Curve:
        """Predict the loss at each width."""
        (variable,), writer = self.variables(), self.mlp.writer
        metric, hidden_NN = factored(self.mean(output_gradient(writer))), self.mean(input_moment(writer))
        down_DN = self.weight(writer).double()
        weighted_DN = metric.factor.T @ down_DN
        chooses_DN = weighted_DN if self.entry.weighting == "loss" else down_DN
        priority_N = self._priority(hidden_NN, chooses_DN, variable.least)
        losses = metric.scale * nested_losses(nested_outputs(hidden_NN, weighted_DN, priority_N))
        return curve_of(variable, lambda rank: float(losses[rank]), lambda rank: 0)

    def _priority(self, hidden_NN: Tensor, chooses_DN: Tensor, least: int) -> Tensor:
        """Return the channels by priority: a width keeps the first ones."""
        if self.entry.selection == "leverage":
            scores_N, _ = ridge_leverage(hidden_NN, self.entry.ridge)
            return torch.sort(scores_N, descending=True, stable=True).indices
        return channel_priority(eliminate(hidden_NN, chooses_DN, least).order, len(hidden_NN))

    def solve(self, ranks: Ranks) -> Solution:
        """Choose channels, and refit the matrix that writes on them."""
        block, rank, writer = self.mlp, ranks[MLP], self.mlp.writer
        moment_NN, down_DN = self.statistics.moments[input_moment(writer)][0], self.weight(writer)
        if self.entry.selection == "leverage":
            kept_k, jitter = select_leverage(moment_NN, rank, self.entry.ridge)
            refit_Dk, fallbacks, error = refit_with_error(down_DN, moment_NN, kept_k)
        else:
            weighted_DN = None
            if self.entry.weighting == "loss":
                weighted_DN = factored(self.mean(output_gradient(writer))).factor.T @ down_DN.double()
            kept_k, refit_Dk, error, jitter, fallbacks = prune(moment_NN, down_DN, rank, weighted_DN)
        tensors = kept_channels(self.weights, block, kept_k, refit_Dk)
        report = {"error": error, **fallbacks} | ({"selection_jitter": jitter} if jitter else {})
        inputs = {writer.role: lambda: moment_NN[kept_k][:, kept_k] / self.statistics.tokens}
        return Solution(tensors, self.forms(ranks), report, inputs, dict.fromkeys(roles_of(block.readers), kept_k))

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the elimination with its refit and, with gradients, the outputs' energy in their metric."""
        energy = Work(self.geometry.hidden * float(self.mlp.width) ** 2 if self.moments[1:] else 0.0)
        return elimination(self.mlp, refit=True) + energy + spectra(self.moments[1:], self.geometry)


@dataclass(frozen=True)
class FlatLLMMethod(Method[FlatLLM]):
    """`method: flat_llm` with the settings of its manifest entry."""

    name: ClassVar[str] = "flat_llm"

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

    def groups(self, layer: LayerGeometry) -> Iterator[Values | QueryKey | Channels]:
        """Claim groups `attention` (v, o), `query_key` (q, k) and the MLP.

        Raises ValueError on ranks of parts that are off or above the full rank.
        """
        self._check_ranks(layer)
        for block in layer.attentions:
            if self.entry.attention:
                yield Values(self.entry, layer, block.name, roles_of(block.value_output), self._value_moments(block))
            if self.entry.query_key == "head_pca":
                yield QueryKey(self.entry, layer, QUERY_KEY, roles_of(block.query_key), _query_key_moments(block))
        for mlp in layer.mlps if self.entry.mlp else ():
            yield Channels(self.entry, layer, mlp.name, mlp.roles, self._mlp_moments(mlp))

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

    def _value_moments(self, block: AttentionBlock) -> tuple[Moment, ...]:
        heads, point = block.kv_heads, f"{block.value.role}.out"
        if self.entry.basis == "context":
            heads, point = block.heads, block.writer.reads
        by_loss = (input_moment(block.writer), output_gradient(block.writer)) if self.entry.needs_gradient else ()
        return (Moment(point, heads, block.kv_heads), *by_loss)

    def _mlp_moments(self, block: MLPBlock) -> tuple[Moment, ...]:
        gradients = (output_gradient(block.writer),) if self.entry.needs_gradient else ()
        return (input_moment(block.writer), *gradients)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return the entry's ranks, or w_l · cap, where w_l is from Algorithm 1 (IPRS) or is the ratio."""
        variables = self.rank_variables(geometry)
        if self.entry.ranks is not None:
            fixed = self.entry.ranks.model_dump()
            return {variable.key: float(fixed[variable.name] or variable.cap) for variable in variables}
        share_of = self.layer_shares(geometry, ratio, scores.importance if self.scores else None)
        return {variable.key: share_of[variable.layer] * variable.cap for variable in variables}


def _encoded(encoder_Hrd: Tensor, moment_FF: Tensor) -> Tensor:
    """Return a moment of the output projection's input, in each head's basis on both sides."""
    encoded_RF = encode_heads(encoder_Hrd, moment_FF)
    return encode_heads(encoder_Hrd, encoded_RF.T.contiguous())


def _query_key_moments(block: AttentionBlock) -> tuple[Moment, Moment]:
    heads, kv_heads = block.heads, block.kv_heads
    return Moment(f"{block.query.role}.out", heads, heads), Moment(f"{block.key.role}.out", kv_heads, kv_heads)


def _project(basis_ndr: Tensor, bias: Tensor) -> Tensor:
    """Return Q Qᵀ b per head."""
    bias_nd1 = bias.double().reshape(basis_ndr.shape[0], -1, 1)
    return torch.bmm(basis_ndr, torch.bmm(basis_ndr.transpose(1, 2), bias_nd1)).flatten()
