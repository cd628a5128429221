"""A family with several kinds of layers takes the kind that the config says."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from pipeline.families.variants import Variant


@dataclass(frozen=True)
class Sizes:
    width: int
    bias: bool = False


VARIANT = Variant(when={"kind": ("new", "newer"), "parallel": True}, changes={"bias": True})


def test_every_field_has_to_fit() -> None:
    assert VARIANT.fits(SimpleNamespace(kind="new", parallel=True))
    assert VARIANT.fits(SimpleNamespace(kind="newer", parallel=True))
    assert not VARIANT.fits(SimpleNamespace(kind="newer", parallel=False))
    assert not VARIANT.fits(SimpleNamespace(kind="old", parallel=True))


def test_the_first_of_several_values_is_written() -> None:
    assert VARIANT.written == {"kind": "new", "parallel": True}
    assert VARIANT.fits(SimpleNamespace(**VARIANT.written))


def test_only_the_named_attributes_change() -> None:
    assert VARIANT.of(Sizes(5)) == Sizes(5, bias=True)
