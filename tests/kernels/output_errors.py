"""The output error of a refit, computed from the whole moment."""

from __future__ import annotations

import math

import torch


def output_error(
    weight_DN: torch.Tensor, refit_Dk: torch.Tensor, kept_k: torch.Tensor, moment_NN: torch.Tensor
) -> float:
    """Relative squared output error ‖W − W̃P‖²_C / ‖W‖²_C of channels `kept_k`, with ‖E‖²_C = tr(E C Eᵀ)."""
    residual_DN = weight_DN.to(torch.float64, copy=True)
    residual_DN[:, kept_k] -= refit_Dk.double()
    lost, whole = (
        float(((matrix_DN @ moment_NN.double()) * matrix_DN).sum()) for matrix_DN in (residual_DN, weight_DN.double())
    )
    return 0.0 if lost <= 0.0 else lost / whole if whole > 0.0 else math.inf
