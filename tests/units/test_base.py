"""Handles inside of results are converted wherever they lie; everything else stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.units.base import HandleResult, layer_part_name


@dataclass(frozen=True)
class Inner(HandleResult):
    tensors: str | None
    count: int
    handle_fields: ClassVar[tuple[str, ...]] = ("tensors",)


@dataclass(frozen=True)
class Outer(HandleResult):
    parts: tuple[str, ...]
    by_name: dict[str, tuple[str, ...]]
    inner: Inner
    note: str
    handle_fields: ClassVar[tuple[str, ...]] = ("parts", "by_name", "inner")


def test_handles_are_converted_in_tuples_mappings_and_results() -> None:
    result = Outer(("a", "b"), {"x": ("c",)}, Inner("d", 7), "note")
    converted: Any = result.with_handles(str.upper)
    assert converted == Outer(("A", "B"), {"x": ("C",)}, Inner("D", 7), "note")
    assert result.parts == ("a", "b"), "the argument is unchanged"


def test_a_missing_handle_is_not_converted() -> None:
    assert Inner(None, 1).with_handles(str.upper) == Inner(None, 1)


def test_a_part_of_a_layer_has_a_name_of_its_own() -> None:
    assert [layer_part_name(3, None), layer_part_name(3, 0), layer_part_name(3, 12)] == ["3", "3.0", "3.12"]
