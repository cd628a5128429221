"""Errors of what a norm reads, and errors after an RMS norm as those of the linear map before it. docs/methods.md.

Legend: D hidden, F features that the map reads; the other dimensions are of tokens.
"""

from __future__ import annotations

from torch import Tensor

RIDGE = 1e-4  # of the mean square of the gains
LEAST_SQUARE = 1e-6  # added to a token's mean square, as norms do


def inverse_rms(stream_D: Tensor) -> Tensor:
    """Return the weight (…, 1) of each token in sums of errors: 1 over the root mean square of its residual stream.

    A norm divides the stream by that before a layer reads it. docs/methods.md#tokens-of-large-norm.
    """
    return stream_D.square().mean(dim=-1, keepdim=True).add_(LEAST_SQUARE).rsqrt_()


def before_norm(
    values_F: Tensor, outputs_D: Tensor, errors_D: Tensor, gains_D: Tensor, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return x' (…, F) and e' (…, D): a change Δ of the map with Δ x' = e' changes the residual stream by e.

    The stream gets gains · y / ρ(y) of the map's outputs y = W x, with ρ(y)² = mean(y²) + eps. With x' = x / ρ it gets
    gains · W x', linear in W while ρ stays. The norm of Δ x' - e / gains, weighted by the gains, is least at
    e' = e / gains. A ridge prevents large changes of channels whose gain is nearly zero, which have no effect.

    Args:
        values_F: x, any floating dtype.
        outputs_D: y, in the dtype of the errors. errors_D: e, the error to correct; not changed.
        gains_D: (D,) or (1,), the norm's weights, times the scale of the block's output if it has one.
        eps: the norm's epsilon; None if only a scale follows, without a norm: ρ = 1.
    """
    gains_D = gains_D.to(errors_D.dtype)
    squares_D = gains_D.square()
    pulled_D = errors_D * (gains_D / (squares_D + RIDGE * squares_D.mean()))
    if eps is None:
        return values_F, pulled_D
    scale_1 = (outputs_D.square().mean(-1, keepdim=True) + eps).sqrt()
    return values_F.to(errors_D.dtype) / scale_1, pulled_D
