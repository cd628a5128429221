"""Fields that the entries of all methods share. docs/manifest.md."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import field_validator

from manifests.blocks import Count, LearningRate, ManifestBlock, Share

MIXED_SHARE = 0.25  # of the solved layers' error in mixed inputs, docs/results.md#refinement
WIDE, WIDE_MULTIPLE = 1024, 16  # from this hidden size on, ranks are multiples of 16 by default
LAYERS_PATTERN = re.compile(r"all|last:(0*[1-9][0-9]*|0?\.[0-9]*[1-9][0-9]*|1\.0*)", re.ASCII)


class Refine(ManifestBlock):
    """Training of each solved layer towards the dense model's outputs, docs/methods.md#refinement.

    `steps`: the most steps of a layer; of samples longer than 1024 tokens there are fewer. `tokens`: the most
    calibration tokens to train on. `learning_rate`: the largest relative change of a matrix in a step; `auto` is 0.003,
    and 0.00075 in a layer that does not gain by it. `inputs`: the hidden states that a layer is trained on:
    `compressed`, those behind the refined layers before it, so that one layer is trained after another; `dense`, those
    of the dense model, so that each worker trains a layer; `mixed`, those of the dense model with a quarter of the
    error that the solved layers make before any is trained, so that each worker trains a layer here, too.
    """

    steps: Count = 200
    tokens: Count | Literal["all"] = "all"
    learning_rate: LearningRate = "auto"
    inputs: Literal["compressed", "dense", "mixed"] = "compressed"

    @field_validator("tokens", mode="before")
    @classmethod
    def _is_a_count_or_all(cls, tokens: Any) -> Any:
        # A union would report each of its kinds as a fault.
        if tokens == "all" or (type(tokens) is int and tokens > 0):
            return tokens
        raise ValueError("should be a number of tokens above 0, or all")


class MethodEntry(ManifestBlock):
    """Fields of every method's entry.

    `layers`: `all`, `last:N`, `last:SHARE` (`last:0.5`: the deeper half) or a list of numbers from 0. `keep`: a size of
    its own instead of the common budget's. `rank_multiple`: as the budget's `multiple`, for this entry; null: the
    budget's. `refine`: true, or settings: train the stored numbers of each solved layer; null or false: do not.
    """

    layers: str | tuple[int, ...] = "all"
    keep: Share | None = None
    rank_multiple: Count | None = None
    refine: Refine | None = None

    @field_validator("refine", mode="before")
    @classmethod
    def _may_be_true_or_false(cls, refine: Any) -> Any:
        return ({} if refine else None) if isinstance(refine, bool) else refine

    def multiple(self, hidden_size: int) -> int:
        """Return the number that divides all chosen ranks, in a model of this hidden size."""
        return self.rank_multiple or (WIDE_MULTIPLE if hidden_size >= WIDE else 1)

    def deciding_multiple(self, hidden_size: int) -> int | None:
        """Return the number that decides sizes in a model of this hidden size; None if it depends on layers, too."""
        return self.multiple(hidden_size)

    def in_steps_of(self, multiple: int | None) -> Self:
        """Return this entry, with `multiple` as its default `rank_multiple`."""
        return self if self.rank_multiple or not multiple else self.model_copy(update={"rank_multiple": multiple})

    @property
    def follows_curves(self) -> bool:
        """True if ranks follow predicted loss."""
        return getattr(self, "allocation", None) == "loss"

    @property
    def needs_gradient(self) -> bool:
        """True if ranks or solutions follow gradients of the model's loss."""
        return self.follows_curves or getattr(self, "weighting", None) == "loss"

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_are_known(cls, layers: Any) -> str | tuple[int, ...]:
        if isinstance(layers, str) and LAYERS_PATTERN.fullmatch(layers):
            return layers
        if isinstance(layers, (list, tuple)) and layers and all(type(n) is int and n >= 0 for n in layers):
            return tuple(layers)
        raise ValueError("should be all, last:N, last:SHARE (N and SHARE above 0) or a list of layer numbers from 0")

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layer numbers, ascending, in a model of `num_layers`. Raises ValueError if one does not exist."""
        if self.layers == "all":
            return tuple(range(num_layers))
        if isinstance(self.layers, str):
            number = self.layers.removeprefix("last:")
            count = round(float(number) * num_layers) if "." in number else int(number)
            if not 1 <= count <= num_layers:
                raise ValueError(f"layers: {self.layers} asks for {count} of {num_layers} layers")
            return tuple(range(num_layers - count, num_layers))
        chosen = tuple(sorted(set(self.layers)))
        if chosen[-1] >= num_layers:
            raise ValueError(f"layers: {list(self.layers)}; the model has layers 0 to {num_layers - 1}")
        return chosen
