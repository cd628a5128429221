"""Types that several blocks of a manifest share: shares, locations and counts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from manifests.blocks import Count, Location, ManifestBlock, Share


class Example(ManifestBlock):
    share: Share = 0.5
    location: Location = "a"
    count: Count = 1


@pytest.mark.parametrize("share", [1e-9, 0.5, 1, 1.0])
def test_shares_are_above_zero_and_at_most_one(share: float) -> None:
    assert Example(share=share).share == share


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"share": 80}, "for 80 % give 0.8"),
        ({"share": "62.5%"}, "for 62.5 % give 0.625"),
        ({"share": 1.5}, "less than or equal to 1"),  # no percentage: nobody keeps 1.5 %
        ({"share": 0.0}, "greater than 0"),
        ({"share": float("nan")}, "finite"),
        ({"share": True}, "valid number"),
        ({"location": " "}, "not blank"),
        ({"location": "a\nb"}, "no control characters"),
        ({"location": "\ud800"}, "half a surrogate pair"),
        ({"count": 0}, "greater than 0"),
        ({"count": 1.0}, "valid integer"),
        ({"other": 1}, "Extra inputs"),
    ],
)
def test_other_values_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Example(**fields)


def test_blocks_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example().share = 0.7  # type: ignore[misc]
