"""An export finds the dtype of every tensor of the source, stored or not."""

from __future__ import annotations

import torch

from pipeline.inputs.source_dtypes import FIELD, source_dtype, unstored_dtypes
from stores.headers import TensorRecord


def record(name: str, dtype: str) -> TensorRecord:
    return TensorRecord(name, dtype, (2, 2), "model.safetensors", 0, 8)


SOURCE = {
    name: record(name, dtype)
    for name, dtype in (("q.weight", "F32"), ("k.weight", "BF16"), ("v.weight", "F32"), ("norm.weight", "F32"))
}


def test_only_other_dtypes_that_no_stored_tensor_shows_are_recorded() -> None:
    stored = {"v.weight_scale", "norm.weight", "q.first.weight"}
    assert unstored_dtypes(SOURCE, SOURCE, stored, "bfloat16") == {"q.weight": "float32"}


def test_a_stored_tensor_or_its_scale_shows_the_dtype() -> None:
    stored = {"norm.weight": record("norm.weight", "F32"), "v.weight_scale": record("v.weight_scale", "F16")}
    config = {"dtype": "bfloat16", FIELD: {"q.weight": "float32"}}
    assert source_dtype("norm.weight", stored, config) == torch.float32
    assert source_dtype("v.weight", stored, config) == torch.float16
    assert source_dtype("q.weight", stored, config) == torch.float32
    assert source_dtype("k.weight", stored, config) == torch.bfloat16
