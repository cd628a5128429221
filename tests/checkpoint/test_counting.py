"""Numbers and bytes of stored tensors."""

from __future__ import annotations

from pipeline.checkpoint.counting import stored_numbers, stored_sizes


def test_numbers_of_any_float_count_once() -> None:
    assert [stored_numbers(dtype, (3, 5), 2) for dtype in ("F32", "BF16", "F8_E4M3")] == [15, 15, 15]


def test_integers_count_by_their_bytes() -> None:
    assert stored_numbers("I32", (3, 5), 2) == 30
    assert stored_numbers("U8", (3, 5), 2) == 8, "15 bytes begin eight numbers"
    assert stored_numbers("I64", (), 4) == 2, "a scalar"


def test_layers_are_told_apart_by_their_path() -> None:
    tensors = [
        ("model.layers.0.q.weight", "BF16", (4, 4)),
        ("model.layers.0.q.mask", "U8", (6,)),
        ("model.layers_norm.weight", "F32", (4,)),
        ("lm_head.weight", "BF16", (8, 4)),
    ]
    sizes = stored_sizes(tensors, "model.layers", 2)
    assert sizes == {"parameters": 16 + 3 + 4 + 32, "decoder_parameters": 19, "bytes": 32 + 6 + 16 + 64}
