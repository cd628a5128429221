"""Two factors for a matrix, or for a stack that shares its input, and condition numbers.

docs/methods.md#lorc, #joint-rank-k.

m outputs, D inputs, n = min(m, D), r rank; weights (out, in), so W ≈ second_mr @ first_rD and first_rD x is the latent.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_rank, require_square
from pipeline.kernels.scales import BLOCK_ROWS
from pipeline.kernels.spectra import FLOOR, eigh_descending, fix_signs, symmetric_root

# A Gram matrix squares the spectrum: singular values below 1e-5 of the largest would keep fewer than 6 digits.
_GRAM_RATIO = 1e-5


class Svd(NamedTuple):
    """matrix ≈ left (m, r) · diag(values[:r]) · right (D, r)ᵀ; `values` (n,) are all singular values, descending."""

    left: Tensor
    values: Tensor
    right: Tensor


class InputRoots(NamedTuple):
    """M^{1/2} and M^{-1/2} (D, D) of an input moment of mean diagonal 1; the number of clipped eigenvalues."""

    root: Tensor
    inverse: Tensor
    clipped: int


class LowRank(NamedTuple):
    """W ≈ second (m, r) @ first (r, D); the squares of `values` (n,) beyond r sum to the squared error minimised."""

    first: Tensor
    second: Tensor
    values: Tensor


def truncated_svd(matrix_mD: Tensor, rank: int) -> Svd:
    """Compute the leading `rank` singular triplets and all singular values, in float64.

    If the kept values span less than 1e5, uses the Gram matrix of the short side (values far below 1e-8 of the largest
    are then inaccurate), else a direct SVD. Each right vector's largest component is positive. Raises
    ValueError unless `matrix_mD` is a finite matrix and 1 <= rank <= min(m, D).
    """
    require_rank("rank", rank, min(_matrix("matrix", matrix_mD)))
    require_finite("matrix", matrix_mD)
    matrix_mD = matrix_mD.detach().to(torch.float64)
    svd = _gram_svd(matrix_mD, rank)
    return svd if svd is not None else _direct_svd(matrix_mD, rank)


def input_roots(moment_DD: Tensor, floor: float = FLOOR) -> InputRoots:
    """Compute the roots for `weighting: input`, shared by all matrices that read this input.

    Eigenvalues below `floor` x the largest are clipped. The moment is normalised, so that factors keep the weights'
    scale. Raises the ValueErrors of `symmetric_root`.
    """
    require_square("moment", moment_DD)
    require_finite("moment", moment_DD)
    moment_DD = moment_DD.detach().to(torch.float64)
    mean = float(moment_DD.diagonal().mean())
    return InputRoots(*symmetric_root(moment_DD / mean if mean > 0.0 else moment_DD, floor))


def low_rank(weight_mD: Tensor, rank: int, roots: InputRoots | None = None, balanced: bool = False) -> LowRank:
    """Factor W at rank r with least error of W or, with `roots`, of its outputs on the calibration inputs.

    docs/methods.md#lorc: S Wᵀ = U Σ Vᵀ with S = M^{1/2} (the identity without `roots`); first = U_rᵀ S⁻¹, second = V_r
    Σ_r. With `balanced` (#joint-rank-k) √Σ goes into each factor. With `roots` the error is that on inputs of mean
    square 1. At full rank the product is W. Computed in float64; the factors are float64 for a float64 weight, else
    float32. Raises the ValueErrors of `truncated_svd`, and if the roots do not fit.
    """
    first_rD, seconds, values_n = _factors([weight_mD], rank, roots, balanced)
    return LowRank(first_rD, seconds[0], values_n)


def joint_low_rank(
    weights: Sequence[Tensor], rank: int, roots: InputRoots | None = None
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Factor a stack of weights (m_i, D) into one first (r, D) and a second (m_i, r) each; singular values (n,).

    docs/methods.md#joint-rank-k: [W_1; W_2; …] ≈ U_r Σ_r V_rᵀ with √Σ in each factor. A tall stack is never built: its
    Gram matrix is summed block by block. Raises the ValueErrors of `low_rank`, and if the weights do not share their
    input width.
    """
    return _factors(weights, rank, roots, balanced=True)


def _factors(
    weights: Sequence[Tensor], rank: int, roots: InputRoots | None, balanced: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    shapes = [tuple(weight.shape) for weight in weights]
    if not shapes or any(len(shape) != 2 or 0 in shape or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"weights (m, D) of one D are needed, not {shapes}")
    rows, inputs = [shape[0] for shape in shapes], shapes[0][1]
    if roots is not None and tuple(roots.root.shape) != (inputs, inputs):
        raise ValueError(f"roots {tuple(roots.root.shape)} do not fit weights of shapes {shapes}")
    require_rank("rank", rank, min(sum(rows), inputs))
    for weight in weights:
        require_finite("weight", weight)
    dtype = torch.float64 if any(weight.dtype == torch.float64 for weight in weights) else torch.float32
    tall = _tall_right_vectors(weights, rank, roots) if sum(rows) >= inputs else None
    if tall is not None:
        values_n, right_Dr = tall
        leading_r = values_n[:rank]
        inner_r = leading_r.sqrt() if balanced else torch.ones_like(leading_r)
        # second = W S V Σ⁻¹ · outer, and outer / Σ = 1 / inner
        outward_Dr = (right_Dr if roots is None else roots.root @ right_Dr) / inner_r
        seconds = [_product(weight, outward_Dr, dtype) for weight in weights]
    else:
        stack_mD = torch.cat([weight.detach().to(torch.float64) for weight in weights])
        svd = truncated_svd(stack_mD if roots is None else stack_mD @ roots.root, rank)
        values_n, right_Dr, leading_r = svd.values, svd.right, svd.values[:rank]
        inner_r = leading_r.sqrt() if balanced else torch.ones_like(leading_r)
        outer_r = leading_r.sqrt() if balanced else leading_r
        seconds = [part.to(dtype) for part in torch.split(svd.left * outer_r, rows)]
    first_rD = (right_Dr * inner_r).T
    if roots is not None:
        first_rD = first_rD @ roots.inverse
    return first_rD.to(dtype).contiguous(), seconds, values_n


def _tall_right_vectors(weights: Sequence[Tensor], rank: int, roots: InputRoots | None) -> tuple[Tensor, Tensor] | None:
    """Singular values and leading right vectors of a tall stack by its D x D Gram matrix, a block of rows at a time.

    None if squaring would cost too many digits.
    """
    inputs = weights[0].shape[1]
    peak = max(float(weight.abs().max()) for weight in weights) or 1.0
    gram_DD = torch.zeros(inputs, inputs, dtype=torch.float64, device=weights[0].device)
    for weight in weights:
        for block_bD in weight.detach().split(BLOCK_ROWS):
            scaled_bD = block_bD.to(torch.float64) / peak
            gram_DD.addmm_(scaled_bD.T, scaled_bD)
    if roots is not None:
        gram_DD = roots.root @ gram_DD @ roots.root
    eigenvalues_D, vectors_DD = eigh_descending(gram_DD)
    values_D = eigenvalues_D.sqrt()
    if float(values_D[rank - 1]) <= _GRAM_RATIO * float(values_D[0]):
        return None
    return values_D * peak, vectors_DD[:, :rank].contiguous()


def _product(weight_mD: Tensor, right_Dr: Tensor, dtype: torch.dtype) -> Tensor:
    """W · right in float64, stored in `dtype`, a block of rows at a time."""
    result_mr = torch.empty(weight_mD.shape[0], right_Dr.shape[1], dtype=dtype, device=weight_mD.device)
    for start in range(0, weight_mD.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        result_mr[rows] = weight_mD[rows].detach().to(torch.float64) @ right_Dr
    return result_mr


def rank_limit(outputs: int, inputs: int) -> int:
    """Return the largest rank whose factors store fewer numbers than m x D: r (m + D) < m D; may be 0.

    docs/methods.md#joint-rank-k.
    """
    return (outputs * inputs - 1) // (outputs + inputs)


def log_condition(weight_mD: Tensor, floor: float = torch.finfo(torch.float64).eps) -> tuple[float, bool]:
    """Return ln(σ_max / σ_min), and True if σ_min was clipped at `floor` x σ_max (docs/methods.md#lorc).

    A zero matrix counts as clipped. Raises ValueError unless the matrix is finite and 0 < floor < 1.
    """
    if not 0.0 < floor < 1.0:
        raise ValueError(f"floor must be within (0, 1), not {floor}")
    _matrix("weight", weight_mD)
    require_finite("weight", weight_mD)
    weight_mD = _unit_peak(weight_mD.detach().to(torch.float64))
    values_n = eigh_descending(_short_gram(weight_mD))[0].sqrt()
    if float(values_n[-1]) < _GRAM_RATIO * float(values_n[0]):
        values_n = torch.linalg.svdvals(weight_mD)
    high, low = float(values_n[0]), float(values_n[-1])
    if high == 0.0 or low < floor * high:
        return -math.log(floor), True
    return math.log(high / low), False


def _matrix(name: str, matrix: Tensor) -> tuple[int, int]:
    if matrix.ndim != 2 or matrix.numel() == 0:
        raise ValueError(f"{name}: a matrix is needed, not shape {tuple(matrix.shape)}")
    return matrix.shape[0], matrix.shape[1]


def _unit_peak(matrix: Tensor) -> Tensor:
    peak = matrix.abs().max()
    return matrix / peak if float(peak) > 0.0 else matrix


def _short_gram(matrix_mD: Tensor) -> Tensor:
    outputs, inputs = matrix_mD.shape
    return matrix_mD.T @ matrix_mD if inputs <= outputs else matrix_mD @ matrix_mD.T


def _gram_svd(matrix_mD: Tensor, rank: int) -> Svd | None:
    """Triplets by the eigenvectors of the short side; None if squaring would cost too many digits."""
    peak = float(matrix_mD.abs().max()) or 1.0
    scaled_mD = matrix_mD / peak
    eigenvalues_n, vectors_nn = eigh_descending(_short_gram(scaled_mD))
    values_n, short = eigenvalues_n.sqrt(), vectors_nn[:, :rank]
    if float(values_n[rank - 1]) <= _GRAM_RATIO * float(values_n[0]):
        return None
    if matrix_mD.shape[1] <= matrix_mD.shape[0]:
        return Svd((scaled_mD @ short) / values_n[:rank], values_n * peak, short.contiguous())
    right_Dr = (scaled_mD.T @ short) / values_n[:rank]
    signs_r = _signs(right_Dr)
    return Svd(short * signs_r, values_n * peak, right_Dr * signs_r)


def _direct_svd(matrix_mD: Tensor, rank: int) -> Svd:
    left_mn, values_n, right_nD = torch.linalg.svd(matrix_mD, full_matrices=False)
    right_Dr = right_nD[:rank].T
    signs_r = _signs(right_Dr)
    return Svd(left_mn[:, :rank] * signs_r, values_n, right_Dr * signs_r)


def _signs(vectors: Tensor) -> Tensor:
    return torch.where((fix_signs(vectors) * vectors).sum(dim=0) < 0, -1.0, 1.0).to(vectors.dtype)
