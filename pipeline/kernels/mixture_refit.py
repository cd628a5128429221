"""Refits the experts' writers to the output of a whole mixture. docs/methods.md#mixtures.

A mixture computes Σ_e W_e v_e, where v_e = p_e h_e are the weighted channels of expert e, and 0 for tokens that it does
not serve. The refit minimises E‖y − Σ_e W_e v_e‖² for the dense mixture's output y.

It goes expert by expert against the residual, with the tokens in memory: y (T, D), and the tokens and values of one
expert at a time.

Legend: T all tokens, t those of an expert, D outputs, k channels of an expert.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite
from pipeline.kernels.deferred import Deferred, Offload, in_memory
from pipeline.kernels.moments import ROWS_PER_PRODUCT, add_head_moment_, wide_product
from pipeline.kernels.refit import correction

SWEEPS = 3
RIDGE = 1e-4  # of the mean diagonal of an expert's moment


class Served(NamedTuple):
    """The tokens (t,) that an expert serves, ascending, and its weighted channels (t, k) on them.

    `others`: channels (m, k) on tokens of other experts, which complete the moment of an expert with few tokens. A
    refit leaves its outputs on them as they are. `scale`: of sums over both, so that they count as the tokens alone.
    """

    tokens: Tensor
    values: Tensor
    others: Tensor | None = None
    scale: float = 1.0

    def moment(self, product_dtype: torch.dtype) -> Tensor:
        """Return the sum (k, k) of v vᵀ over the tokens and the others, float64."""
        width = self.values.shape[1]
        moment_kk = torch.zeros(width, width, dtype=torch.float64, device=self.values.device)
        for values in (self.values,) if self.others is None else (self.values, self.others):
            add_head_moment_(moment_kk[None], values, product_dtype=product_dtype)
        return moment_kk


class MixtureResidual:
    """The residual (T, D) of a mixture's output, against which its writers are refitted one at a time.

    Each refit minimises E‖r − ΔW v‖² + λ‖ΔW‖², λ = `ridge` · mean of the diagonal of E[v vᵀ]. Products are float32 or
    better, sums and solutions float64.
    """

    def __init__(self, target_TD: Tensor, ridge: float = RIDGE) -> None:
        """`target_TD`: the output to be reached, which is copied. Raises ValueError on NaN, infinity or no tokens."""
        if target_TD.ndim != 2 or not len(target_TD):
            raise ValueError(f"a refit needs targets (T, D), not {tuple(target_TD.shape)}")
        require_finite("target", target_TD)
        self.residual_TD = target_TD.detach().to(torch.promote_types(target_TD.dtype, torch.float32), copy=True)
        self.ridge = ridge

    def subtract_(self, part: Served, weight_Dk: Tensor) -> None:
        """Subtract an expert's output. Raises ValueError on shapes that do not fit, NaN or infinity."""
        _subtract_(self.residual_TD, _checked(part, weight_Dk, self.residual_TD), weight_Dk)

    def refit_(self, part: Served) -> Tensor | None:
        """Return the change (D, k) of an expert's writer, and subtract its output; None without tokens or channels."""
        if not part.values.numel():
            return None
        change_Dk = correction(*_sums(self.residual_TD, part), self.ridge)
        _subtract_(self.residual_TD, part, change_Dk)
        return change_Dk


def refit_mixture_(
    residual: MixtureResidual,
    served: Callable[[int], Served],
    weights: Sequence[Tensor],
    sweeps: int = SWEEPS,
    offload: Offload = in_memory,
) -> Sequence[Tensor]:
    """Refit each writer (D, k) in turn to the residual that all others leave, `sweeps` times.

    `residual`: at first the output to be reached, at the end what the refitted writers leave of it. `served` is called
    with the number of an expert; an expert without tokens or channels keeps its writer. One writer at a time is in
    memory: `weights` may be computed on access, right before its expert is served, and `offload` stores the others.
    Raises the errors of `MixtureResidual`.
    """
    fitted: list[Callable[[], Tensor]] = []
    for number, weight in enumerate(weights):
        weight_Dk = weight.detach().to(torch.float64)
        residual.subtract_(served(number), weight_Dk)
        fitted.append(offload(weight_Dk))
    for _ in range(sweeps):
        for number in range(len(fitted)):
            change_Dk = residual.refit_(served(number))
            if change_Dk is not None:
                fitted[number] = offload(fitted[number]() + change_Dk)
    return Deferred(fitted)


def _checked(part: Served, weight_Dk: Tensor, target_TD: Tensor) -> Served:
    if part.values.shape != (len(part.tokens), weight_Dk.shape[1]) or len(weight_Dk) != target_TD.shape[1]:
        shapes = f"{tuple(part.values.shape)}, {tuple(weight_Dk.shape)} and {tuple(target_TD.shape)}"
        raise ValueError(f"values (t, k), a writer (D, k) and targets (T, D) do not fit: {shapes}")
    require_finite("values", part.values)
    return part


def _subtract_(residual_TD: Tensor, part: Served, weight_Dk: Tensor) -> None:
    dtype = residual_TD.dtype
    residual_TD.index_add_(0, part.tokens, part.values.to(dtype) @ weight_Dk.to(dtype).T, alpha=-1)


def _sums(residual_TD: Tensor, part: Served) -> tuple[Tensor, Tensor]:
    """Return E[r vᵀ] (D, k) and E[v vᵀ] (k, k), as means over all tokens."""
    tokens, width = len(residual_TD), part.values.shape[1]
    moment_kk = part.moment(residual_TD.dtype)
    cross_Dk = moment_kk.new_zeros(residual_TD.shape[1], width)
    for tokens_r, values_rk in zip(
        part.tokens.split(ROWS_PER_PRODUCT), part.values.split(ROWS_PER_PRODUCT), strict=True
    ):
        cross_Dk += wide_product(residual_TD[tokens_r].T, values_rk.to(residual_TD.dtype))
    return cross_Dk / tokens, moment_kk / tokens
