"""Numbers and bytes of stored tensors."""

from __future__ import annotations

from pathlib import Path

from manifests.parts import stacked
from pipeline.checkpoint.counting import decoded_numbers, numbers_of_tensor, stored_sizes
from stores.weight_parts import cut
from tests.stores.test_formats import Stored


def test_numbers_of_any_float_count_once() -> None:
    assert [numbers_of_tensor(dtype, (3, 5), 2) for dtype in ("F32", "BF16", "F8_E4M3")] == [15, 15, 15]


def test_integers_count_by_their_bytes() -> None:
    assert numbers_of_tensor("I32", (3, 5), 2) == 30
    assert numbers_of_tensor("U8", (3, 5), 2) == 8, "15 bytes begin eight numbers"
    assert numbers_of_tensor("I64", (), 4) == 2, "a scalar"


def test_layers_are_told_apart_by_their_path() -> None:
    tensors = [
        ("model.layers.0.q.weight", "BF16", (4, 4)),
        ("model.layers.0.q.mask", "U8", (6,)),
        ("model.layers_norm.weight", "F32", (4,)),
        ("lm_head.weight", "BF16", (8, 4)),
    ]
    sizes = stored_sizes(tensors, "model.layers", 2)
    assert sizes == {"parameters": 16 + 3 + 4 + 32, "decoder_parameters": 19, "bytes": 32 + 6 + 16 + 64}


def test_parts_of_a_stored_weight_count_as_its_numbers(tmp_path: Path) -> None:
    """Codes of four bits count as many numbers as the decoded weight, also where several weights share them."""
    stored = Stored(tmp_path, "int4")
    assert decoded_numbers([stored.weight]) == {
        "q_proj.weight_packed": 32 * 64,
        "q_proj.weight_scale": 0,
        "q_proj.weight_shape": 0,
    }
    halves = [cut(Stored(tmp_path, "gptq").weight, part) for part in stacked({"a": (16, 64), "b": (16, 64)})]
    assert decoded_numbers(halves)["q_proj.qweight"] == 32 * 64
    tensors = [(part.name, part.dtype, part.shape) for part in stored.weight.stored]
    assert stored_sizes(tensors, "q_proj", 2, decoded_numbers([stored.weight]))["decoder_parameters"] == 32 * 64
