"""Healing of a manifest: the compressed model is trained as a whole against the dense one. docs/methods.md#healing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from manifests.blocks import Block, Count
from manifests.calibration import Text


class Heal(Block):
    """Training of the whole compressed model against the dense one, [methods.md#healing](methods.md#healing).

    It follows the solve, and is no part of it: a finished job that gets this field pays for the healing alone. `python
    -m pipeline.heal RUN_DIR` adds it.

    `text`: what it is trained on; null: the calibration samples. `tokens`: how many of it; null: all. `epochs`: how
    often each window is trained on. `learning_rate`: the largest; `auto` is 3e-5 at a hidden size of 576, and falls
    with 1 / hidden size. `what`: `auto` trains factors, coefficients, refitted matrices, norms and biases of compressed
    layers; `norms` trains norms and biases alone. Embeddings, heads and routers stay.
    """

    text: Text | None = None
    tokens: Count | None = None
    epochs: Count = 1
    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["auto"] = "auto"
    what: Literal["auto", "norms"] = "auto"

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _is_a_rate_or_auto(cls, rate: Any) -> Any:
        # A union would report each of its kinds as a fault.
        if rate == "auto" or (type(rate) in (int, float) and 0 < rate < 1):
            return rate if rate == "auto" else float(rate)
        raise ValueError("should be a number above 0 and below 1, or auto")
