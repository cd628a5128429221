"""Second moments and cosines against float64, one dtype, scale and shape after another."""

import math

import pytest
import torch
from torch import Tensor

from pipeline.kernels import moments
from pipeline.kernels.moments import add_head_moment_, cosine_sums, head_moment

SHAPES = [(1, 1, 1, 1), (3, 5, 1, 1), (2, 12, 4, 2), (7, 12, 4, 4), (50, 12, 6, 1), (0, 6, 3, 3)]


def naive_moment(values_TF: Tensor, heads: int, groups: int) -> Tensor:
    values_TF = values_TF.double()
    width = values_TF.shape[1] // heads
    total_Gdd = torch.zeros(groups, width, width, dtype=torch.float64)
    for head in range(heads):
        part_Td = values_TF[:, head * width : (head + 1) * width]
        for row_d in part_Td:
            total_Gdd[head // (heads // groups)] += torch.outer(row_d, row_d)
    return total_Gdd


@pytest.mark.parametrize(("tokens", "features", "heads", "groups"), SHAPES)
@pytest.mark.parametrize("product_dtype", [torch.float32, torch.float64])
def test_moment_is_the_naive_one(
    tokens: int, features: int, heads: int, groups: int, product_dtype: torch.dtype
) -> None:
    values_TF = torch.randn(tokens, features, generator=torch.Generator().manual_seed(0))
    before = values_TF.clone()
    moment_Gdd = head_moment(values_TF, heads, groups, product_dtype)
    assert moment_Gdd.dtype == torch.float64
    tolerance = 1e-6 if product_dtype == torch.float32 else 1e-14
    expected_Gdd = naive_moment(values_TF, heads, groups)
    atol = tolerance * float(expected_Gdd.abs().max())
    torch.testing.assert_close(moment_Gdd, expected_Gdd, rtol=0, atol=atol)
    assert torch.equal(values_TF, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_upcast(dtype: torch.dtype) -> None:
    # 300² overflows float16; 40 rows of it overflow nothing here.
    values_TF = (torch.randn(40, 8, generator=torch.Generator().manual_seed(1)) * 300).to(dtype)
    expected = naive_moment(values_TF, 2, 1)
    torch.testing.assert_close(head_moment(values_TF, 2, 1), expected, rtol=0, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("scale", [1e-30, 1e-14, 1e14, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_whose_squares_leave_float32(scale: float, dtype: torch.dtype) -> None:
    values_TF = (torch.randn(20, 6, generator=torch.Generator().manual_seed(2)) * scale).to(dtype)
    expected = naive_moment(values_TF, 3, 3)
    assert float((head_moment(values_TF, 3, 3) - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@pytest.mark.parametrize("scale", [1e-300, 1e-140, 1e140])
def test_scales_at_the_ends_of_float64(scale: float) -> None:
    values_TF = torch.randn(20, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * scale
    expected = naive_moment(values_TF, 1, 1)
    got = head_moment(values_TF, product_dtype=torch.float64)
    assert float((got - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_float32_product_error_measured_against_float64() -> None:
    # Positive numbers are the worst case: no cancellation of the rounding bias. Measured 6e-7 at most; bound 4x that.
    values_TF = torch.rand(10_000, 24, generator=torch.Generator().manual_seed(3))
    exact = values_TF.double().T @ values_TF.double()
    error = float(((head_moment(values_TF)[0] - exact) / exact).abs().max())
    assert error < 2.4e-6


def test_more_tokens_do_not_raise_the_float32_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # All ones: a float32 sum stops growing at 2^24; sums of chunks are exact.
    tokens = 2**24 + 8192
    ones_TF = torch.ones(1, 1).expand(tokens, 1)
    assert float(head_moment(ones_TF)) == tokens


def test_split_over_tokens_and_blocks_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "ROWS_PER_PRODUCT", 8)
    monkeypatch.setattr(moments, "BLOCK_COLUMNS", 5)
    values_TF = torch.randn(37, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for heads, groups in ((1, 1), (2, 1), (4, 2), (24, 3)):
        moment_Gdd = head_moment(values_TF, heads, groups, torch.float64)
        torch.testing.assert_close(moment_Gdd, naive_moment(values_TF, heads, groups), rtol=1e-13, atol=1e-13)


def test_in_place_sum_of_parts_and_leading_dimensions() -> None:
    values_BTF = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5))
    total_Gdd = torch.zeros(2, 2, 2, dtype=torch.float64)
    for part_TF in values_BTF:
        add_head_moment_(total_Gdd, part_TF, heads=4, groups=2)
    torch.testing.assert_close(total_Gdd, head_moment(values_BTF, 4, 2), rtol=0, atol=1e-5)


def test_transposed_values_need_no_care() -> None:
    values_FT = torch.randn(8, 11, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(head_moment(values_FT.T, 4, 2), head_moment(values_FT.T.contiguous(), 4, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_and_the_total_kept(bad: float) -> None:
    values_TF = torch.ones(4, 6)
    values_TF[2, 3] = bad
    total_Gdd = torch.full((1, 6, 6), 7.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="values: 1 of 24 numbers"):
        add_head_moment_(total_Gdd, values_TF)
    assert bool((total_Gdd == 7.0).all())


@pytest.mark.parametrize(
    ("shape", "heads", "groups", "message"),
    [
        ((4, 7), 2, 1, r"\(4, 7\) cannot be cut into 2"),
        ((4, 8), 4, 3, "4 heads cannot be put into 3"),
        ((4, 8), 0, 1, "0 equal heads"),
        ((4, 8), 2, 0, "into 0 equal groups"),
        ((4, 0), 1, 1, "cannot be cut"),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, int], heads: int, groups: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_moment(torch.ones(shape), heads, groups)


def test_wrong_totals_types_and_magnitudes() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3, 3\).*float64 of shape \(1, 2, 2\)"):
        add_head_moment_(torch.zeros(1, 2, 2, dtype=torch.float64), torch.ones(4, 3))
    with pytest.raises(ValueError, match="float32 of shape"):
        add_head_moment_(torch.zeros(1, 3, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match="product_dtype"):
        head_moment(torch.ones(4, 3), product_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"values: a real floating tensor.*int64"):
        head_moment(torch.ones(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="no float64 square sum"):
        head_moment(torch.full((4, 3), 1e200, dtype=torch.float64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_on_the_matrix_units(dtype: torch.dtype) -> None:
    values_TF = torch.randn(9000, 3 * 1024, generator=torch.Generator().manual_seed(7)).to(dtype)
    for heads, groups in ((1, 1), (12, 3)):
        exact = head_moment(values_TF.cuda(), heads, groups, torch.float64)
        got = head_moment(values_TF.cuda(), heads, groups)
        assert got.is_cuda
        assert float((got - exact).abs().max()) <= 1e-5 * float(exact.max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_cosines_are_the_naive_ones(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(8)
    x_TD = (torch.rand(30, 17, generator=generator) * scale).to(dtype)
    y_TD = (torch.rand(30, 17, generator=generator) * scale).to(dtype)
    before = x_TD.clone(), y_TD.clone()
    x, y = x_TD.double(), y_TD.double()
    expected = float(((x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))).sum())
    total, count = cosine_sums(x_TD, y_TD)
    assert count == 30
    assert total == pytest.approx(expected, rel=1e-13)
    assert torch.equal(x_TD, before[0])
    assert torch.equal(y_TD, before[1])


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-30, 1e30, 1e300])
def test_cosines_do_not_depend_on_scale(scale: float) -> None:
    x_TD = torch.full((5, 64), scale, dtype=torch.float64)
    total, _ = cosine_sums(x_TD, -x_TD)
    assert total == pytest.approx(-5.0, rel=1e-13)


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e38])
def test_cosines_of_single_precision_do_not_depend_on_scale(scale: float) -> None:
    x_TD = torch.full((5, 64), scale, dtype=torch.float32)
    total, _ = cosine_sums(x_TD, -x_TD)
    assert total == pytest.approx(-5.0, rel=1e-13)


def test_massive_activations_in_half_precision() -> None:
    x_TD = torch.full((4, 4096), 60_000.0, dtype=torch.float16)
    assert cosine_sums(x_TD, x_TD) == (pytest.approx(4.0, rel=1e-13), 4)


def test_zero_rows() -> None:
    x_TD = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    y_TD = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert cosine_sums(x_TD, y_TD) == (1.0, 3)
    assert cosine_sums(x_TD[:0], y_TD[:0]) == (0.0, 0)


def test_cosines_in_chunks_and_leading_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(9)
    x_BTD, y_BTD = (torch.randn(3, 7, 5, generator=generator) for _ in range(2))
    whole, count = cosine_sums(x_BTD, y_BTD)
    monkeypatch.setitem(moments._COSINE_NUMBERS, "cpu", 10)
    parts, _ = cosine_sums(x_BTD, y_BTD)
    assert count == 21
    assert parts == pytest.approx(whole, rel=1e-13)


def test_cosine_arguments() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
        cosine_sums(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="y: 1 of 6"):
        cosine_sums(torch.ones(2, 3), torch.tensor([[1.0, math.nan, 0.0], [0.0, 0.0, 1.0]]))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for bad in (math.inf, -math.inf, math.nan):
            row = torch.tensor([[bad, 0.0]], dtype=dtype)
            for other in (torch.ones_like(row), torch.zeros_like(row), row):  # whatever it stands against
                with pytest.raises(ValueError, match="x: 1 of 2"):
                    cosine_sums(row, other)
            with pytest.raises(ValueError, match="y: 1 of 2"):
                cosine_sums(torch.zeros_like(row), row)


def test_cosines_never_pass_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x_TD = torch.randn(1, 7, generator=generator)
        for other, sign in ((3.0 * x_TD, 1.0), (-x_TD, -1.0)):
            total, rows = cosine_sums(x_TD, other)
            assert rows == 1
            assert abs(total) <= 1.0
            assert total == pytest.approx(sign, abs=1e-12)
    with pytest.raises(ValueError, match="one shape"):
        cosine_sums(torch.tensor(1.0), torch.tensor(1.0))
