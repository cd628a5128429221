"""The block `quantize`: fewer bits for what is stored. docs/manifest.md."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import field_validator, model_validator

from manifests.blocks import Block, Listed

QUANTIZED_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
OUTER_ROLES = ("embed", "head")
OUTER_BITS = 8  # of embeddings and head, where bits are chosen: no curve says what fewer would cost there


class Quantize(Block):
    """Fewer bits for what is stored, on top of every method or of none. docs/methods.md#rounding.

    `bits: auto` chooses 8, 4 or 3 for each part of a layer, with its ranks, by predicted loss within `budget.bytes`.
    `group`: columns that share a scale; null: a scale for each row. `what: all`: token embeddings and the head, too, to
    8 bits where bits are chosen. `skip`: roles that keep the checkpoint's dtype.
    `feedback`: the error of each column is made up for by those after it (GPTQ), which takes calibration text; null:
    where there is such text, else every number goes to the nearest code.
    """

    bits: Literal[8, 4, 3, "auto"]
    group: Literal[32, 64, 128] | None = 32
    symmetric: bool = True
    what: Literal["factors", "all"] = "factors"
    skip: Annotated[tuple[Literal["q", "k", "v", "o", "gate", "up", "down", "embed", "head"], ...], Listed] = ()
    feedback: bool | None = None

    @field_validator("symmetric")
    @classmethod
    def _is_symmetric(cls, symmetric: bool) -> bool:
        if not symmetric:
            raise ValueError("only symmetric codes are stored, without zero points; leave it out, or say true")
        return symmetric

    @model_validator(mode="after")
    def _choices_follow_text(self) -> Self:
        if self.bits == "auto" and (self.feedback is False or self.group is None):
            raise ValueError("bits: auto rounds with error feedback and counts a scale for each group; give a group")
        return self

    @model_validator(mode="after")
    def _rounds_something(self) -> Self:
        if set(self.skip) >= {*QUANTIZED_ROLES, *self.outer_roles}:
            raise ValueError("skip: names every role, so that nothing would be rounded; leave out `quantize`")
        return self

    @property
    def outer_roles(self) -> tuple[str, ...]:
        """What is rounded outside of the layers."""
        return tuple(role for role in OUTER_ROLES if role not in self.skip) if self.what == "all" else ()
