"""Eigenvectors and roots of second moments, and head-wise PCA (docs/methods.md#value-and-output).

G KV heads, H query heads, d head dimension, D hidden size, r rank. A leading batch dimension is always allowed.
"""

import math

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_rank, require_square
from pipeline.kernels.moments import head_moment

# Eigenvalues below FLOOR x the largest are clipped before a root is inverted: the inverse stays below 1e5.
FLOOR = 1e-10
_JITTER = 1e-14
# cuSOLVER refuses larger ones, and LAPACK's workspace exceeds 32 bits from 32,700 on.
LARGEST_EIGENPROBLEM = 25_000
_SHIFTS, _LEAST_SHARE = 12, 20  # shifts to try; the smaller part holds at least a twentieth
_SIGN_STEPS, _SIGN_TOLERANCE = 60, 1e-14
_COUPLING = 1e-12  # between the parts, relative to the matrix
_STEPS = 16  # points of a plotted spectrum
_NOISE = 1e-13  # relative to the matrix


def eigh_descending(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), descending, and eigenvectors (..., n, n) as columns, of a positive semidefinite matrix.

    float64. The matrix is symmetrised first; eigenvalues that rounding made negative are set to 0. Each eigenvector's
    component of largest magnitude (the first, of equal ones) is positive, so that the result does not depend on a
    library's choice of sign. Raises ValueError on a shape that is not square, NaN, infinity, or if no solver converges.
    """
    scaled, exponent = _prepared(moment)
    values, vectors = _eigh(scaled)
    values = values.clamp_min(0.0).flip(-1)
    vectors = fix_signs(vectors.flip(-1))
    return values * 2.0**exponent, vectors


def eigenvalues_descending(moment: Tensor) -> Tensor:
    """The eigenvalues (n,) of `eigh_descending`, up to rounding, with at most a third of its operations.

    Raises ValueError as it does.
    """
    scaled, exponent = _prepared(moment)
    if scaled.shape[-1] > LARGEST_EIGENPROBLEM:
        values, _ = _eigh(scaled)
    else:
        (values,) = _solved(scaled, vectors=False)
    return values.clamp_min(0.0).flip(-1) * 2.0**exponent


def symmetric_root(moment: Tensor, floor: float = FLOOR) -> tuple[Tensor, Tensor, int]:
    """Return M^{1/2} and M^{-1/2} in float64, and the number of clipped eigenvalues.

    Eigenvalues below `floor` x the largest are raised to it first (per matrix of a batch), so that the two are inverse
    to each other. An all-zero matrix gives two identities, with every eigenvalue counted as clipped. Raises
    ValueError as `eigh_descending`, and unless 0 < floor <= 1.
    """
    if not 0.0 < floor <= 1.0:
        raise ValueError(f"floor must be within (0, 1], not {floor}")
    values, vectors = eigh_descending(moment)
    largest = values[..., :1]
    least = largest * floor
    clipped = int((values < least).sum() + (largest == 0).expand_as(values).sum())
    values = torch.where(largest == 0, torch.ones_like(values), torch.maximum(values, least))
    root = values.sqrt()
    return _with_spectrum(vectors, root), _with_spectrum(vectors, 1.0 / root), clipped


def dropped_share(energies: Tensor, rank: int) -> float:
    """Share of the descending energies (..., n) beyond `rank`: the relative squared error of a truncation there.

    Energies are squared singular values, or eigenvalues of a moment (Theorem 4.1 of FLAT-LLM, over its heads). 0 if all
    are 0.
    """
    total = energies.sum().item()
    return energies[..., rank:].sum().item() / total if total > 0 else 0.0


def tail_sums(values_n: Tensor) -> Tensor:
    """Sums (n + 1,) of the values from r on, for r = 0 … n.

    Computed on the CPU: on a GPU the last bits of cumulative sums vary from run to run.
    """
    sums_n = values_n.cpu().flip(0).cumsum(0).flip(0)
    return torch.cat((sums_n, sums_n.new_zeros(1))).to(values_n.device)


def spectrum(energies: Tensor) -> list[float]:
    """Return `dropped_share` at 0, 1/16, … 16/16 of the full rank, to three digits, for a plot."""
    by_rank_n = energies.flatten(0, -2).sum(dim=0) if energies.ndim > 1 else energies
    beyond_n = tail_sums(by_rank_n)
    places = [round(step / _STEPS * len(by_rank_n)) for step in range(_STEPS + 1)]
    shares = beyond_n[places] / beyond_n[0].clamp_min(torch.finfo(energies.dtype).tiny)
    return [float(f"{share:.2e}") for share in shares.tolist()]


def head_pca(moment_Gdd: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the `rank` leading eigenvectors Q̃ (G, d, r) of each head's moment, and all eigenvalues (G, d), descending.

    docs/methods.md#value-and-output: W̃_v^g = Q̃ᵀ W_v^g, W̃_o^h = W_o^h Q̃; the squared error Σ‖y − Q̃Q̃ᵀy‖² is the sum
    of the eigenvalues beyond `rank`. float64. Raises the ValueErrors of `eigh_descending`, and unless 1 <= rank <= d.
    """
    require_rank("rank", rank, require_square("moment", moment_Gdd))
    values_Gd, vectors_Gdd = eigh_descending(moment_Gdd)
    return vectors_Gdd[..., :rank].contiguous(), values_Gd


def weighted_head_pca(
    moment_Gdd: Tensor, output_gram_Gdd: Tensor, rank: int, floor: float = FLOOR
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Encoder UᵀN (G, r, d), decoder N⁻¹U (G, d, r), eigenvalues (G, d), clipped: `weighting: output`.

    docs/methods.md#value-and-output.

    U are the leading eigenvectors of N C N for the value moment C, and N = (M / mean diag M)^{1/2} for the output
    gram M (its eigenvalues clipped from below at `floor` x the largest): normalised, so that the factors keep the
    scale of the weights. W̃_v^g = encoder W_v^g, W̃_o^h = W_o^h decoder. The eigenvalues beyond `rank` sum to the
    squared error of the outputs, Σ_h Σ‖W_o^h (y − ŷ)‖², as long as no eigenvalue of M was `clipped`; at rank = d
    decoder @ encoder is the identity. All float64. Raises ValueError on unequal shapes and as `eigh_descending`.
    """
    width = require_square("moment", moment_Gdd)
    require_rank("rank", rank, width)
    if moment_Gdd.shape != output_gram_Gdd.shape:
        shapes = f"{tuple(moment_Gdd.shape)} and {tuple(output_gram_Gdd.shape)}"
        raise ValueError(f"moment and output gram differ in shape: {shapes}")
    require_finite("moment", moment_Gdd)
    require_finite("output_gram", output_gram_Gdd)
    gram_Gdd = output_gram_Gdd.detach().to(torch.float64)
    scale_G11 = gram_Gdd.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    scale_G11 = torch.where(scale_G11 > 0, scale_G11, torch.ones_like(scale_G11))
    root_Gdd, inverse_Gdd, clipped = symmetric_root(gram_Gdd / scale_G11, floor)
    values_Gd, vectors_Gdd = eigh_descending(root_Gdd @ moment_Gdd.detach().to(torch.float64) @ root_Gdd)
    leading_Gdr = vectors_Gdd[..., :rank]
    encoder_Grd = leading_Gdr.mT @ root_Gdd
    return encoder_Grd.contiguous(), inverse_Gdd @ leading_Gdr, values_Gd * scale_G11[..., 0], clipped


def output_gram(weight_DF: Tensor, heads: int, groups: int) -> Tensor:
    """M_g = Σ_{h in g} W_o^hᵀ W_o^h (G, d, d) in float64, from W_o (D, H·d) whose columns are the heads in order.

    Raises the ValueErrors of `head_moment`.
    """
    return head_moment(weight_DF, heads, groups, product_dtype=torch.float64)


def _prepared(moment: Tensor) -> tuple[Tensor, int]:
    """Symmetrise, and divide by a power of two, which is undone exactly: some solvers do not scale by themselves."""
    require_square("moment", moment)
    exponent = max(-1000, min(1000, math.frexp(require_finite("moment", moment))[1]))
    scaled = moment.detach().to(torch.float64) * 2.0**-exponent
    return symmetrized(scaled), exponent


def _with_spectrum(vectors: Tensor, values: Tensor) -> Tensor:
    return symmetrized((vectors * values[..., None, :]) @ vectors.mT)


def fix_signs(vectors: Tensor) -> Tensor:
    """Negate the columns of `vectors` (..., n, r) whose (first) component of largest magnitude is negative."""
    magnitude = vectors.abs()
    # Components equal up to rounding count as equal: otherwise the sign would depend on the last bit.
    largest = magnitude >= magnitude.amax(dim=-2, keepdim=True) * (1.0 - 1e-9)
    first = largest.to(torch.uint8).argmax(dim=-2, keepdim=True)
    return torch.where(vectors.gather(-2, first) < 0, -vectors, vectors)


def _eigh(symmetric: Tensor, noise: float | None = None) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues and vectors; matrices too large for the solver are split by the sign of A − σ I.

    `noise`: the rounding error of the matrix that this one is a part of; a matrix within it of σ I counts as diagonal.
    """
    size = symmetric.shape[-1]
    if size <= LARGEST_EIGENPROBLEM:
        values, vectors = _solved(symmetric)
        return values, vectors
    if symmetric.ndim > 2:
        pairs = [_eigh(matrix, noise) for matrix in symmetric.flatten(0, -3)]
        values, vectors = (torch.stack(parts).unflatten(0, symmetric.shape[:-2]) for parts in zip(*pairs, strict=True))
        return values, vectors
    noise = _NOISE * float(torch.linalg.matrix_norm(symmetric)) if noise is None else noise
    eye = torch.eye(size, dtype=symmetric.dtype, device=symmetric.device)
    values = symmetric.diagonal()
    if float(torch.linalg.matrix_norm(symmetric - values.mean() * eye)) <= noise:
        values, order = values.sort()
        return values, eye[:, order]
    low, high = split_spectrum(symmetric)
    parts = [_eigh(symmetrized(basis.mT @ symmetric @ basis), noise) for basis in (low, high)]
    values = torch.cat([part for part, _ in parts])
    return values, torch.cat([basis @ part for basis, (_, part) in zip((low, high), parts, strict=True)], dim=1)


def split_spectrum(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal bases of the eigenvectors below and above a σ that leaves a share of them on either side.

    The sign of A − σ I by Newton's iteration X ← (μ X + (μ X)⁻¹) / 2 with norm scaling (Higham, Functions of Matrices,
    section 8.6); (I ± sign) / 2 project onto the two spaces, whose bases are QR factors of the projected columns of a
    fixed random matrix. It needs products, inverses and QR alone, without a solver's limit on the order. Raises
    ValueError if no σ splits.
    """
    size = symmetric.shape[-1]
    eye = torch.eye(size, dtype=symmetric.dtype, device=symmetric.device)
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(size, size, dtype=symmetric.dtype, generator=generator).to(symmetric.device)
    scale = torch.linalg.matrix_norm(symmetric)
    shift = symmetric.diagonal().median()
    for _ in range(_SHIFTS):
        try:
            sign = _sign(symmetric - shift * eye)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # σ is an eigenvalue to the last bit
            shift = shift + _COUPLING * scale
            continue
        above = round(float((size + sign.diagonal().sum()) / 2))
        if size // _LEAST_SHARE <= above <= size - size // _LEAST_SHARE:
            high, low = (
                torch.linalg.qr(0.5 * (draw[:, :count] + turn * (sign @ draw[:, :count]))).Q
                for turn, count in ((1, above), (-1, size - above))
            )
            if float(torch.linalg.matrix_norm(low.mT @ (symmetric @ high))) <= _COUPLING * float(scale):
                return low, high
        # Move to the mean of the eigenvalues on the side with more of them.
        side = 0.5 * (eye + sign) if 2 * above > size else 0.5 * (eye - sign)
        shift = (symmetric * side).sum() / side.diagonal().sum()
    raise ValueError(f"moment of order {size}: none of {_SHIFTS} shifts splits its spectrum")


def _sign(matrix: Tensor) -> Tensor:
    for _ in range(_SIGN_STEPS):
        inverse = torch.linalg.inv(matrix)
        scale = (torch.linalg.matrix_norm(inverse) / torch.linalg.matrix_norm(matrix)).sqrt()
        following = symmetrized(0.5 * (scale * matrix + inverse / scale))
        moved = float(torch.linalg.matrix_norm(following - matrix) / torch.linalg.matrix_norm(following))
        matrix = following
        if moved < _SIGN_TOLERANCE:
            break
    return matrix


def symmetrized(matrix: Tensor) -> Tensor:
    """½ (A + Aᵀ) of a matrix or batch of them."""
    return (matrix + matrix.mT).mul_(0.5)


def _solved(symmetric: Tensor, vectors: bool = True) -> tuple[Tensor, ...]:
    """Eigenvalues, and optionally vectors; after a failure it tries the CPU, then a tiny jitter."""
    size = symmetric.shape[-1]
    mean = symmetric.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None]
    eye = torch.eye(size, dtype=symmetric.dtype, device=symmetric.device)
    causes = []
    for device, jitter in ((symmetric.device, 0.0), (torch.device("cpu"), 0.0), (torch.device("cpu"), _JITTER)):
        try:
            tried = (symmetric if jitter == 0.0 else symmetric + jitter * mean * eye).to(device)
            solution = tuple(torch.linalg.eigh(tried)) if vectors else (torch.linalg.eigvalsh(tried),)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # public, but not in __all__
            causes.append(str(error))
            continue
        # cuSOLVER may return NaN instead of reporting a failure.
        if all(bool(torch.isfinite(part).all()) for part in solution):
            return tuple(part.to(symmetric.device) for part in solution)
        causes.append("NaN eigenvectors")
    raise ValueError(f"moment of shape {tuple(symmetric.shape)}: no eigenvalue solver converged ({'; '.join(causes)})")
