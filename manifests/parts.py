"""Fused tensors: stored tensors that hold several matrices or biases, and the place of each part.

`stores` reads the parts; exports write the fused tensor from its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FusedPart:
    """A matrix or a bias inside of a stored tensor.

    Attributes:
        shape: the shape of the part.
        begin: the number of stored numbers before its block.
        block: the shape of its block, the numbers from `begin` on that contain the part; equal to `shape` if they
            contain nothing else.
        axis: the axis of the block along which several parts share it.
        first: the index of the part's first row on that axis; every `step`-th row from there is the part's.
        transposed: the block holds the transposed part.
        groups: the number of groups of rows, counted by the block's first axis, with equally many rows of the part in
            each; 1 without groups.
    """

    name: str
    shape: Shape
    begin: int
    block: Shape
    axis: int = 0
    first: int = 0
    step: int = 1
    transposed: bool = False
    groups: int = 1

    @property
    def is_whole_block(self) -> bool:
        """True if the stored numbers from `begin` on are those of the part, in its order."""
        return self.block == self.shape and not self.transposed

    @property
    def end(self) -> int:
        """Count the stored numbers up to the end of the block."""
        return self.begin + math.prod(self.block)

    def within(self, block: Any) -> Any:
        """Return the view of the part in a tensor of the block's shape.

        It has the part's shape, except that groups have a separate first axis.
        """
        count = self.shape[0] // self.groups
        index = [slice(None)] * len(self.block)
        index[self.axis] = slice(self.first, self.first + self.step * (count - 1) + 1, self.step)
        part = block[tuple(index)]
        return part.mT if self.transposed else part


class Fused(NamedTuple):
    """A stored tensor of several parts, and its shape."""

    shape: Shape
    parts: tuple[FusedPart, ...]


def stacked(
    shapes: Mapping[str, Shape], begin: int = 0, interleaved: bool = False, transposed: bool = False
) -> tuple[FusedPart, ...]:
    """Return the parts of a block that holds the rows of some matrices, or numbers of biases.

    Args:
        shapes: name -> shape of each, in order.
        begin: the count of stored numbers before the block.
        interleaved: the first row of each comes first, then the second of each, and so on.
        transposed: rows of matrices are columns of the block.
    """
    rows = sum(shape[0] for shape in shapes.values())
    inner = next(iter(shapes.values()))[1:]
    turned = transposed and bool(inner)
    block, axis = ((*inner, rows), 1) if turned else ((rows, *inner), 0)
    parts: list[FusedPart] = []
    row = 0
    for place, (name, shape) in enumerate(shapes.items()):
        if interleaved or turned:
            first, step = (place, len(shapes)) if interleaved else (row, 1)
            parts.append(FusedPart(name, shape, begin, block, axis, first, step, turned))
        else:
            parts.append(FusedPart(name, shape, begin + row * math.prod(inner), shape))
        row += shape[0]
    return tuple(parts)


def by_groups(shapes: Mapping[str, Shape], groups: int) -> tuple[FusedPart, ...]:
    """Return the parts of a tensor that holds the first group of rows of each matrix, then the second, and so on.

    `shapes`: name -> shape of each, in the order inside of a group.
    """
    inner = next(iter(shapes.values()))[1:]
    block = (groups, sum(shape[0] for shape in shapes.values()) // groups, *inner)
    parts: list[FusedPart] = []
    row = 0
    for name, shape in shapes.items():
        parts.append(FusedPart(name, shape, 0, block, axis=1, first=row, groups=groups))
        row += shape[0] // groups
    return tuple(parts)


def names_of(fused: Iterable[Fused]) -> set[str]:
    """Return the names of all parts."""
    return {part.name for whole in fused for part in whole.parts}
