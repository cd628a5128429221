"""Least-squares refits of a weight to its actual inputs, from the values of some tokens (docs/methods.md#solve).

T tokens, D outputs, q outputs or mixtures of them, k inputs.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.moments import ROWS_PER_PRODUCT, add_head_moment_, wide_product

RIDGE = 1e-3  # of the mean of the inputs' diagonal moment


class Refit(NamedTuple):
    """The new weight (D, k), and the moment of its inputs (k, k) per token."""

    weight: Tensor
    moment: Tensor


def refit(pairs: Iterable[tuple[Tensor, Tensor]], start_Dk: Tensor, ridge: float = RIDGE) -> Refit:
    """Minimise Σ‖t − W x‖² + λ‖W − `start`‖² over batches of (targets (T, D), inputs (T, k)).

    λ = `ridge` · mean of the inputs' diagonal moment. Products of smaller types are computed in float32, all sums in
    float64. Raises ValueError on shapes that do not fit, NaN or infinity, no tokens, or a ridge that is not positive.
    """
    _check_ridge(ridge)
    start_Dk = start_Dk.detach().to(torch.float64)
    sums = _summed(pairs, *start_Dk.shape)
    penalty = ridge * float(sums.moment.diagonal().mean())
    if penalty <= 0.0:
        return Refit(start_Dk.clone(), sums.moment)
    damped_kk = sums.moment.clone()
    damped_kk.diagonal().add_(penalty)
    pulled_kD = torch.add(sums.cross, start_Dk, alpha=penalty).T
    return Refit(torch.cholesky_solve(pulled_kD, torch.linalg.cholesky(damped_kk)).T, sums.moment)


def refit_residual(pairs: Iterable[tuple[Tensor, Tensor]], outputs: int, inputs: int, ridge: float = RIDGE) -> float:
    """Return the error after a refit: mean ‖e − ΔW x‖² over (errors (T, q) of the old weight, inputs (T, k)).

    ΔW minimises Σ‖e − ΔW x‖² + λ‖ΔW‖². The error is divided by max(½, 1 − k / T), because each output fits k numbers to
    T tokens. Takes k³/3 + q k² operations besides the sums. Precision and exceptions as `refit`.
    """
    _check_ridge(ridge)
    sums = _summed(pairs, outputs, inputs)
    moment_kk, cross_qk = sums.moment, sums.cross
    penalty = ridge * float(moment_kk.diagonal().mean())
    residual = float(sums.power)
    if penalty > 0.0:
        moment_kk.diagonal().add_(penalty)
        factor_kk = torch.linalg.cholesky(moment_kk)
        half_qk = torch.linalg.solve_triangular(factor_kk.mT, cross_qk, upper=True, left=False)
        change_qk = torch.linalg.solve_triangular(factor_kk, half_qk, upper=False, left=False)
        residual -= float(half_qk.square().sum()) + penalty * float(change_qk.square().sum())
    return max(0.0, residual) / max(0.5, 1.0 - inputs / sums.tokens)


class _Sums(NamedTuple):
    """E[x xᵀ] (k, k), E[t xᵀ] (q, k), E‖t‖² () and the number of tokens."""

    moment: Tensor
    cross: Tensor
    power: Tensor
    tokens: int


def _summed(pairs: Iterable[tuple[Tensor, Tensor]], outputs: int, inputs: int) -> _Sums:
    moment_kk = cross_qk = power = torch.zeros(())
    tokens = 0
    for targets_Tq, inputs_Tk in pairs:
        if targets_Tq.shape[1:] != (outputs,) or inputs_Tk.shape != (len(targets_Tq), inputs):
            shapes = f"{tuple(targets_Tq.shape)} and {tuple(inputs_Tk.shape)}"
            raise ValueError(f"targets (T, D) and inputs (T, k) do not fit a weight {outputs} x {inputs}: {shapes}")
        require_finite("targets", targets_Tq)
        require_finite("inputs", inputs_Tk)
        if tokens == 0:
            moment_kk = inputs_Tk.new_zeros(inputs, inputs, dtype=torch.float64)
            cross_qk = inputs_Tk.new_zeros(outputs, inputs, dtype=torch.float64)
            power = cross_qk.new_zeros(())
        dtype = torch.promote_types(torch.promote_types(targets_Tq.dtype, inputs_Tk.dtype), torch.float32)
        add_head_moment_(moment_kk[None], inputs_Tk, product_dtype=dtype)
        for targets_tq, inputs_tk in zip(
            targets_Tq.split(ROWS_PER_PRODUCT), inputs_Tk.split(ROWS_PER_PRODUCT), strict=True
        ):
            cross_qk += wide_product(targets_tq.T, inputs_tk)
        power += targets_Tq.to(torch.float64).square().sum()
        tokens += len(targets_Tq)
    if tokens == 0:
        raise ValueError("a refit needs tokens")
    return _Sums(moment_kk.div_(tokens), cross_qk.div_(tokens), power / tokens, tokens)


def _check_ridge(ridge: float) -> None:
    if not 0.0 < ridge < float("inf"):
        raise ValueError(f"ridge must be positive, not {ridge}")


def correction(error_Dk: Tensor, moment_kk: Tensor, ridge: float) -> Tensor:
    """Return the ΔW that minimises E‖e − ΔW x‖² + λ‖ΔW‖², from E[e xᵀ] (D, k) and E[x xᵀ] (k, k).

    Adding ΔW to a weight with output errors e corrects them. λ = `ridge` · mean of the moment's diagonal. float64;
    zeros for a zero moment. Raises ValueError on shapes that do not fit, NaN, infinity or a ridge <= 0.
    """
    inputs = require_square("moment", moment_kk)
    if error_Dk.ndim != 2 or error_Dk.shape[1] != inputs:
        raise ValueError(f"error {tuple(error_Dk.shape)} and moment {tuple(moment_kk.shape)} do not fit")
    _check_ridge(ridge)
    require_finite("error", error_Dk)
    require_finite("moment", moment_kk)
    error_Dk, moment_kk = error_Dk.detach().to(torch.float64), moment_kk.detach().to(torch.float64)
    mean = float(moment_kk.diagonal().mean())
    if mean <= 0.0:
        return torch.zeros_like(error_Dk)
    damped_kk = moment_kk + ridge * mean * torch.eye(inputs, dtype=torch.float64, device=moment_kk.device)
    return torch.cholesky_solve(error_Dk.T, torch.linalg.cholesky(damped_kk)).T


def evenly_spread(start: int, count: int, total: int, num_chosen: int) -> Tensor:
    """Return the positions, in tokens start … start + count - 1, of `num_chosen` tokens spread evenly over `total`.

    Token t is chosen if ⌊(t + 1) · num_chosen / total⌋ > ⌊t · num_chosen / total⌋: exactly `num_chosen` of all, or all
    if there are fewer. int64, relative to `start`. Raises ValueError unless 0 <= start and start + count <= total.
    """
    if not 0 <= start <= start + count <= total:
        raise ValueError(f"tokens {start} to {start + count} are not of {total}")
    tokens_t = torch.arange(start, start + count)
    num_chosen = min(num_chosen, total)
    return ((tokens_t + 1) * num_chosen // total > tokens_t * num_chosen // total).nonzero()[:, 0]
