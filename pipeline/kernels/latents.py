"""A narrower latent behind an RMS norm (docs/methods.md#latent-attention).

A writer W (L rows, perhaps with others behind them that no norm sees) gives c = W x, the norm n = w ⊙ c √L / √(‖c‖² + L ε),
and a reader U gives U n. r of L directions of n stay.

D inputs of the writer, L numbers of the latent, r numbers that stay, R rows of the writer, K outputs of the reader.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.sensitivity import Directions


class NarrowedLatent(NamedTuple):
    """A writer (R - L + r, D) and its bias, the norm's weight (r), and the reader (K, r).

    `beside`: the mean of ‖c‖² beside the directions that stay, as a share of the whole.
    """

    writer: Tensor
    bias: Tensor | None
    norm: Tensor
    reader: Tensor
    beside: float


def narrowed_latent(
    writer_RD: Tensor,
    bias_R: Tensor | None,
    norm_L: Tensor,
    reader_KL: Tensor,
    directions: Directions,
    moment_LL: Tensor,
    eps: float,
) -> NarrowedLatent:
    """Narrow a latent to the r directions of n that `encode` (r, L) and `decode` (L, r) give.

    encode diag(w) = Rᵀ Q with orthonormal rows Q, so that the reader needs Q c / ‖c‖ alone. ‖c‖² = ‖Q c‖² + ‖c_rest‖²
    has two parts: the first is that of the narrower latent, and the mean ρ of the second takes the place of the
    norm's ε. A norm of r numbers with the same ε does so for α Q c, α² = r ε / (ρ + L ε). The only error beside that of
    the projection is the deviation of ‖c_rest‖² from its mean; without a rest there is none. float64.

    Args:
        moment_LL: E[c cᵀ].

    Raises ValueError on shapes that do not fit.
    """
    rank, width = directions.encode.shape
    if directions.decode.shape != (width, rank) or norm_L.shape != (width,) or reader_KL.shape[1:] != (width,):
        shapes = ", ".join(str(tuple(x.shape)) for x in (directions.encode, directions.decode, norm_L, reader_KL))
        raise ValueError(f"encode (r, L), decode (L, r), norm (L) and reader (K, L) do not fit: {shapes}")
    if moment_LL.shape != (width, width) or len(writer_RD) < width:
        raise ValueError(f"writer {tuple(writer_RD.shape)} and moment {tuple(moment_LL.shape)} of {width} numbers")
    writer_RD, reader_KL, moment_LL = (x.detach().to(torch.float64) for x in (writer_RD, reader_KL, moment_LL))
    basis_Lr, mix_rr = torch.linalg.qr((directions.encode * norm_L.detach().to(torch.float64)).T)
    whole = float(moment_LL.diagonal().sum())
    rest = max(0.0, whole - float(((moment_LL @ basis_Lr) * basis_Lr).sum()))
    scale = (rank * eps / (rest + width * eps)) ** 0.5
    narrow_rL = scale * basis_Lr.T

    def rows(x_Rd: Tensor) -> Tensor:
        return torch.cat((narrow_rL @ x_Rd[:width], x_Rd[width:]))

    return NarrowedLatent(
        rows(writer_RD),
        None if bias_R is None else rows(bias_R.detach().to(torch.float64)[:, None])[:, 0],
        torch.ones(rank, dtype=torch.float64, device=writer_RD.device),
        (width / rank) ** 0.5 * (reader_KL @ (directions.decode @ mix_rr.T)),
        rest / whole if whole else 0.0,
    )
