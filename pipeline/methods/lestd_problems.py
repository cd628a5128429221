"""The tensors that LeSTD decomposes together, the weighting of their modes, and what is stored of the result.

docs/methods.md#lestd. Legend: D hidden, H query heads, d head_dim, R1 R2 R3 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.lowrank import InputRoots, input_roots
from pipeline.kernels.scales import scale_report
from pipeline.kernels.tucker import Tucker, shared_tucker
from pipeline.methods.lestd_sizes import ProblemShape, SizeChoice, pack_bits

LEAST_SCALE = 1e-5
SAFE_EXPONENT = 40  # bound on the exponent of a core's largest entry, so that relevant squares are normal in float32


@dataclass(frozen=True)
class Problem:
    """The weighted tensors of one decomposition, with the weightings that a solution must undo.

    Attributes:
        roles: for each tensor, the roles that it holds, in the order of its third mode.
        divisors: role -> the number that divided its projection, to bring all to a similar size.
        rows: the weighting of mode 1 (D × D); `columns` that of mode 2; `scales` (h) that of the heads.
    """

    shape: ProblemShape
    tensors: Sequence[Tensor]
    roles: Sequence[tuple[str, ...]]
    divisors: Mapping[str, float]
    rows: InputRoots | None = None
    columns: InputRoots | None = None
    scales: Tensor | None = None

    def weighted_inputs(self, moment_DD: Tensor) -> Problem:
        """Weight mode 1 by S = M^{1/2}, so that the error is that of the outputs of q, k and v."""
        roots = input_roots(moment_DD)
        weighted = [torch.tensordot(roots.root, tensor, dims=1) for tensor in self.tensors]
        return replace(self, tensors=weighted, rows=roots)

    def weighted_output(self, moment_Hdd: Tensor) -> Problem:
        """Weight mode 2 of o by the root of the heads' mean covariance, and each head by its own root mean square.

        U₂ is shared, so that a separate root for each head could not be undone. Correlations between heads are ignored.
        """
        power_H = moment_Hdd.diagonal(dim1=1, dim2=2).mean(dim=1)
        scales_H = (power_H / power_H.mean().clamp_min(torch.finfo(torch.float64).tiny)).sqrt().clamp_min(LEAST_SCALE)
        roots = input_roots((moment_Hdd / scales_H.square()[:, None, None]).mean(dim=0))
        weighted = [torch.einsum("ed,xdth,h->xeth", roots.root, tensor, scales_H) for tensor in self.tensors]
        return replace(self, tensors=weighted, columns=roots, scales=scales_H)

    def whole(self, tolerance: float) -> Tucker:
        """Return the HOSVD at full rank. Its leading blocks give the energy that smaller ranks keep."""
        return shared_tucker(self.tensors, self.shape.full, 1, tolerance)

    def errors(self, approximations: Sequence[Tensor]) -> dict[str, Tensor]:
        """Map each role to the error (D, width, H) of its part, without weighting and divisors."""
        errors: dict[str, Tensor] = {}
        for tensor, rebuilt, roles in zip(self.tensors, approximations, self.roles, strict=True):
            error_xyth = tensor.double() - rebuilt
            if self.rows is not None:
                error_xyth = torch.tensordot(self.rows.inverse, error_xyth, dims=1)
            if self.columns is not None:
                error_xyth = torch.einsum("ed,xdth->xeth", self.columns.inverse, error_xyth)
            if self.scales is not None:
                error_xyth = error_xyth / self.scales
            errors |= {role: error_xyth[:, :, place] * self.divisors[role] for place, role in enumerate(roles)}
        return errors


@dataclass(frozen=True)
class SolvedProblem:
    """A problem's decomposition. `energies`: those of Stage I after each sweep."""

    problem: Problem
    choice: SizeChoice
    tucker: Tucker
    energies: tuple[float, ...]

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Map names to tensors, and the fields of the form: ranks and, as `nnz`, the entries of sparse cores."""
        problem, tucker, end = self.problem, self.tucker, self.problem.shape.own
        first, second = tucker.first, tucker.second
        if problem.rows is not None:
            first = problem.rows.inverse @ first
        if problem.columns is not None:
            second = problem.columns.inverse @ second
        tensors = {f"first{end}": first, f"second{end}": second}
        form: dict[str, Any] = {"ranks_o": list(self.choice.ranks[:2])} if end else {"ranks": list(self.choice.ranks)}
        parts = zip(problem.shape.cores, tucker.thirds, tucker.cores, problem.roles, strict=True)
        for suffix, third, core, roles in parts:
            third = third * third.new_tensor([problem.divisors[role] for role in roles])[:, None]
            mask = (core != 0).contiguous()
            if not mask.any():
                mask.view(-1)[0] = True  # a form cannot have an empty core
            if problem.scales is not None:
                core = core / problem.scales
            if end:
                core = core * third[0, 0]
            else:
                tensors[f"third{suffix}"] = third
            if self.choice.count is None:
                tensors[f"core{suffix}"] = core.contiguous()
            else:
                tensors |= {f"core{suffix}.values": core[mask], f"core{suffix}.mask": pack_bits(mask)}
                form[f"nnz{suffix}"] = int(mask.sum())
        return tensors, form

    def report(self, entries: int) -> dict[str, Any]:
        """Return the relative squared error (of weighted weights, if there is a weighting), ranks, stored numbers,
        energies.

        `energies` are shares of the whole: after each sweep of Stage I, and `pruned` after the first cut of Stage II.
        `entries`: those of sparse cores.
        """
        problem, choice, tucker = self.problem, self.choice, self.tucker
        shape, end, total = problem.shape, problem.shape.own, tucker.total or 1.0
        pruned = {} if choice.count is None else {f"pruned{end}": tucker.energies[0] / total}
        core = sum(shape.positions(choice.ranks)) if choice.count is None else entries
        index = 0 if choice.count is None else shape.index(choice.ranks)
        divisors = [problem.divisors[role] for roles in problem.roles for role in roles]
        return {
            f"error{end}": tucker.error / total,
            f"tucker_ranks{end}": list(choice.ranks),
            f"core{end}": core,
            f"numbers{end}": shape.factors(choice.ranks) + index + core,
            f"numbers_without_index{end}": shape.factors(choice.ranks) + core,
            f"energies{end}": [round(energy / total, 6) for energy in self.energies],
            **pruned,
            **{f"clipped{end}": roots.clipped for roots in (problem.rows, problem.columns) if roots is not None},
            **{f"{name}{end}": scales for name, scales in scale_report(divisors).items()},
        }


def squares_of(whole: Tucker) -> tuple[list[Tensor], int]:
    """Return (g / 2^e)² in float32, precise enough to choose sizes, and e. e is 0 if the squares fit into float32."""
    exponent = math.frexp(max(float(core.abs().max()) for core in whole.cores))[1]
    exponent = 0 if abs(exponent) <= SAFE_EXPONENT else exponent
    return [(core * 2.0**-exponent).square().to(torch.float32) for core in whole.cores], exponent
