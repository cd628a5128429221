"""Joint rank-k: SVD of stacked matrices that read the same input. docs/methods.md#joint-rank-k.

Legend: D hidden, m rows of a stack, k rank, H query heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import JointRankK
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Matrix, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.lowrank import InputRoots, joint_low_rank, rank_limit
from pipeline.kernels.scales import equalize, scale_report
from pipeline.kernels.spectra import dropped_share, spectrum
from pipeline.methods.base import Method
from pipeline.methods.by_loss import LowRank, curve_of, moments_of
from pipeline.methods.method import Moment, Ranks, Scores, Solution
from pipeline.methods.tensors import factors_of
from pipeline.methods.work import Work
from pipeline.ranks.budget import RankKey, RankVariable

QUERY_KEY, MLP = "query_key", "mlp"  # rank variables
StackSize = tuple[int, int]  # numbers of the dense weights, numbers that one more rank stores


@dataclass(frozen=True)
class Joint(LowRank[JointRankK]):
    """Matrices that read the same input, with a common first factor.

    Attributes:
        rank_name: the name of their rank.
        shared: the name of the factor that they share.
        cache: the numbers per token that they cache.
    """

    form: ClassVar[str] = "joint_low_rank"
    rank_name: str = QUERY_KEY
    shared: str = QUERY_KEY
    cache: int = 0

    @property
    def stacks(self) -> list[tuple[tuple[Matrix, ...], StackSize]]:
        """Return the matrices that are decomposed together, with their sizes."""
        rows, D = sum(matrix.outputs for matrix in self.matrices), self.geometry.hidden
        return [(self.matrices, (rows * D, rows + D))]

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
        sizes, biases = [size for _, size in self.stacks], self.bias_numbers
        cap = max(-(-dense // per_rank) for dense, per_rank in sizes)  # the smallest rank at which all stay dense

        def cost(rank: float) -> float:
            return biases + sum(min(per_rank * rank, dense) for dense, per_rank in sizes)

        return (self.variable(self.rank_name, cap, cost),)

    def curve(self) -> Curve:
        """Predict the loss by rank. For separate weights it is the sum, as if their errors were uncorrelated."""
        curves = []
        for matrices, size in self.stacks:
            parts, _ = equalize([self.weight(matrix) for matrix in matrices])
            curves.append((size, self.losses(matrices, parts)))

        def loss_at(rank: int) -> float:
            return sum(0.0 if _saves_nothing(size, rank) else float(by_rank[rank]) for size, by_rank in curves)

        (variable,) = self.variables()
        return curve_of(variable, loss_at, lambda rank: self.cache)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to its form. Roles for which factors would save nothing are left out."""
        rank = ranks[self.rank_name]
        if all(_saves_nothing(size, rank) for _, size in self.stacks):
            return {}
        return self._forms(rank)

    def _forms(self, rank: int) -> dict[str, FormSpec]:
        return dict.fromkeys(self.roles, FormSpec(form=self.form, rank=rank, group=self.shared))

    def solve(self, ranks: Ranks) -> Solution:
        """Factor each weight into two; joint weights share the first factor. Weights stay dense if factors save
        nothing."""
        rank, forms = ranks[self.rank_name], self.forms(ranks)
        if not forms:
            return self.dense()
        if self.entry.weighting == "loss":
            solution, clipped = self._by_loss(rank), {}
        else:
            roots = self.roots
            solution = self._factors(rank, roots)
            clipped = {"clipped": roots.clipped} if roots else {}
        return Solution({**solution.tensors, **self.biases()}, forms, solution.report | clipped)

    def _by_loss(self, rank: int) -> Solution:
        """Decompose each stack in the metric of the loss. docs/methods.md#curves."""
        tensors: dict[str, Tensor] = {}
        report: dict[str, Any] = {}
        for matrices, _ in self.stacks:
            roles = roles_of(matrices)
            if len(roles) == 1 and rank > rank_limit(*matrices[0].shape):
                tensors[matrices[0].weight_key] = self.weight(matrices[0])
                continue
            first_rD, seconds, report["_".join((*roles, "predicted"))] = self.factors_by_loss(matrices, rank)
            tensors[f"{roles[0]}.first.weight"] = first_rD
            tensors |= {f"{role}.second.weight": second for role, second in zip(roles, seconds, strict=True)}
        return Solution(tensors, {}, report)

    def _factors(self, rank: int, roots: InputRoots | None) -> Solution:
        """Decompose [W_1; W_2] ≈ U_k V_kᵀ, √Σ in each: one first factor, of the first role, and two second ones."""
        stack, scales = equalize([self.weight(matrix) for matrix in self.matrices])
        first_kD, seconds, values = joint_low_rank(stack, rank, roots)
        seconds = [_times(second, scale) for second, scale in zip(seconds, scales, strict=True)]
        tensors = {f"{self.roles[0]}.first.weight": first_kD}
        tensors |= {f"{role}.second.weight": second for role, second in zip(self.roles, seconds, strict=True)}
        energies = values.square()
        report = {"error": dropped_share(energies, rank), "spectrum": spectrum(energies), **scale_report(scales)}
        return Solution(tensors, {}, report)

    def curve_work(self, tokens: int) -> Work:
        """Count the losses of all ranks of each stack."""
        return sum((LowRank.curve_work(self, tokens) for _ in self.stacks), start=Work())


class Separate(Joint):
    """Matrices that read the same input, each with factors of its own, at one rank."""

    @property
    def stacks(self) -> list[tuple[tuple[Matrix, ...], StackSize]]:
        """Return each matrix, with its size."""
        D = self.geometry.hidden
        return [((matrix,), (matrix.outputs * D, matrix.outputs + D)) for matrix in self.matrices]

    def _forms(self, rank: int) -> dict[str, FormSpec]:
        cut = (matrix.role for matrix in self.matrices if rank <= rank_limit(*matrix.shape))
        return dict.fromkeys(cut, FormSpec(form="low_rank", rank=rank))

    def _factors(self, rank: int, roots: InputRoots | None) -> Solution:
        tensors: dict[str, Tensor] = {}
        report: dict[str, Any] = {}
        for matrix in self.matrices:
            if rank > rank_limit(*matrix.shape):
                tensors[matrix.weight_key] = self.weight(matrix)
                continue
            cut = factors_of(matrix.role, self.weight(matrix), rank, roots)
            tensors |= cut.tensors
            report |= cut.report
        return Solution(tensors, {}, report)


class PerHead(Joint):
    """Queries and keys, of which each query head has a first factor with its key head."""

    form = "joint_head_low_rank"

    @property
    def stacks(self) -> list[tuple[tuple[Matrix, ...], StackSize]]:
        """Return both matrices. The pairs of all heads count as one."""
        rows, D = sum(matrix.outputs for matrix in self.matrices), self.geometry.hidden
        return [(self.matrices, (rows * D, rows + self.geometry.attention.heads * D))]

    def _factors(self, rank: int, roots: InputRoots | None) -> Solution:
        """Decompose [W_q^h; W_k^h] (2d × D) of each head: one first factor (H·k × D), two second ones (H × d × k)."""
        stack, scales = equalize([self.weight(matrix) for matrix in self.matrices])
        by_head = [weight.unflatten(0, (self.geometry.attention.heads, -1)) for weight in stack]
        firsts, seconds, dropped, total = [], [], 0.0, 0.0
        for parts in zip(*by_head, strict=True):
            first_kD, second, values = joint_low_rank(list(parts), rank, roots)
            firsts.append(first_kD)
            seconds.append(second)
            dropped += values[rank:].square().sum().item()
            total += values.square().sum().item()
        tensors = {f"{self.roles[0]}.first.weight": torch.cat(firsts)}
        for position, role in enumerate(self.roles):
            tensors[f"{role}.second"] = _times(torch.stack([second[position] for second in seconds]), scales[position])
        report = {"error": dropped / total if total else 0.0, **scale_report(scales)}
        return Solution(tensors, {}, report)


KINDS = {"joint": Joint, "separate": Separate, "joint_per_head": PerHead}


@dataclass(frozen=True)
class JointRankKMethod(Method[JointRankK]):
    """`method: joint_rank_k` with the settings of its manifest entry."""

    name: ClassVar[str] = "joint_rank_k"

    def groups(self, layer: LayerGeometry) -> Iterator[Joint]:
        """Claim groups `query_key` (q, k) and the matrices that read the MLP's input.

        Raises ValueError on an MLP without gate, on `joint_per_head` for grouped queries, and on ranks that save
        nothing.
        """
        self._check(layer)
        form, mlp_form = self.entry.query_key, self.entry.mlp_form
        for block in layer.attentions if form != "none" else ():
            needs = roles_of(block.query_key), self._moments(block.query_key, form)
            yield self._fitting(KINDS[form](self.entry, layer, QUERY_KEY, *needs, cache=block.key.outputs))
        for mlp in layer.mlps if mlp_form != "none" else ():
            needs, shared = (roles_of(mlp.readers), self._moments(mlp.readers, mlp_form)), mlp.reader_group
            yield self._fitting(KINDS[mlp_form](self.entry, layer, mlp.name, *needs, rank_name=MLP, shared=shared))

    def _moments(self, matrices: tuple[Matrix, ...], form: str) -> tuple[Moment, ...]:
        return moments_of(self.entry, [(matrix,) for matrix in matrices] if form == "separate" else [matrices])

    def _fitting(self, pair: Joint) -> Joint:
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


def _saves_nothing(size: StackSize, rank: int) -> bool:
    dense, per_rank = size
    return rank * per_rank >= dense


def _times(factor: Tensor, scale: float) -> Tensor:
    """Scale a factor, in float64 only where needed: factors of a wide MLP are the largest tensors of a solve."""
    return factor if scale == 1.0 else factor.double() * scale
