"""Products of sampled inputs: rounded as stored, multiplied in the dtype that the processor multiplies fast; sums."""

from __future__ import annotations

import pytest
import torch

import pipeline.methods.products
from pipeline.kernels.moments import batched_product, bfloat16_factors
from pipeline.methods.products import passed, summing


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_the_result_is_rounded_once_from_factors_as_stored(
    stored: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = torch.float32 if wide else stored
    monkeypatch.setattr(pipeline.methods.products, "product_dtype", lambda *_: used)
    generator = torch.Generator().manual_seed(1)
    inputs_TF = torch.randn(5, 7, generator=generator).to(stored)
    weight_OF = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    outputs_TO = passed(inputs_TF, weight_OF)
    assert outputs_TO.dtype == stored
    exact_TO = inputs_TF.double() @ weight_OF.to(stored).double().T
    magnitudes_TO = inputs_TF.double().abs() @ weight_OF.to(stored).double().abs().T
    summing_TO = 7 * torch.finfo(torch.float32).eps * magnitudes_TO  # whatever the order of the sum
    assert ((outputs_TO.double() - exact_TO).abs() <= torch.finfo(stored).eps * exact_TO.abs() + summing_TO).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fast", [False, True])
def test_sums_of_half_precision_are_exact_but_for_their_order(
    stored: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.methods.products, "product_dtype", lambda *_: stored if fast else torch.float32)
    setting = torch.backends.mkldnn.matmul.fp32_precision
    rows_1RF = torch.randn(1, 300, 70, generator=torch.Generator().manual_seed(1)).to(stored).float()
    with summing(stored, torch.device("cpu")):
        assert (torch.backends.mkldnn.matmul.fp32_precision == "bf16") == (fast and stored == torch.bfloat16)
        sums_1FF = batched_product(rows_1RF.mT, rows_1RF, torch.float32)
    exact_1FF = rows_1RF.double().mT @ rows_1RF.double()
    magnitudes_1FF = rows_1RF.double().abs().mT @ rows_1RF.double().abs()
    assert ((sums_1FF - exact_1FF).abs() <= 300 * torch.finfo(torch.float32).eps * magnitudes_1FF).all()
    assert torch.backends.mkldnn.matmul.fp32_precision == setting


def test_an_exception_ends_the_fast_sums() -> None:
    setting = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ValueError, match="a shape"), bfloat16_factors():
        raise ValueError("a shape")
    assert torch.backends.mkldnn.matmul.fp32_precision == setting
