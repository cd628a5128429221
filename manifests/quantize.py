"""The block `quantize`: fewer bits for what is stored. docs/manifest.md."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import field_validator, model_validator

from manifests.blocks import Block, Listed

QUANTIZED_ROLES = ("q", "k", "v", "o", "gate", "up", "down")


class Quantize(Block):
    """Fewer bits for what is stored, on top of every method or of none. docs/methods.md#rounding.

    `group`: columns that share a scale; null: a scale for each row. `skip`: roles that keep the checkpoint's dtype.
    `feedback`: the error of each column is made up for by those after it (GPTQ), which takes calibration text; null:
    where there is such text, else every number goes to the nearest code.
    """

    bits: Literal[8, 4, 3]
    group: Literal[32, 64, 128] | None = 32
    symmetric: bool = True
    what: Literal["factors"] = "factors"
    skip: Annotated[tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...], Listed] = ()
    feedback: bool | None = None

    @field_validator("symmetric")
    @classmethod
    def _is_symmetric(cls, symmetric: bool) -> bool:
        if not symmetric:
            raise ValueError("only symmetric codes are stored, without zero points; leave it out, or say true")
        return symmetric

    @model_validator(mode="after")
    def _rounds_something(self) -> Self:
        if set(self.skip) >= set(QUANTIZED_ROLES):
            raise ValueError("skip: names every role, so that nothing would be rounded; leave out `quantize`")
        return self
