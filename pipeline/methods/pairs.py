"""Fits weights to the pairs of `correct: output`. docs/methods.md#corrections.

Legend: D hidden, F features at a point, a_d and a_c the inputs of the dense and the compressed layers there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.families.blocks import Matrix
from pipeline.kernels.refit import correction
from pipeline.methods.method import Moment, Statistics


class Carried(NamedTuple):
    """`weights` with W A in place of W, where A = `transfer` (D, D) best fits a_d = A a_c; `moment` is E[a_c a_cᵀ]."""

    weights: dict[str, Tensor]
    transfer: Tensor
    moment: Tensor


class Completed(NamedTuple):
    """A `weight` (D, F) that writes to the residual stream, and the `moment` (F, F) of its input."""

    weight: Tensor
    moment: Tensor


def carry(
    statistics: Statistics, moment: Moment, weights: Mapping[str, Tensor], matrices: Iterable[Matrix], ridge: float
) -> Carried:
    """Fit the weights of some matrices to the compressed model's inputs. Equal inputs change nothing.

    `ridge`: the penalty of the change, relative to the mean diagonal of the inputs' moment.
    """
    moment_DD, error_DD = _sums(statistics, moment)
    change_DD = correction(error_DD, moment_DD, ridge)
    moved = {matrix.weight_key: weights[matrix.weight_key].double() for matrix in matrices}
    moved = {name: weight + weight @ change_DD for name, weight in moved.items()}
    unit_DD = torch.eye(len(change_DD), dtype=change_DD.dtype, device=change_DD.device)
    return Carried({**weights, **moved}, unit_DD + change_DD, moment_DD)


def complete(
    statistics: Statistics, moment: Moment, weight_DF: Tensor, ridge: float, others_FF: Tensor | None = None
) -> Completed:
    """Add to a weight the least-squares fit of the error that remains in the residual stream after it.

    `ridge`: as of `carry`. `others_FF`: the moment of inputs at which the weight's outputs are to stay, on tokens that
    stand for those that an expert lacks.
    """
    moment_FF, error_DF = _sums(statistics, moment)
    if others_FF is not None:
        moment_FF = moment_FF + others_FF
    return Completed(weight_DF.double() + correction(error_DF, moment_FF, ridge), moment_FF)


def _sums(statistics: Statistics, moment: Moment) -> tuple[Tensor, Tensor]:
    """Return E[x xᵀ] (F, F) and E[e xᵀ] (D, F), per token."""
    whole_PF = statistics.mean(moment)[0]
    width = whole_PF.shape[1]
    return whole_PF[:width], whole_PF[width:]
