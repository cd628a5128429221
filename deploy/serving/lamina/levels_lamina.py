# mypy: allow-untyped-calls
"""Linears and embeddings whose weights are codes of a few bits: indices of a table of levels.

The weight (O, I) is level · scale: `weight_packed` (O, W) holds the number of each level, `weight_levels` (n) the
levels, and `weight_scale` (O, S) a scale for each row and group of columns. Matrices stay packed in memory, and a block
of rows at a time is multiplied out.

O outputs, I inputs, W 32-bit words of a row, n levels (2^bits), S scales of a row, o rows at a time.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .stored_lamina import unpacked

WORD_BITS = 32
BLOCK_NUMBERS = 2**21  # multiplied out at a time
PACKED, SCALE, SHAPE, LEVELS = PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_levels")


def scaled_levels(packed_OW: Tensor, scale_OS: Tensor, levels_n: Tensor, columns: int) -> Tensor:
    """Return the weight (O, I) in the dtype of its scales."""
    values_OI = _values(packed_OW, levels_n.to(scale_OS.dtype), columns)
    weight_OI: Tensor = (values_OI.unflatten(1, (scale_OS.shape[1], -1)) * scale_OS[..., None]).flatten(1)
    return weight_OI


def _values(packed_OW: Tensor, levels_n: Tensor, columns: int) -> Tensor:
    """Return the levels (O, I) of packed codes.

    All codes of a byte (of 12 bits, if codes have 3) are looked up at once: a seventh of the time of unpacking them
    (a fifteenth).
    """
    bits = (len(levels_n) - 1).bit_length()
    if bits in (2, 4, 8):
        each, bytes_OB = 8 // bits, packed_OW.view(torch.uint8)[:, : math.ceil(columns * bits / 8)]
        return nn.functional.embedding(bytes_OB.int(), _together(levels_n, each)).flatten(1)[:, :columns]
    if bits == 3 and columns % 8 == 0:
        threes_OB3 = packed_OW.view(torch.uint8)[:, : columns * 3 // 8].int().unflatten(1, (-1, 3))
        low_OB, middle_OB, high_OB = threes_OB3.unbind(2)
        pairs_OB2 = torch.stack((low_OB | (middle_OB & 15) << 8, middle_OB >> 4 | high_OB << 4), dim=2)
        return nn.functional.embedding(pairs_OB2.flatten(1), _together(levels_n, 4)).flatten(1)
    found_OI: Tensor = levels_n[unpacked(packed_OW, bits, columns)]
    return found_OI


def _together(levels_n: Tensor, count: int) -> Tensor:
    """Return the levels (n^count, `count`) of each sequence of codes, whose first varies fastest."""
    places = torch.arange(len(levels_n) ** count, device=levels_n.device)
    numbers = [places // len(levels_n) ** place % len(levels_n) for place in range(count)]
    together: Tensor = levels_n[torch.stack(numbers, dim=1)]
    return together


class _Table(nn.Module):
    """The stored tensors of a weight (O, I)."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor
    weight_levels: Tensor

    def __init__(self, outputs: int, inputs: int, bits: int, group: int | None) -> None:
        super().__init__()
        self.columns = inputs
        words, scales = math.ceil(inputs * bits / WORD_BITS), 1 if group is None else inputs // group
        self.register_buffer(PACKED, torch.zeros(outputs, words, dtype=torch.int32))
        self.register_buffer(SCALE, torch.ones(outputs, scales))
        self.register_buffer(SHAPE, torch.tensor([outputs, inputs]))
        self.register_buffer(LEVELS, torch.linspace(-1.0, 1.0, 2**bits))

    def rows(self, select: Any) -> Tensor:
        """Return selected rows of the weight, multiplied out."""
        return scaled_levels(self.weight_packed[select], self.weight_scale[select], self.weight_levels, self.columns)


class TableLinear(_Table):
    """A linear: maps x (…, I) to (…, O), in the dtype of x."""

    def __init__(self, linear: nn.Linear, bits: int, group: int | None) -> None:
        """Take the place of a linear, whose bias stays."""
        super().__init__(linear.out_features, linear.in_features, bits, group)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by a block of rows at a time."""
        step = max(1, BLOCK_NUMBERS // self.in_features)
        blocks = (slice(start, start + step) for start in range(0, self.out_features, step))
        out: Tensor = torch.cat([nn.functional.linear(x, self.rows(block).to(x.dtype)) for block in blocks], dim=-1)
        return out if self.bias is None else out + self.bias


class TableEmbedding(_Table):
    """A table of token embeddings: maps ids (…) to rows (…, I), times the factor of the embedding that it replaces."""

    def __init__(self, embedding: nn.Embedding, bits: int, group: int | None) -> None:
        """Take the place of a table of embeddings."""
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, bits, group)
        self.embed_scale: float | None = getattr(embedding, "embed_scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        """Look ids up."""
        rows: Tensor = self.rows(ids.flatten()).unflatten(0, ids.shape)
        return rows if self.embed_scale is None else rows * rows.new_full((), self.embed_scale)


def attach_tables(root: nn.Module, schemes: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the modules at these paths below `root` by modules with tables of levels.

    `schemes`: path → `bits`, `group`. Raises ValueError for a path that is neither a linear nor a table of embeddings.
    """
    for path, scheme in schemes.items():
        *parents, name = path.split(".")
        try:
            parent = root.get_submodule(".".join(parents))
            module = parent.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(f"level_tables: {path} is neither a linear nor a table of embeddings of this model")
        columns, bits, group = module.weight.shape[1], scheme.get("bits"), scheme.get("group")
        if not isinstance(bits, int) or not 2 <= bits <= 8 or not _divides(group, columns):
            raise ValueError(f"level_tables: {path}: {dict(scheme)} does not fit {columns} columns")
        table: nn.Module
        if isinstance(module, nn.Linear):
            table = TableLinear(module, bits, group)
        else:
            table = TableEmbedding(module, bits, group)
        parent.add_module(name, table)


def _divides(group: Any, columns: int) -> bool:
    return group is None or (isinstance(group, int) and group > 0 and columns % group == 0)
