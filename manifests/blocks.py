"""The base class of manifest blocks, and types that several blocks share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _without_control_characters(text: str) -> str:
    if not text.strip() or any(ord(character) < 32 for character in text):
        raise ValueError("should be a path or an address: not blank, no control characters")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("should be a path or an address: half a surrogate pair is not a character")
    return text


LEAST_PERCENT = 2.0  # numbers from here on look like percentages; numbers just above 1 do not


def _no_percentage(share: Any) -> Any:
    """Raise ValueError for a percentage (80, `80%`). Other faults are found by the limits of a share."""
    sign = isinstance(share, str) and share.strip().endswith("%")
    try:
        percent = float(str(share).strip().rstrip("%")) if sign or type(share) in (int, float) else 0.0
    except ValueError:
        return share
    if 0.0 < percent <= 100.0 and (sign or percent >= LEAST_PERCENT):
        raise ValueError(f"should be a share above 0, and at most 1; for {percent:g} % give {percent / 100:.6g}")
    return share


def _is_a_rate_or_auto(rate: Any) -> Any:
    # A union would report each of its kinds as a fault.
    if rate == "auto" or (type(rate) in (int, float) and 0 < rate < 1):
        return rate if rate == "auto" else float(rate)
    raise ValueError("should be a number above 0 and below 1, or auto")


Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False), BeforeValidator(_no_percentage)]
Location = Annotated[str, AfterValidator(_without_control_characters)]
Count = Annotated[int, Field(gt=0, le=10**9)]
Ridge = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
LearningRate = Annotated[Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["auto"], BeforeValidator(_is_a_rate_or_auto)]
Listed = Field(strict=False)  # YAML has lists only; strict tuples refuse them


class ManifestBlock(BaseModel):
    """Base of every manifest block: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
