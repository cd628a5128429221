"""Products of sampled inputs: rounded as stored, multiplied in the dtype that the processor multiplies fast."""

from __future__ import annotations

import pytest
import torch

import pipeline.methods.products
from pipeline.methods.products import passed


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
