"""Slices of a mixture's experts. A worker holds one slice at a time.

A slice is a range of consecutive experts. Experts are added to a token's sum in ascending order, so that the size of a
slice does not change the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lamina import LayersConfig
from pipeline.units.sharding import expert_ranges

EXPERTS = "experts"


@dataclass(frozen=True)
class ExpertSlices:
    """The slices of one layer's experts, and the names of their tensors.

    Attributes:
        prefix: the prefix of the experts' tensors.
        ranges: the experts of each slice.
    """

    prefix: str
    ranges: tuple[range, ...]

    @cached_property
    def _slice_of(self) -> dict[int, int]:
        return {expert: number for number, experts in enumerate(self.ranges) for expert in experts}

    def number(self, name: str) -> int | None:
        """Return the slice of a tensor; None for one outside of experts."""
        if not name.startswith(self.prefix):
            return None
        expert = name.removeprefix(self.prefix).partition(".")[0]
        return self._slice_of[int(expert)] if expert.isdigit() else None

    def is_read(self, name: str, number: int, outside: bool) -> bool:
        """Return True if a tensor is of a slice, or with `outside` of no slice."""
        own = self.number(name)
        return outside if own is None else own == number


def expert_slices(config: LayersConfig, layer: int, prefix: str, size: int) -> ExpertSlices | None:
    """Return the slices of a layer, of at most `size` experts each; None for a single slice.

    `prefix`: the prefix of the layer's tensors. `config`: with the layer's forms, which determine the number of
    experts.
    """
    sizes = config.layer_mixture(layer)
    ranges = expert_ranges(sizes.experts if sizes else 0, size)
    if len(ranges) < 2:
        return None
    assert config.mixture is not None
    return ExpertSlices(f"{prefix}{config.mixture[EXPERTS]}.", ranges)
