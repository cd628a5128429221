"""Joint rank-k: SVD of stacked matrices that read the same input. docs/methods.md#joint-rank-k.

Legend: D hidden, m rows of a stack, k rank, H query heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import JointRankK
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Matrix, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.lowrank import InputRoots, input_roots, joint_low_rank, rank_limit
from pipeline.kernels.scales import equalize, scale_report
from pipeline.kernels.sensitivity import losses_by_rank
from pipeline.kernels.spectra import dropped_share, spectrum
from pipeline.methods.base import MethodBase
from pipeline.methods.by_loss import curve_of, directions, factors, losses
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import input_moment, pull
from pipeline.methods.tensors import factors_of
from pipeline.ranks.budget import RankVariable

QUERY_KEY, MLP = "query_key", "mlp"  # rank variables
Stack = tuple[int, int]  # numbers of the dense weights, numbers that one more rank stores


@dataclass(frozen=True)
class _Pair:
    """Two matrices that read the same input.

    Attributes:
        variable: the name of their rank.
        form: how the entry decomposes them.
        shared: the name of the factor that they share.
    """

    variable: str
    matrices: tuple[Matrix, ...]
    form: str
    shared: str

    @property
    def input(self) -> Moment:
        """Return the moment of their input."""
        return input_moment(self.matrices[0])

    @property
    def stacks(self) -> list[tuple[Matrix, ...]]:
        """Return the matrices that are decomposed together."""
        return [(matrix,) for matrix in self.matrices] if self.form == "separate" else [self.matrices]


@dataclass(frozen=True)
class JointRankKMethod(MethodBase[JointRankK]):
    """`method: joint_rank_k` with the settings of its manifest entry."""

    name: ClassVar[str] = "joint_rank_k"

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry gives ranks."""
        return self.entry.ranks is not None

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim groups `query_key` (q, k) and the matrices that read the MLP's input, in every chosen layer.

        Raises ValueError on layers that do not exist, on an MLP without gate, on `joint_per_head` for grouped queries,
        and on ranks that save nothing.
        """
        layers = self.chosen_layers(geometry)
        for layer in layers:
            self._check(layer)
        return tuple(
            Group(layer.index, name, roles_of(pair.matrices), self._moments(pair))
            for layer in layers
            for name, pair in self._pairs(layer).items()
        )

    def _pairs(self, geometry: LayerGeometry) -> dict[str, _Pair]:
        """Map the name of each group of a layer to its pair."""
        pairs = {}
        if self.entry.query_key != "none":
            for attention in geometry.attentions:
                pairs[QUERY_KEY] = _Pair(QUERY_KEY, attention.query_key, self.entry.query_key, QUERY_KEY)
        if self.entry.mlp_form != "none":
            for block in geometry.mlps:
                pairs[block.name] = _Pair(MLP, block.readers, self.entry.mlp_form, block.reader_group)
        return pairs

    def _moments(self, pair: _Pair) -> tuple[Moment, ...]:
        if self.entry.needs_gradient:
            return (pair.input, *(pull(matrices) for matrices in pair.stacks))
        return (pair.input,) if self.entry.weighting == "input" else ()

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Predict the loss by rank. For separate weights it is the sum, as if their errors were uncorrelated."""
        pair = self._pairs(geometry)[group.name]
        input_DD = statistics.mean(pair.input)[0]
        curves = []
        for matrices, stack in zip(pair.stacks, self._stacks(geometry, pair), strict=True):
            parts, _ = equalize([weights[matrix.weight_key] for matrix in matrices])
            pull_DD = statistics.mean(pull(matrices))[0]
            curves.append((stack, losses(parts, self.entry.weighting, input_DD, pull_DD)))

        def loss_at(rank: int) -> float:
            return sum(0.0 if _saves_nothing(stack, rank) else float(by_rank[rank]) for stack, by_rank in curves)

        cache = geometry.attention.key.outputs if pair.variable == QUERY_KEY else 0
        (variable,) = self.group_variables(group, geometry)
        return curve_of(variable, loss_at, lambda rank: cache)

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose one rank for each group."""
        pair, multiple = self._pairs(geometry)[group.name], self.entry.multiple(geometry.hidden)
        stacks = self._stacks(geometry, pair)
        cap = max(-(-dense // per_rank) for dense, per_rank in stacks)  # the smallest rank at which all stay dense
        cost = _cost(stacks, sum(matrix.biases for matrix in pair.matrices))
        return (RankVariable(group.layer, group.name, pair.variable, cap, multiple, cost),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the entry's ranks, or those that store `ratio` of the dense numbers, in every layer or on average.

        Ranks follow the layers' importance (IPRS) if another method with the same budget follows it.
        """
        if self.entry.ranks is not None:
            fixed = self.entry.ranks.model_dump()
            return {variable.key: float(fixed[variable.name]) for variable in self.rank_variables(geometry)}
        importance = scores.importance or None
        share_of = self.layer_shares(geometry, ratio, importance if self.entry.keep is None else None)
        return {
            variable.key: min(
                self._rank_at(geometry.layers[variable.layer], variable.group, share_of[variable.layer]),
                float(variable.cap),
            )
            for variable in self.rank_variables(geometry)
        }

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Factor each weight into two; joint weights share the first factor. Weights stay dense if factors save
        nothing."""
        pair = self._pairs(geometry)[group.name]
        rank, forms = ranks[pair.variable], self.forms(group, geometry, ranks)
        if not forms:
            return Solution(dict(weights), {}, {"dense": True})
        stacked = {role: weights[f"{role}.weight"] for role in group.roles}
        biases = {key: bias for key, bias in weights.items() if key.endswith(".bias")}
        if self.entry.weighting == "loss":
            solution = _by_loss(pair, stacked, rank, statistics)
            return Solution({**solution.tensors, **biases}, forms, solution.report)
        roots = input_roots(statistics.moments[pair.input][0]) if self.entry.weighting == "input" else None
        if pair.form == "separate":
            solution = _separate(stacked, rank, roots)
        elif pair.form == "joint_per_head":
            solution = _per_head(stacked, geometry.attention.heads, rank, roots)
        else:
            solution = _joint(stacked, rank, roots)
        clipped = {"clipped": roots.clipped} if roots else {}
        return Solution({**solution.tensors, **biases}, forms, solution.report | clipped)

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to its form. Roles for which factors would save nothing are left out."""
        pair = self._pairs(geometry)[group.name]
        rank = ranks[pair.variable]
        if all(_saves_nothing(stack, rank) for stack in self._stacks(geometry, pair)):
            return {}
        if pair.form == "separate":
            cut = (role for role in group.roles if rank <= rank_limit(*geometry.weight_shape(role)))
            return dict.fromkeys(cut, FormSpec(form="low_rank", rank=rank))
        kind = "joint_head_low_rank" if pair.form == "joint_per_head" else "joint_low_rank"
        return dict.fromkeys(group.roles, FormSpec(form=kind, rank=rank, group=pair.shared))

    def _check(self, geometry: LayerGeometry) -> None:
        if self.entry.mlp_form != "none" and not all(block.gated for block in geometry.mlps):
            raise ValueError(
                f"mlp: {geometry.model_type} has an MLP without gate, so nothing is stacked; set mlp: false"
            )
        for block in geometry.attentions:
            if self.entry.query_key == "joint_per_head" and block.heads != block.kv_heads:
                raise ValueError(
                    f"query_key: joint_per_head pairs each query head with a key head of its own, but the model has "
                    f"{block.heads} query and {block.kv_heads} key heads; use joint or separate"
                )
        fixed = self.entry.ranks.model_dump() if self.entry.ranks else {}
        for pair in self._pairs(geometry).values() if fixed else ():
            rank, limit = fixed[pair.variable], self._limit(geometry, pair)
            if rank > limit:
                raise ValueError(f"ranks.{pair.variable}: {rank} saves nothing; the largest rank that does is {limit}")

    def _limit(self, geometry: LayerGeometry, pair: _Pair) -> int:
        """Return the largest rank at which every stack stores less than its dense weights."""
        return min((dense - 1) // per_rank for dense, per_rank in self._stacks(geometry, pair))

    def _stacks(self, geometry: LayerGeometry, pair: _Pair) -> list[Stack]:
        """Return the sizes of each stack: each weight by itself, or the pair. The pairs of all heads count as one."""
        D, rows = geometry.hidden, [matrix.outputs for matrix in pair.matrices]
        if pair.form == "separate":
            return [(m * D, m + D) for m in rows]
        firsts = geometry.attention.heads if pair.form == "joint_per_head" else 1
        return [(sum(rows) * D, sum(rows) + firsts * D)]

    def _rank_at(self, geometry: LayerGeometry, group: str, ratio: float) -> float:
        """Return the rank at which the factors of a group store `ratio` of the dense numbers."""
        stacks = self._stacks(geometry, self._pairs(geometry)[group])
        return ratio * sum(dense for dense, _ in stacks) / sum(per_rank for _, per_rank in stacks)


def _by_loss(pair: _Pair, stacked: Mapping[str, Tensor], rank: int, statistics: Statistics) -> Solution:
    """Decompose each stack in the metric of the loss. docs/methods.md#curves."""
    tensors: dict[str, Tensor] = {}
    input_DD, report = statistics.mean(pair.input)[0], {}
    for matrices in pair.stacks:
        roles = roles_of(matrices)
        weights = [stacked[role] for role in roles]
        if len(roles) == 1 and rank > rank_limit(*weights[0].shape):
            tensors[f"{roles[0]}.weight"] = weights[0]
            continue
        pull_DD = statistics.mean(pull(matrices))[0]
        order = directions(weights, "loss", input_DD, pull_DD)
        first_rD, seconds = factors(order, rank, weights)
        tensors[f"{roles[0]}.first.weight"] = first_rD
        tensors |= {f"{role}.second.weight": second for role, second in zip(roles, seconds, strict=True)}
        report["_".join((*roles, "predicted"))] = float(losses_by_rank(order, input_DD, pull_DD)[rank])
    return Solution(tensors, {}, report)


def _cost(stacks: Sequence[Stack], biases: int) -> Callable[[float], float]:
    return lambda rank: biases + sum(min(per_rank * rank, dense) for dense, per_rank in stacks)


def _saves_nothing(stack: Stack, rank: int) -> bool:
    dense, per_rank = stack
    return rank * per_rank >= dense


def _separate(weights: Mapping[str, Tensor], rank: int, roots: InputRoots | None) -> Solution:
    tensors: dict[str, Tensor] = {}
    report: dict[str, Any] = {}
    for role, weight in weights.items():
        if rank > rank_limit(*weight.shape):
            tensors[f"{role}.weight"] = weight
            continue
        cut = factors_of(role, weight, rank, roots)
        tensors |= cut.tensors
        report |= cut.report
    return Solution(tensors, {}, report)


def _joint(weights: Mapping[str, Tensor], rank: int, roots: InputRoots | None) -> Solution:
    """Decompose [W_1; W_2] ≈ U_k V_kᵀ, √Σ in each: one first factor, owned by the first role, and two second ones."""
    stack, scales = equalize(list(weights.values()))
    first_kD, seconds, values = joint_low_rank(stack, rank, roots)
    seconds = [_times(second, scale) for second, scale in zip(seconds, scales, strict=True)]
    owner = next(iter(weights))
    tensors = {f"{owner}.first.weight": first_kD}
    tensors |= {f"{role}.second.weight": second for role, second in zip(weights, seconds, strict=True)}
    energies = values.square()
    report = {"error": dropped_share(energies, rank), "spectrum": spectrum(energies), **scale_report(scales)}
    return Solution(tensors, {}, report)


def _times(factor: Tensor, scale: float) -> Tensor:
    """Scale a factor, in float64 only where needed: factors of a wide MLP are the largest tensors of a solve."""
    return factor if scale == 1.0 else factor.double() * scale


def _per_head(weights: Mapping[str, Tensor], heads: int, rank: int, roots: InputRoots | None) -> Solution:
    """Decompose [W_q^h; W_k^h] (2d × D) of each head: one first factor (H·k × D), two second ones (H × d × k)."""
    stack, scales = equalize(list(weights.values()))
    by_head = [weight.unflatten(0, (heads, -1)) for weight in stack]
    firsts, seconds, dropped, total = [], [], 0.0, 0.0
    for parts in zip(*by_head, strict=True):
        first_kD, second, values = joint_low_rank(list(parts), rank, roots)
        firsts.append(first_kD)
        seconds.append(second)
        dropped += values[rank:].square().sum().item()
        total += values.square().sum().item()
    owner = next(iter(weights))
    tensors = {f"{owner}.first.weight": torch.cat(firsts)}
    for position, role in enumerate(weights):
        tensors[f"{role}.second"] = _times(torch.stack([second[position] for second in seconds]), scales[position])
    report = {"error": dropped / total if total else 0.0, **scale_report(scales)}
    return Solution(tensors, {}, report)
