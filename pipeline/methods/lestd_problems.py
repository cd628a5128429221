"""The tensors that LeSTD decomposes together, and the weighting of their modes. docs/methods.md#lestd.

Legend: D hidden, H query heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.lowrank import InputRoots, input_roots
from pipeline.methods.lestd_sizes import ProblemShape

LEAST_SCALE = 1e-5


@dataclass(frozen=True)
class Layout:
    """A problem and the names of its tensors: `first` and `second` end in `own`, `third` and `core` in `cores`."""

    shape: ProblemShape
    cores: tuple[str, ...]
    own: str = ""


@dataclass(frozen=True)
class Problem:
    """The weighted tensors of a layout, with the weightings that a solution must undo.

    Attributes:
        rows: the weighting of mode 1 (D × D); `columns` that of mode 2; `scales` (h) that of the heads.
        divisors: for each tensor, the numbers that divided its projections (mode 3), to bring them to a similar size.
    """

    layout: Layout
    tensors: list[Tensor]
    rows: InputRoots | None = None
    columns: InputRoots | None = None
    scales: Tensor | None = None
    divisors: tuple[tuple[float, ...], ...] = ()


def weighted_inputs(layout: Layout, tensors: list[Tensor], moment_DD: Tensor) -> Problem:
    """Weight mode 1 by S = M^{1/2}, so that the error is that of the outputs of q, k and v."""
    roots = input_roots(moment_DD)
    return Problem(layout, [torch.tensordot(roots.root, tensor, dims=1) for tensor in tensors], rows=roots)


def weighted_output(layout: Layout, tensor_Dd1H: Tensor, moment_Hdd: Tensor) -> Problem:
    """Weight mode 2 of o by the root of the heads' mean covariance, and each head by its own root mean square.

    U₂ is shared, so that a separate root for each head could not be undone. Correlations between heads are ignored.
    """
    power_H = moment_Hdd.diagonal(dim1=1, dim2=2).mean(dim=1)
    scales_H = (power_H / power_H.mean().clamp_min(torch.finfo(torch.float64).tiny)).sqrt().clamp_min(LEAST_SCALE)
    roots = input_roots((moment_Hdd / scales_H.square()[:, None, None]).mean(dim=0))
    weighted = torch.einsum("ed,xdth,h->xeth", roots.root, tensor_Dd1H, scales_H)
    return Problem(layout, [weighted], columns=roots, scales=scales_H)


def errors_of(
    problem: Problem, approximations: Sequence[Tensor], roles: Sequence[tuple[str, ...]]
) -> dict[str, Tensor]:
    """Map each role to the error (D, width, H) of its part, without weighting and scales."""
    rows = problem.rows.inverse if problem.rows is not None else None
    columns = problem.columns.inverse if problem.columns is not None else None
    errors: dict[str, Tensor] = {}
    for tensor, rebuilt, names, divisors in zip(problem.tensors, approximations, roles, problem.divisors, strict=True):
        error = _unweighted(tensor.double() - rebuilt, rows, columns, problem.scales)
        errors |= {name: error[:, :, place] * divisors[place] for place, name in enumerate(names)}
    return errors


def _unweighted(error_xyth: Tensor, rows: Tensor | None, columns: Tensor | None, scales: Tensor | None) -> Tensor:
    """Undo the weighting of rows, columns and heads of an error (D, width, t, H)."""
    if rows is not None:
        error_xyth = torch.tensordot(rows, error_xyth, dims=1)
    if columns is not None:
        error_xyth = torch.einsum("ed,xdth->xeth", columns, error_xyth)
    return error_xyth if scales is None else error_xyth / scales
