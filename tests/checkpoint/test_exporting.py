"""The messages of an export about the checkpoint that it writes."""

from __future__ import annotations

import pytest

from pipeline.checkpoint.exporting import note_uneven_experts


@pytest.mark.parametrize(
    ("dtype", "width", "multiple"),
    [("bfloat16", 20, 8), ("float32", 6, 4), ("bfloat16", 24, None), ("float32", 4, None), ("float32", None, None)],
)
def test_experts_that_only_the_eager_product_takes_are_named(
    dtype: str, width: int | None, multiple: int | None
) -> None:
    said: list[str] = []
    note_uneven_experts({"dtype": dtype}, width, said.append)
    assert len(said) == (multiple is not None)
    assert all('experts_implementation="eager"' in line and line.endswith(f"multiple: {multiple}") for line in said)
