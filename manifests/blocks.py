"""What every block of the manifest is made of: strictness, and the kinds of values that several blocks have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _without_control_characters(text: str) -> str:
    if not text.strip() or any(ord(character) < 32 for character in text):
        raise ValueError("should be a path or an address: not blank, no control characters")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("should be a path or an address: half a surrogate pair is no character")
    return text


Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Location = Annotated[str, AfterValidator(_without_control_characters)]
Listed = Field(strict=False)  # YAML has lists only; strict tuples refuse them


class Block(BaseModel):
    """Base of every manifest block: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
