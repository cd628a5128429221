"""The possible sizes of an MLP: widths, joint ranks of the readers, and ranks of the writer.

docs/methods.md#curves. Legend: N channels of the dense MLP.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manifests.methods import LossAware
from pipeline.families.blocks import Matrix, MLPBlock, roles_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.loss_aware.stacks import Stack

WIDTH = "width"  # rank variable; the others are named after the block's two groups
_DIGITS = string.digits + string.ascii_lowercase  # in the order of their codes, which `decode_kept` compares


@dataclass(frozen=True)
class Sizes:
    """The sizes of one MLP of a layer, as an entry of the manifest allows them."""

    entry: LossAware
    geometry: LayerGeometry
    block: MLPBlock

    @property
    def multiple(self) -> int:
        """Return the multiple of widths and ranks."""
        return self.entry.multiple(self.geometry.hidden)

    @cached_property
    def widths(self) -> list[int]:
        """Return a few evenly spaced widths, up to the full one."""
        whole, multiple, count = self.block.width, self.multiple, self.entry.widths
        even = {max(1, round(whole * share / count / multiple)) * multiple for share in range(1, count)}
        return [*sorted(width for width in even if width < whole), whole]

    def reader_stack(self, width: int) -> Stack:
        """Return the stack of the readers at a width."""
        return self._stack(self.block.reader_group, self.block.readers, len(self.block.readers) * width, None, width)

    def writer_stack(self, width: int) -> Stack:
        """Return the writer at a width."""
        return self._stack(self.block.writer_group, (self.block.writer,), self.geometry.hidden, width, width)

    def _stack(self, name: str, matrices: tuple[Matrix, ...], outputs: int, inputs: int | None, width: int) -> Stack:
        inputs, pivoted = inputs or self.geometry.hidden, self.entry.factors == "pivoted"
        form = {} if width >= self.block.width else {"width": width}
        return Stack(name, roles_of(matrices), outputs, inputs, self.geometry.bits, pivoted, form)

    def bias_numbers(self, width: int) -> int:
        """Count the numbers of all biases."""
        return width * sum(reader.bias for reader in self.block.readers) + self.block.writer.biases


def encode_widths(order: Sequence[int], widths: Sequence[int]) -> str:
    """Encode the smallest width that keeps each channel, as one character per channel.

    The character, from 0 … 9, a … z, is the position of that width in `widths`. Return an empty string if there are
    more widths than characters. `order`: the channels, the last removed first.
    """
    if len(widths) > len(_DIGITS):
        return ""
    places_N = torch.bucketize(torch.arange(len(order)), torch.tensor(widths), right=True)
    digits = [""] * len(order)
    for channel, place in zip(order, places_N.tolist(), strict=True):
        digits[channel] = _DIGITS[place]
    return "".join(digits)


def decode_kept(encoded: str, place: int) -> Tensor:
    """Return the channels, ascending, that the width at position `place` keeps, from the result of `encode_widths`."""
    digits_N = torch.tensor(list(encoded.encode()))
    return (digits_N <= ord(_DIGITS[place])).nonzero()[:, 0]
