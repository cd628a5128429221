"""The sizes that an MLP can have: widths, and ranks of gate and up together and of down. docs/methods.md#curves.

Legend: N intermediate.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch
from torch import Tensor

from manifests.methods import LossAware
from pipeline.families.family import LayerGeometry
from pipeline.methods.loss_aware.stacks import Stack

WIDTH, GATE_UP, DOWN = "width", "gate_up", "down"
_DIGITS = string.digits + string.ascii_lowercase  # they ascend as codes, too


def readers(geometry: LayerGeometry) -> tuple[str, ...]:
    """The roles that read the MLP's input."""
    return tuple(role for role in ("gate", "up") if role in geometry.roles)


def reader_stack(entry: LossAware, geometry: LayerGeometry, width: int) -> Stack:
    """gate and up at a width."""
    names, pivoted = readers(geometry), entry.factors == "pivoted"
    rows = len(names) * width
    return Stack(GATE_UP, names, rows, geometry.hidden, geometry.bits, pivoted, _width_of_form(geometry, width))


def down_stack(entry: LossAware, geometry: LayerGeometry, width: int) -> Stack:
    """down at a width."""
    pivoted, widths = entry.factors == "pivoted", _width_of_form(geometry, width)
    return Stack(DOWN, (DOWN,), geometry.hidden, width, geometry.bits, pivoted, widths)


def _width_of_form(geometry: LayerGeometry, width: int) -> dict[str, int]:
    return {} if width >= geometry.intermediate else {"width": width}


def told_widths(order: Sequence[int], widths: Sequence[int]) -> str:
    """Which channels stay at which widths: for each channel the place of the least of `widths` that keeps it, as a
    digit of 0 … 9, a … z; nothing where there are more widths. `order`: the channels, those that stay longest first."""
    if len(widths) > len(_DIGITS):
        return ""
    places_N = torch.bucketize(torch.arange(len(order)), torch.tensor(widths), right=True)
    digits = [""] * len(order)
    for channel, place in zip(order, places_N.tolist(), strict=True):
        digits[channel] = _DIGITS[place]
    return "".join(digits)


def kept_as_told(told: str, place: int) -> Tensor:
    """The channels, ascending, that `told_widths` says stay at the width of this place."""
    digits_N = torch.tensor(list(told.encode()))
    return (digits_N <= ord(_DIGITS[place])).nonzero()[:, 0]


def bias_numbers(geometry: LayerGeometry, width: int) -> int:
    """Of all roles."""
    biased = geometry.biases
    return width * sum(role in biased for role in readers(geometry)) + geometry.hidden * (DOWN in biased)


def widths_of(entry: LossAware, geometry: LayerGeometry) -> list[int]:
    """A few widths, evenly up to the full one."""
    whole, multiple, count = geometry.intermediate, entry.multiple(geometry.hidden), entry.widths
    even = {max(1, round(whole * share / count / multiple)) * multiple for share in range(1, count)}
    return [*sorted(width for width in even if width < whole), whole]
