"""Joint rank-k: SVD of stacked matrices that read the same input. docs/methods.md#joint-rank-k.

Legend: D hidden, m rows of a stack, k rank, H query heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from pipeline.methods.base import Group, Method
from pipeline.methods.by_loss import curve_of, directions, factors, losses
from pipeline.methods.method import Moment, Ranks, Scores, Solution
from pipeline.methods.moments import input_moment, pull
from pipeline.methods.tensors import factors_of
from pipeline.methods.work import Work, directed_stack, direction_losses, low_rank
from pipeline.ranks.budget import RankKey, RankVariable

QUERY_KEY, MLP = "query_key", "mlp"  # rank variables
Stack = tuple[int, int]  # numbers of the dense weights, numbers that one more rank stores


@dataclass(frozen=True)
class MatrixPair(Group[JointRankK]):
    """Two matrices that read the same input.

    Attributes:
        rank_name: the name of their rank.
        form: how the entry decomposes them.
        shared: the name of the factor that they share.
        cache: the numbers per token that they cache.
    """

    rank_name: str = QUERY_KEY
    form: str = "joint"
    shared: str = QUERY_KEY
    cache: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices."""
        return tuple(self.geometry.matrices[role] for role in self.roles)

    @property
    def input(self) -> Moment:
        """Return the moment of their input."""
        return input_moment(self.matrices[0])

    @property
    def stacks(self) -> list[tuple[tuple[Matrix, ...], Stack]]:
        """Return the matrices that are decomposed together, with their sizes. The pairs of all heads count as one."""
        D = self.geometry.hidden
        if self.form == "separate":
            return [((matrix,), (matrix.outputs * D, matrix.outputs + D)) for matrix in self.matrices]
        firsts = self.geometry.attention.heads if self.form == "joint_per_head" else 1
        rows = sum(matrix.outputs for matrix in self.matrices)
        return [(self.matrices, (rows * D, rows + firsts * D))]

    @property
    def limit(self) -> int:
        """Return the largest rank at which every stack stores less than its dense weights."""
        return min((dense - 1) // per_rank for _, (dense, per_rank) in self.stacks)

    def rank_at(self, ratio: float) -> float:
        """Return the rank at which the factors store `ratio` of the dense numbers."""
        sizes = [size for _, size in self.stacks]
        return ratio * sum(dense for dense, _ in sizes) / sum(per_rank for _, per_rank in sizes)

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose one rank."""
        sizes, biases = [size for _, size in self.stacks], sum(matrix.biases for matrix in self.matrices)
        cap = max(-(-dense // per_rank) for dense, per_rank in sizes)  # the smallest rank at which all stay dense

        def cost(rank: float) -> float:
            return biases + sum(min(per_rank * rank, dense) for dense, per_rank in sizes)

        return (self.variable(self.rank_name, cap, cost),)

    def curve(self) -> Curve:
        """Predict the loss by rank. For separate weights it is the sum, as if their errors were uncorrelated."""
        input_DD, curves = self.mean(self.input), []
        for matrices, stack in self.stacks:
            parts, _ = equalize([self.weight(matrix) for matrix in matrices])
            curves.append((stack, losses(parts, self.entry.weighting, input_DD, self.mean(pull(matrices)))))

        def loss_at(rank: int) -> float:
            return sum(0.0 if _saves_nothing(stack, rank) else float(by_rank[rank]) for stack, by_rank in curves)

        (variable,) = self.variables()
        return curve_of(variable, loss_at, lambda rank: self.cache)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to its form. Roles for which factors would save nothing are left out."""
        rank = ranks[self.rank_name]
        if all(_saves_nothing(stack, rank) for _, stack in self.stacks):
            return {}
        if self.form == "separate":
            cut = (matrix.role for matrix in self.matrices if rank <= rank_limit(*matrix.shape))
            return dict.fromkeys(cut, FormSpec(form="low_rank", rank=rank))
        kind = "joint_head_low_rank" if self.form == "joint_per_head" else "joint_low_rank"
        return dict.fromkeys(self.roles, FormSpec(form=kind, rank=rank, group=self.shared))

    def solve(self, ranks: Ranks) -> Solution:
        """Factor each weight into two; joint weights share the first factor. Weights stay dense if factors save
        nothing."""
        rank, forms = ranks[self.rank_name], self.forms(ranks)
        if not forms:
            return self.dense()
        stacked = {matrix.role: self.weight(matrix) for matrix in self.matrices}
        biases = {key: bias for key, bias in self.weights.items() if key.endswith(".bias")}
        if self.entry.weighting == "loss":
            solution = self._by_loss(stacked, rank)
            return Solution({**solution.tensors, **biases}, forms, solution.report)
        weighted = self.entry.weighting == "input"
        roots = input_roots(self.statistics.moments[self.input][0]) if weighted else None
        if self.form == "separate":
            solution = _separate(stacked, rank, roots)
        elif self.form == "joint_per_head":
            solution = _per_head(stacked, self.geometry.attention.heads, rank, roots)
        else:
            solution = _joint(stacked, rank, roots)
        clipped = {"clipped": roots.clipped} if roots else {}
        return Solution({**solution.tensors, **biases}, forms, solution.report | clipped)

    def _by_loss(self, stacked: Mapping[str, Tensor], rank: int) -> Solution:
        """Decompose each stack in the metric of the loss. docs/methods.md#curves."""
        tensors: dict[str, Tensor] = {}
        input_DD, report = self.mean(self.input), {}
        for matrices, _ in self.stacks:
            roles = roles_of(matrices)
            weights = [stacked[role] for role in roles]
            if len(roles) == 1 and rank > rank_limit(*weights[0].shape):
                tensors[f"{roles[0]}.weight"] = weights[0]
                continue
            pull_DD = self.mean(pull(matrices))
            order = directions(weights, "loss", input_DD, pull_DD)
            first_rD, seconds = factors(order, rank, weights)
            tensors[f"{roles[0]}.first.weight"] = first_rD
            tensors |= {f"{role}.second.weight": second for role, second in zip(roles, seconds, strict=True)}
            report["_".join((*roles, "predicted"))] = float(losses_by_rank(order, input_DD, pull_DD)[rank])
        return Solution(tensors, {}, report)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the directions in the metric of the loss, or the roots of the inputs' moment."""
        D = self.geometry.hidden
        if self.entry.needs_gradient:
            return directed_stack(sum(matrix.outputs for matrix in self.matrices), D)
        return low_rank(self.matrices, D) if self.moments else Work()

    def curve_work(self, tokens: int) -> Work:
        """Count the losses of all ranks of each stack."""
        return sum((direction_losses(self.geometry.hidden) for _ in self.stacks), start=Work())


@dataclass(frozen=True)
class JointRankKMethod(Method[JointRankK]):
    """`method: joint_rank_k` with the settings of its manifest entry."""

    name: ClassVar[str] = "joint_rank_k"

    def groups(self, layer: LayerGeometry) -> Iterator[MatrixPair]:
        """Claim groups `query_key` (q, k) and the matrices that read the MLP's input.

        Raises ValueError on an MLP without gate, on `joint_per_head` for grouped queries, and on ranks that save
        nothing.
        """
        self._check(layer)
        form, mlp_form = self.entry.query_key, self.entry.mlp_form
        for block in layer.attentions if form != "none" else ():
            needs = roles_of(block.query_key), self._moments(block.query_key, form)
            yield self._fitting(MatrixPair(self.entry, layer, QUERY_KEY, *needs, form=form, cache=block.key.outputs))
        for mlp in layer.mlps if mlp_form != "none" else ():
            needs, shared = (roles_of(mlp.readers), self._moments(mlp.readers, mlp_form)), mlp.reader_group
            yield self._fitting(
                MatrixPair(self.entry, layer, mlp.name, *needs, rank_name=MLP, form=mlp_form, shared=shared)
            )

    def _moments(self, matrices: tuple[Matrix, ...], form: str) -> tuple[Moment, ...]:
        read = input_moment(matrices[0])
        if self.entry.needs_gradient:
            return (read, *(pull((matrix,)) for matrix in matrices)) if form == "separate" else (read, pull(matrices))
        return (read,) if self.entry.weighting == "input" else ()

    def _fitting(self, pair: MatrixPair) -> MatrixPair:
        """Return a pair. Raises ValueError if the entry's rank saves nothing."""
        rank = getattr(self.entry.ranks, pair.rank_name) if self.entry.ranks else None
        if rank is not None and rank > pair.limit:
            raise ValueError(
                f"ranks.{pair.rank_name}: {rank} saves nothing; the largest rank that does is {pair.limit}"
            )
        return pair

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

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return the entry's ranks, or those that store `ratio` of the dense numbers, in every layer or on average.

        Ranks follow the layers' importance (IPRS) if another method with the same budget follows it.
        """
        if self.entry.ranks is not None:
            fixed = self.entry.ranks.model_dump()
            return {variable.key: float(fixed[variable.name]) for variable in self.rank_variables(geometry)}
        importance = scores.importance or None
        share_of = self.layer_shares(geometry, ratio, importance if self.entry.keep is None else None)
        return {
            variable.key: min(pair.rank_at(share_of[pair.layer]), float(variable.cap))
            for pair in self.chosen(geometry, self.groups)
            for variable in pair.variables()
        }


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
