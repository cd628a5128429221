"""Comparisons of a checkpoint with its source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeline.verification.source_checks import _refitted_faults
from stores.headers import TensorRecord


def test_a_refitted_tensor_of_another_shape_is_named_with_both() -> None:
    record = TensorRecord("w", "F32", (64, 128), "model.safetensors", 0, 32768)
    entry = {"origin": "loss_aware", "dtype": "F32", "shape": [32, 64]}
    pair: Any = SimpleNamespace(entry=lambda name: entry, original=SimpleNamespace(tensors={"w": record}))
    (fault,) = _refitted_faults(pair, "w", "loss_aware")
    assert fault == f"w: refitted by loss_aware, but stored as {entry}; the source has F32 [64, 128]"
