"""A weight fitted again to what really reaches it, from the values of some tokens (docs/methods.md#solve).

T tokens, D outputs, k inputs.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.moments import ROWS_PER_PRODUCT, add_head_moment_


class Refit(NamedTuple):
    """The new weight (D, k); the moment of its inputs (k, k) and of what is left of the targets (D, D), per token."""

    weight: Tensor
    moment: Tensor
    residual: Tensor


def refit(pairs: Iterable[tuple[Tensor, Tensor]], start_Dk: Tensor, ridge: float = 1e-3) -> Refit:
    """The weight W of least Σ‖t − W x‖² + λ‖W − `start`‖² over (targets (T, D), inputs (T, k)), batch by batch.

    λ = `ridge` · mean of the inputs' diagonal moment. What is left is corrected for the k numbers that each output
    fitted to so many tokens: divided by 1 − k / T, of at most twice. float64; batches of less are multiplied in
    float32, and the products summed in float64. Raises ValueError on shapes that do not fit, NaN or infinity, no token
    at all, or a ridge that is not positive.
    """
    if not 0.0 < ridge < float("inf"):
        raise ValueError(f"ridge must be positive, not {ridge}")
    start_Dk = start_Dk.detach().to(torch.float64)
    outputs, inputs = start_Dk.shape
    moment_kk, cross_Dk = start_Dk.new_zeros(inputs, inputs), torch.zeros_like(start_Dk)
    power_DD, tokens = start_Dk.new_zeros(outputs, outputs), 0
    for targets_TD, inputs_Tk in pairs:
        if targets_TD.shape[1:] != (outputs,) or inputs_Tk.shape != (len(targets_TD), inputs):
            shapes = f"{tuple(targets_TD.shape)} and {tuple(inputs_Tk.shape)}"
            raise ValueError(f"targets (T, D) and inputs (T, k) do not fit a weight {outputs} x {inputs}: {shapes}")
        require_finite("targets", targets_TD)
        require_finite("inputs", inputs_Tk)
        dtype = torch.promote_types(torch.promote_types(targets_TD.dtype, inputs_Tk.dtype), torch.float32)
        add_head_moment_(moment_kk[None], inputs_Tk, product_dtype=dtype)
        add_head_moment_(power_DD[None], targets_TD, product_dtype=dtype)
        for targets_tD, inputs_tk in zip(
            targets_TD.split(ROWS_PER_PRODUCT), inputs_Tk.split(ROWS_PER_PRODUCT), strict=True
        ):
            cross_Dk += targets_tD.to(dtype).T @ inputs_tk.to(dtype)
        tokens += len(targets_TD)
    if tokens == 0:
        raise ValueError("a refit needs tokens")
    moment_kk, cross_Dk, power_DD = moment_kk / tokens, cross_Dk / tokens, power_DD / tokens
    weight_Dk = start_Dk + correction(cross_Dk - start_Dk @ moment_kk, moment_kk, ridge)
    fitted_DD = weight_Dk @ cross_Dk.T
    residual_DD = power_DD - fitted_DD - fitted_DD.T + weight_Dk @ moment_kk @ weight_Dk.T
    return Refit(weight_Dk, moment_kk, residual_DD / max(0.5, 1.0 - inputs / tokens))


def correction(error_Dk: Tensor, moment_kk: Tensor, ridge: float) -> Tensor:
    """The ΔW of least E‖e − ΔW x‖² + λ‖ΔW‖², from E[e xᵀ] (D, k) and E[x xᵀ] (k, k): what to add to a weight that
    leaves the error e of what it should give. λ = `ridge` · mean of the moment's diagonal. float64; zeros for inputs
    that are all zero. Raises ValueError on shapes that do not fit, NaN, infinity, or a ridge that is not positive.
    """
    inputs = require_square("moment", moment_kk)
    if error_Dk.ndim != 2 or error_Dk.shape[1] != inputs:
        raise ValueError(f"error {tuple(error_Dk.shape)} and moment {tuple(moment_kk.shape)} do not fit")
    if not 0.0 < ridge < float("inf"):
        raise ValueError(f"ridge must be positive, not {ridge}")
    require_finite("error", error_Dk)
    require_finite("moment", moment_kk)
    error_Dk, moment_kk = error_Dk.detach().to(torch.float64), moment_kk.detach().to(torch.float64)
    mean = float(moment_kk.diagonal().mean())
    if mean <= 0.0:
        return torch.zeros_like(error_Dk)
    damped_kk = moment_kk + ridge * mean * torch.eye(inputs, dtype=torch.float64, device=moment_kk.device)
    return torch.cholesky_solve(error_Dk.T, torch.linalg.cholesky(damped_kk)).T


def evenly_spread(start: int, count: int, total: int, wanted: int) -> Tensor:
    """Which of `count` tokens, numbered from `start` of `total`, are among `wanted` that are spread evenly over all.

    Token t is, where ⌊(t + 1) · wanted / total⌋ > ⌊t · wanted / total⌋: exactly `wanted` of all, or all if there are
    fewer. Positions within the `count`, int64. Raises ValueError unless 0 <= start and start + count <= total.
    """
    if not 0 <= start <= start + count <= total:
        raise ValueError(f"tokens {start} to {start + count} are not of {total}")
    tokens_t = torch.arange(start, start + count)
    wanted = min(wanted, total)
    return ((tokens_t + 1) * wanted // total > tokens_t * wanted // total).nonzero()[:, 0]
