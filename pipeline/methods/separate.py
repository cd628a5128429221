"""Baselines: SVD, ASVD and SVD-LLM, which factor each linear weight by itself, to a common share of its numbers.

docs/methods.md#baselines. Legend: m outputs, D inputs of a weight, F features of a moment, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import ASVD, SVD, SVDLLM
from manifests.records import FormSpec
from pipeline.families.blocks import roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.lowrank import InputRoots, input_roots, rank_limit
from pipeline.methods.base import E, Group, Method
from pipeline.methods.method import Ranks, Scores, Solution
from pipeline.methods.moments import input_moment
from pipeline.methods.tensors import factors_of
from pipeline.methods.work import Work, low_rank
from pipeline.ranks.budget import RankKey, RankVariable

FLOOR = 1e-5  # smallest size, relative to the largest: an input that is always zero would be scaled by zero


@dataclass(frozen=True)
class Separate(Group[E]):
    """Matrices that read the same input, each factored by itself.

    `roots`: returns S and S⁻¹ for inputs with this second moment; the factors W' minimise ‖(W − W')S‖.
    """

    roots: Callable[[Tensor], InputRoots] | None = None

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a rank for each role. At its cap the weight stays dense, because factors would save nothing."""
        return tuple(
            self.variable(matrix.role, rank_limit(*matrix.shape) + 1, partial(_stored, *matrix.shape, matrix.biases))
            for matrix in self.matrices
        )

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role whose factors store less than the dense weight to `low_rank`."""
        cut = (role for role in self.roles if ranks[role] <= rank_limit(*self.geometry.weight_shape(role)))
        return {role: FormSpec(form="low_rank", rank=ranks[role]) for role in cut}

    def solve(self, ranks: Ranks) -> Solution:
        """Factor each weight into first (r, D) and second (m, r). Biases and weights with ranks above `rank_limit` are
        unchanged."""
        return next(self.solve_sizes([ranks]))

    def solve_sizes(self, sizes: Sequence[Ranks]) -> Iterator[Solution]:
        """Solve several sizes, with the roots of the inputs computed once."""
        roots = self.roots(self.statistics.moments[self.moments[0]][0]) if self.roots else None
        return (self._cut(roots, self.forms(ranks)) for ranks in sizes)

    def _cut(self, roots: InputRoots | None, forms: dict[str, FormSpec]) -> Solution:
        tensors: dict[str, Tensor] = {}
        report: dict[str, Any] = {}
        for key, weight in self.weights.items():
            role, _, kind = key.rpartition(".")
            rank = forms[role].rank if role in forms else None
            if kind != "weight" or rank is None:
                tensors[key] = weight
                continue
            factors = factors_of(role, weight, rank, roots)
            tensors |= factors.tensors
            report |= factors.report
        clipped = {"clipped": roots.clipped} if roots else {}
        return Solution(tensors, forms, report | clipped)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the root of the inputs' moment, and the factors."""
        return low_rank(self.matrices, self.matrices[0].inputs) if self.roots else Work()


def _stored(m: int, D: int, bias: int, rank: float) -> float:
    return bias + (m * D if rank >= rank_limit(m, D) + 1 else min(rank * (m + D), m * D))


@dataclass(frozen=True)
class SeparateMethod(Method[E]):
    """Factors each weight by itself. Subclasses define `roots`, as `Separate.roots`; None: inputs are not weighted."""

    @property
    def roots(self) -> Callable[[Tensor], InputRoots] | None:
        """Return None: the factors are those of the weight."""
        return None

    def groups(self, layer: LayerGeometry) -> Iterator[Separate[E]]:
        """Claim every matrix; matrices that read the same input are one group."""
        for block in layer.blocks:
            for name, matrices in block.by_input.items():
                moments = (input_moment(matrices[0]),) if self.roots else ()
                yield Separate(self.entry, layer, name, roles_of(matrices), moments, roots=self.roots)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return the ranks at which the two factors of each weight store `ratio` of its numbers."""
        targets: dict[RankKey, float] = {}
        for group in self.claims(geometry):
            for variable in group.variables():
                m, D = group.geometry.weight_shape(variable.name)
                targets[variable.key] = min(ratio * m * D / (m + D), float(variable.cap))
        return targets


@dataclass(frozen=True)
class SVDMethod(SeparateMethod[SVD]):
    """`method: svd`: the truncated SVD of every weight."""

    name: ClassVar[str] = "svd"


@dataclass(frozen=True)
class ASVDMethod(SeparateMethod[ASVD]):
    """`method: asvd`: the truncated SVD of every weight with scaled inputs."""

    name: ClassVar[str] = "asvd"

    @property
    def roots(self) -> Callable[[Tensor], InputRoots]:
        """Return `scaled_inputs` with the entry's `alpha`."""
        return partial(scaled_inputs, alpha=self.entry.alpha)


@dataclass(frozen=True)
class SVDLLMMethod(SeparateMethod[SVDLLM]):
    """`method: svd_llm`: the truncated SVD of every weight with whitened inputs."""

    name: ClassVar[str] = "svd_llm"

    @property
    def roots(self) -> Callable[[Tensor], InputRoots]:
        """Return S = M^{1/2}. Any S with S Sᵀ = M gives the same product, such as the paper's Cholesky factor."""
        return input_roots


def scaled_inputs(moment_FF: Tensor, alpha: float) -> InputRoots:
    """Return S = diag(s)^alpha, where s_i is the root mean square of input i divided by the mean over inputs.

    The result counts clipped inputs. The paper uses the mean magnitude of an input, which a second moment does not
    give.
    """
    size_F = moment_FF.diagonal().double().clamp_min(0.0).sqrt()
    largest = float(size_F.max())
    if largest == 0.0:
        size_F, largest = torch.ones_like(size_F), 1.0
    clipped = int((size_F < FLOOR * largest).sum())
    size_F = size_F.clamp_min(FLOOR * largest)
    scale_F = (size_F / size_F.mean()) ** alpha
    return InputRoots(torch.diag(scale_F), torch.diag(1.0 / scale_F), clipped)
