"""A narrower latent behind an RMS norm (docs/methods.md#latent-attention).

A writer W gives c = W x. W has L rows, and perhaps further ones that bypass the norm. The norm is n = w ⊙ c √L / √(‖c‖²
+ L ε), and a reader U gives U n. r of the L directions of n are kept.

D inputs of the writer, L numbers of the latent, r kept numbers, R rows of the writer, K outputs of the reader.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.sensitivity import Directions

RIDGE = 1e-9  # of the mean diagonal of C


class NarrowedLatent(NamedTuple):
    """A writer (R - L + r, D) and its bias, the norm's weight (r), and the reader (K, r).

    Attributes:
        read: (r, L); the reader reads `read` n, up to the norm's error.
        beside: the share of the mean of ‖c‖² that is outside the narrowed latent, ρ / tr C.
    """

    writer: Tensor
    bias: Tensor | None
    norm: Tensor
    reader: Tensor
    read: Tensor
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

    The reader needs y = E c alone, E = encode diag(w), and the norm. B y, B = C Eᵀ (E C Eᵀ)⁻¹, is the best linear guess
    of c, with an error that is uncorrelated with y: ‖c‖² is ‖B y‖², plus in the mean ρ = tr(C − B E C). With
    B = Q R the latent R E c of r numbers has the norm of B y. ρ takes the place of the norm's ε: a norm of r numbers
    with the same ε does so for α R E c, α² = r ε / (ρ + L ε). The only error beside that of the projection is the
    deviation of ‖c‖² from ‖B y‖² + ρ; where y determines c there is none. float64.

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
    encode_rL = directions.encode * norm_L.detach().to(torch.float64)
    whole = float(moment_LL.diagonal().sum())
    ridge_LL = torch.eye(width, dtype=torch.float64, device=moment_LL.device) * (RIDGE * whole / width or 1.0)
    cross_Lr = (moment_LL + ridge_LL) @ encode_rL.T
    guess_Lr = torch.linalg.solve(encode_rL @ cross_Lr, cross_Lr, left=False)
    mix_rr = torch.linalg.qr(guess_Lr).R
    rest = max(0.0, whole - float((guess_Lr * (moment_LL @ encode_rL.T)).sum()))
    scale = (rank * eps / (rest + width * eps)) ** 0.5
    narrow_rL = scale * mix_rr @ encode_rL

    def rows(x_Rd: Tensor) -> Tensor:
        return torch.cat((narrow_rL @ x_Rd[:width], x_Rd[width:]))

    return NarrowedLatent(
        rows(writer_RD),
        None if bias_R is None else rows(bias_R.detach().to(torch.float64)[:, None])[:, 0],
        torch.ones(rank, dtype=torch.float64, device=writer_RD.device),
        (width / rank) ** 0.5 * (reader_KL @ torch.linalg.solve(mix_rr, directions.decode, left=False)),
        (rank / width) ** 0.5 * (mix_rr @ directions.encode),
        rest / whole if whole else 0.0,
    )
