"""Sums over tokens: second moments and cosines.

T tokens, F features, H heads, G groups of heads, d = F / H, D hidden size, R rows of one product, b a block of columns.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite

# The most rows that a float32 product sums; sums of products are float64.
ROWS_PER_PRODUCT = 4096
# Blocks above the diagonal are computed once and mirrored: half the work, and no F x F temporary.
BLOCK_COLUMNS = 2048
# Exponents of magnitudes whose squares, summed over ROWS_PER_PRODUCT rows, stay well inside the type's range.
_SAFE_EXPONENTS = {torch.float32: (-30, 40), torch.float64: (-300, 400)}
_LARGEST = 1e150
_COSINE_NUMBERS = {"cpu": 1 << 17, "cuda": 1 << 23}  # of each side at a time: they fit into a CPU's cache


def head_moment(
    values_TF: Tensor, heads: int = 1, groups: int = 1, product_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sum the second moments Σ_t y yᵀ of `heads` equal parts of the features, over the heads of each group.

    `values_TF` is (..., F) in any floating type; heads of a group are neighbours. Return (groups, F/heads, F/heads)
    float64; heads = groups = 1 gives the plain F x F moment as (1, F, F). Products of at most 4096 rows are computed in
    `product_dtype` (float32 or float64) and summed in float64. Raises the ValueErrors of `add_head_moment_`.
    """
    width = values_TF.shape[-1] // heads if heads > 0 and values_TF.ndim else 0
    total_Gdd = torch.zeros(max(groups, 0), width, width, dtype=torch.float64, device=values_TF.device)
    add_head_moment_(total_Gdd, values_TF, heads, groups, product_dtype)
    return total_Gdd


def add_head_moment_(
    total_Gdd: Tensor, values_TF: Tensor, heads: int = 1, groups: int = 1, product_dtype: torch.dtype = torch.float32
) -> None:
    """Add `head_moment(values_TF, ...)` to the float64 `total_Gdd` in place, without an F x F temporary.

    Raises ValueError on shapes that do not fit, on NaN or infinity, and on magnitudes whose squares overflow float64;
    `total_Gdd` is then unchanged.
    """
    _check_parts(total_Gdd, values_TF, heads, groups, product_dtype)
    peak = require_finite("values", values_TF)
    if peak > _LARGEST:
        raise ValueError(f"values: magnitudes up to {peak:.3g} have no float64 square sum (limit {_LARGEST:.0e})")
    if peak == 0.0:
        return
    exponent = math.frexp(peak)[1]
    low, high = _SAFE_EXPONENTS[product_dtype]
    shift = 0 if low <= exponent <= high else exponent
    values_TF = values_TF.detach().reshape(-1, values_TF.shape[-1])
    tokens = max(1, ROWS_PER_PRODUCT * groups // heads)
    for start in range(0, values_TF.shape[0], tokens):
        chunk_TF = values_TF[start : start + tokens]
        if shift:
            # A power of two: exact, and undone exactly in float64. In steps, as 2^-shift itself may be subnormal.
            chunk_TF = chunk_TF.to(torch.float64).mul(2.0 ** -(shift // 2)).mul(2.0 ** -(shift - shift // 2))
        rows_GRd = product_rows(chunk_TF, heads, groups, product_dtype)
        _add_products_(total_Gdd, rows_GRd, product_dtype, 4.0**shift if shift else None)


def cosine_sums(x_TD: Tensor, y_TD: Tensor) -> tuple[float, int]:
    """The float64 sum over rows of cos(x_t, y_t), and the number of rows (docs/methods.md#importance).

    Computed in float64; float64 rows are first scaled by their largest magnitude, so that nothing overflows. The cosine
    of two zero rows is 1, of a zero row and another 0. Raises ValueError on unequal shapes and on NaN or
    infinity.
    """
    if x_TD.shape != y_TD.shape or x_TD.ndim < 1 or x_TD.shape[-1] == 0:
        raise ValueError(f"x and y need one shape, (..., D), not {tuple(x_TD.shape)} and {tuple(y_TD.shape)}")
    arguments = {"x": x_TD, "y": y_TD}
    x_TD, y_TD = (rows.detach().reshape(-1, rows.shape[-1]) for rows in (x_TD, y_TD))
    total = torch.zeros((), dtype=torch.float64, device=x_TD.device)
    tokens = max(1, _COSINE_NUMBERS[x_TD.device.type] // x_TD.shape[1])
    for start in range(0, x_TD.shape[0], tokens):
        x, y = (_squarable(rows_TD[start : start + tokens]) for rows_TD in (x_TD, y_TD))
        x_norm_T, y_norm_T = (torch.linalg.vector_norm(rows, dim=1) for rows in (x, y))
        x_zero_T, y_zero_T = x_norm_T == 0, y_norm_T == 0
        cosines_T = x.mul_(y).sum(dim=1) / (x_norm_T * y_norm_T).masked_fill_(x_zero_T | y_zero_T, 1.0)
        total += cosines_T.clamp_(-1.0, 1.0).masked_fill_(x_zero_T & y_zero_T, 1.0).sum()
    cosine_sum = float(total)
    if math.isnan(cosine_sum):  # only NaN or infinity in a row leads to this
        for name, rows in arguments.items():
            require_finite(name, rows)
    return cosine_sum, x_TD.shape[0]


def _squarable(rows_TD: Tensor) -> Tensor:
    """Copy rows to float64; float64 rows are scaled, as their squares might overflow."""
    if rows_TD.dtype != torch.float64:
        return rows_TD.to(torch.float64)
    peak_T = rows_TD.abs().amax(dim=1)
    # Divided, not multiplied by a reciprocal: 1 / 5e-324 is infinite.
    return rows_TD / peak_T.masked_fill_(peak_T == 0, 1.0)[:, None]


def _check_parts(total_Gdd: Tensor, values_TF: Tensor, heads: int, groups: int, product_dtype: torch.dtype) -> None:
    if product_dtype not in _SAFE_EXPONENTS:
        raise ValueError(f"product_dtype must be float32 or float64, not {product_dtype}")
    shape = tuple(values_TF.shape)
    if values_TF.ndim < 1 or heads < 1 or shape[-1] == 0 or shape[-1] % heads:
        raise ValueError(f"values of shape {shape} cannot be cut into {heads} equal heads along the last axis")
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads cannot be put into {groups} equal groups")
    width = shape[-1] // heads
    if tuple(total_Gdd.shape) != (groups, width, width) or total_Gdd.dtype != torch.float64:
        raise ValueError(
            f"the total must be float64 of shape {(groups, width, width)} for values of shape {shape}, "
            f"not {total_Gdd.dtype} of shape {tuple(total_Gdd.shape)}"
        )


def product_rows(chunk_TF: Tensor, heads: int, groups: int, product_dtype: torch.dtype) -> Tensor:
    """Lay out the rows of one batched product: (T, F) -> (G, T * heads per group, d)."""
    tokens, per_group = chunk_TF.shape[0], heads // groups
    if not exact_halves(chunk_TF, product_dtype):
        chunk_TF = chunk_TF.to(product_dtype)
    rows_GTHd = chunk_TF.reshape(tokens, groups, per_group, -1).permute(1, 0, 2, 3)
    return rows_GTHd.reshape(groups, tokens * per_group, -1)


def exact_halves(rows: Tensor, product_dtype: torch.dtype) -> bool:
    """True if a GPU's matrix units multiply these 16-bit numbers exactly into float32 sums, without a conversion."""
    halves = rows.dtype in (torch.float16, torch.bfloat16)
    return halves and rows.is_cuda and torch.version.hip is None and product_dtype == torch.float32


@contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let a CPU round the factors of float32 products to bfloat16, on its matrix units, and sum in float32.

    Factors that bfloat16 represents stay exact. The setting is one of the whole process.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch sets it at import
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def batched_product(left_GnR: Tensor, right_GRm: Tensor, dtype: torch.dtype) -> Tensor:
    """`torch.bmm` with a result in `dtype`, which may be wider than the arguments' (`exact_halves`)."""
    if left_GnR.dtype == dtype:
        if len(left_GnR) == 1:  # on a CPU's matrix units several times as fast as a batch of one
            return torch.mm(left_GnR[0], right_GRm[0])[None]
        return torch.bmm(left_GnR, right_GRm)
    return torch.bmm(left_GnR, right_GRm, out_dtype=dtype)


def wide_product(left_TF: Tensor, right_FO: Tensor) -> Tensor:
    """Multiply in float32 or better; 16-bit numbers are not converted where `exact_halves` allows it."""
    dtype = torch.promote_types(left_TF.dtype, torch.float32)
    if left_TF.dtype == right_FO.dtype and exact_halves(left_TF, dtype):
        return batched_product(left_TF[None], right_FO[None], dtype)[0]
    return left_TF.to(dtype) @ right_FO.to(dtype)


def _add_products_(total_Gdd: Tensor, rows_GRd: Tensor, product_dtype: torch.dtype, factor: float | None) -> None:
    width = total_Gdd.shape[-1]
    blocks = [slice(start, min(start + BLOCK_COLUMNS, width)) for start in range(0, width, BLOCK_COLUMNS)]
    for number, rows in enumerate(blocks):
        left_GbR = rows_GRd[:, :, rows].transpose(1, 2)
        for columns in blocks[number:]:
            right_GRb = rows_GRd[:, :, columns]
            product_Gbb = batched_product(left_GbR, right_GRb, product_dtype)
            if factor is not None:
                product_Gbb = product_Gbb.to(torch.float64).mul_(factor)
            total_Gdd[:, rows, columns].add_(product_Gbb)
            if rows != columns:
                total_Gdd[:, columns, rows].add_(product_Gbb.transpose(1, 2))
