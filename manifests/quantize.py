"""The block `quantize`: fewer bits for stored numbers. docs/manifest.md."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from manifests.blocks import Listed, ManifestBlock, Ridge, Share
from manifests.records import LevelKind

QUANTIZED_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
Skipped = Literal[
    "q", "k", "v", "o", "gate", "up", "down", "embed", "head",
    "experts.gate", "experts.up", "experts.down", "shared.gate", "shared.up", "shared.down",
    "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
]  # fmt: skip
OUTER_ROLES = ("embed", "head")
CHOSEN_LEVELS: tuple[LevelKind, ...] = ("uniform", "normal", "learned")  # of `levels: auto`
DAMPING, LEAST_CLIP, SHRINKAGE = 0.03, 0.5, 0.3  # docs/results.md#constants-of-rounding
ROUNDED_RIDGES = (1.0, 3.0)  # of `correct_ridges`. docs/results.md#corrected-rounding
# Of jobs begun before these were fields.
FORMER_CONSTANTS = {"damping": 0.01, "least_clip": 0.875, "polish": 0, "shrinkage": 0.0}
CORRECTED_TOKENS = 4  # for each number that a matrix reads, the fewest measured: docs/results.md#corrected-rounding
OUTER_BITS = 8  # of embeddings and head with `bits: auto`, as no curve predicts the loss of fewer bits there


def is_skipped(role: str, skip: Collection[str]) -> bool:
    """Return True if `skip` names a role: `experts.3.down` is also called `experts.down` and `down`."""
    block, _, local = role.rpartition(".")
    return not {role, local, f"{block.partition('.')[0]}.{local}"}.isdisjoint(skip)


class Quantize(ManifestBlock):
    """Fewer bits for stored numbers, with any method or with none. docs/methods.md#rounding.

    `bits: auto` chooses 8, 4 or 3 (2, too, unless levels are uniform) for each part of a layer, together with its
    ranks, by predicted loss within `budget.bytes`. `levels`: uniform ones have fused kernels in engines; `normal` ones
    (quantiles of the normal distribution), `iq4_nl` (4 bits; llama.cpp has kernels for them) and `learned` ones (fitted
    to each matrix) lose less, and are stored in a table beside each matrix; `auto` chooses for each matrix the kind of
    least error of uniform, normal and learned ones. `group`: columns that share a scale; null: one scale for each row.
    `what: all` also rounds token embeddings and the head, to 8 bits with `bits: auto`. `skip`: roles that keep the
    checkpoint's dtype; those of latent attention are called as in the source.
    `gate`, `up` and `down` are those of MLPs and of all experts of a mixture; `experts.down` and its like those of
    routed experts alone, `shared.down` and its like those of the shared expert alone. `feedback`: later columns
    compensate the error of each column (GPTQ), which needs calibration text. `both`: later rows compensate it, too,
    by the gradients of the model's loss at their outputs. null: to the nearest code without calibration text; both if
    uniform codes have fewer than 8 bits and a method measures these gradients of the dense model anyway; else as true.
    `shrinkage`: before feedback, this share of the moment of what a matrix reads from the residual stream is replaced
    by its diagonal; more of it trusts the text less, for each input by its own size. `damping`: added to the moment of
    every input, in shares of its mean diagonal.
    `least_clip`: the least share of a group's largest magnitude that its codes may cover, with feedback. `polish`:
    sweeps over uniform codes and their scales after feedback, each of which lowers the error. `correct: output`: each
    matrix that no method compresses is fitted behind the rounded layers before it, to compensate their error, and then
    rounded; routed experts are not fitted. `correct_ridges`: as those of loss_aware. `symmetric`: codes have no zero
    point, which is the only kind that is stored.
    """

    bits: Literal[8, 4, 3, 2, "auto"]
    levels: Literal["uniform", "normal", "iq4_nl", "learned", "auto"] = "uniform"
    group: Literal[32, 64, 128] | None = 32
    symmetric: bool = True
    what: Literal["factors", "all"] = "factors"
    skip: Annotated[tuple[Skipped, ...], Listed] = ()
    feedback: bool | Literal["both"] | None = None
    shrinkage: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = SHRINKAGE
    damping: Annotated[float, Field(gt=0.0, le=1e3, allow_inf_nan=False)] = DAMPING
    least_clip: Share = LEAST_CLIP
    polish: Annotated[int, Field(ge=0, le=16)] = 1
    correct: Literal["none", "output"] = "none"
    correct_ridges: Annotated[tuple[Ridge, Ridge], Listed] = ROUNDED_RIDGES

    @field_validator("symmetric")
    @classmethod
    def _is_symmetric(cls, symmetric: bool) -> bool:
        if not symmetric:
            raise ValueError("only symmetric codes are stored, without zero points; leave it out, or set it to true")
        return symmetric

    @model_validator(mode="after")
    def _choices_follow_text(self) -> Self:
        if self.bits == "auto" and (self.feedback is False or self.group is None):
            raise ValueError("bits: auto rounds with error feedback and counts a scale for each group; give a group")
        return self

    @model_validator(mode="after")
    def _corrections_round_given_bits(self) -> Self:
        if self.correct == "none":
            return self
        if self.bits == "auto":
            raise ValueError("correct: output needs given bits; with bits: auto write correct: output under loss_aware")
        if self.feedback in (False, "both"):
            raise ValueError(
                "correct: output rounds by the inputs that it measures behind rounded layers; leave out feedback: "
                f"{str(self.feedback).lower()}, or correct"
            )
        return self

    @model_validator(mode="after")
    def _levels_fit_bits(self) -> Self:
        if self.levels == "iq4_nl" and self.bits != 4:
            raise ValueError(f"levels: iq4_nl has 16 levels, for bits: 4, not {self.bits}")
        return self

    @model_validator(mode="after")
    def _rounds_something(self) -> Self:
        if set(self.skip) >= {*QUANTIZED_ROLES, *self.outer_roles}:
            raise ValueError("skip: names every role, so that nothing would be rounded; leave out `quantize`")
        return self

    def skips(self, role: str) -> bool:
        """Return True if a role keeps the checkpoint's dtype."""
        return is_skipped(role, self.skip)

    @property
    def kinds_of_levels(self) -> tuple[LevelKind, ...]:
        """Return the kinds of levels to choose from."""
        return CHOSEN_LEVELS if self.levels == "auto" else (self.levels,)

    @property
    def may_have_tables(self) -> bool:
        """Return True if a table of levels may be stored with each matrix."""
        return self.levels != "uniform"

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the bits to choose from, ascending. Two bits with uniform levels lose too much."""
        if self.bits != "auto":
            return (self.bits,)
        return (3, 4, 8) if self.levels == "uniform" else (2, 3, 4, 8)

    @property
    def outer_roles(self) -> tuple[str, ...]:
        """Return the rounded roles outside of the layers."""
        return tuple(role for role in OUTER_ROLES if role not in self.skip) if self.what == "all" else ()
