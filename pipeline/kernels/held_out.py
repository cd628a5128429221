"""The error on held-out text of a fit to calibration text. F features, k of them kept, m the others."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-4  # over the mean of the moment's diagonal


def held_out_error(moment_FF: Tensor, held_out_FF: Tensor) -> float:
    """Return the share of held-out energy that a linear fit misses: half of the features predict the others.

    The features with more energy in `moment_FF` predict: B = C_mk (C_kk + λI)⁻¹, as in the refit behind an elimination.
    The error is tr(H_mm − 2 B H_km + B H_kk Bᵀ) / tr H_mm with the moment H of held-out text. It approaches the error
    of the best fit as the text behind C grows. Both moments are symmetric float64 and are not changed. Without held-out
    energy, the error is 0. Raises ValueError on other shapes.
    """
    size = moment_FF.shape[0]
    if moment_FF.shape != (size, size) or held_out_FF.shape != moment_FF.shape or size < 2:
        raise ValueError(
            f"moments need one square shape of at least 2, not {tuple(moment_FF.shape)} and {tuple(held_out_FF.shape)}"
        )
    order_F = moment_FF.diagonal().argsort(descending=True, stable=True)
    kept_k, others_m = order_F[: size - size // 2], order_F[size - size // 2 :]
    energy = held_out_FF.diagonal()[others_m].sum()
    ridge = RIDGE * moment_FF.diagonal().mean()
    if energy <= 0.0 or ridge <= 0.0:
        return float(energy > 0.0)
    kept_kk = moment_FF[kept_k][:, kept_k]
    kept_kk.diagonal().add_(ridge)
    factor_kk = torch.linalg.cholesky(kept_kk)
    fit_km = torch.cholesky_solve(moment_FF[kept_k][:, others_m], factor_kk)
    explained = 2 * (fit_km * held_out_FF[kept_k][:, others_m]).sum()
    spread = (fit_km * (held_out_FF[kept_k][:, kept_k] @ fit_km)).sum()
    return float((energy - explained + spread) / energy)
