"""The possible sizes of an MLP: widths, joint ranks of the readers, and ranks of the writer.

docs/methods.md#curves. Legend: N channels of the dense MLP.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from pipeline.families.blocks import roles_of
from pipeline.methods.loss_aware.mlp_sample import sample_of
from pipeline.methods.loss_aware.stacks import NO_WIDTHS, Stack, Stacked
from pipeline.methods.work import FIT_TOKENS, PROBED, PROBES
from pipeline.ranks.curves import spread

WIDTH = "width"  # rank variable; the others are named after the block's two groups
_DIGITS = string.digits + string.ascii_lowercase  # in the order of their codes, which `decode_kept` compares


class Sizes(Stacked):
    """An MLP, or an expert, with the sizes that the entry allows."""

    @cached_property
    def widths(self) -> list[int]:
        """Return a few evenly spaced widths, up to the full one."""
        return [*_spaced(self.mlp.width, self.multiple, self.entry.widths)]

    def reader_stack(self, width: int) -> Stack:
        """Return the stack of the readers at a width."""
        roles = roles_of(self.mlp.readers)
        return self.stack(self.mlp.reader_group, roles, len(roles) * width, self.geometry.hidden, self._form(width))

    def writer_stack(self, width: int) -> Stack:
        """Return the writer at a width."""
        return self.stack(
            self.mlp.writer_group, (self.mlp.writer.role,), self.geometry.hidden, width, self._form(width)
        )

    def probed_widths(self, tokens: int | None = None) -> list[int]:
        """Return the widths at which a sample is run through the activation. `tokens`: its size; None: the whole one.

        A few suffice, because the activation's effect changes little from width to width.
        """
        tokens = sample_of(self.mlp).tokens if tokens is None else tokens
        return spread([width for width in self.widths if tokens >= FIT_TOKENS * width], PROBED)

    def probed_ranks(self, width: int) -> dict[int, int]:
        """Map the readers' ranks that are probed at a width to their positions in `PROBES`."""
        full = self.reader_stack(width).full
        ranks = {max(1, int(full * share)): place for place, share in enumerate(PROBES)}
        return {rank: place for rank, place in ranks.items() if rank < full}

    def _form(self, width: int) -> Mapping[str, int]:
        return NO_WIDTHS if width >= self.mlp.width else {"width": width}

    def bias_numbers_at(self, width: int) -> int:
        """Count the numbers of all biases at a width."""
        return width * sum(reader.bias for reader in self.mlp.readers) + self.mlp.writer.biases


@cache
def _spaced(whole: int, multiple: int, count: int) -> tuple[int, ...]:
    even = {max(1, round(whole * share / count / multiple)) * multiple for share in range(1, count)}
    return (*sorted(width for width in even if width < whole), whole)


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
