"""Rounded modules of a student: linears that train, and embeddings and a head that do not.

Linears train scales, levels, and codes through a weight that is rounded again and again. Embeddings and the head are
multiplied out when the student is loaded.

docs/methods.md#healing.

Legend: O outputs, I inputs, W words of a row, S scales of a row, g columns of a group, n levels, V vocabulary, D
hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lamina.embedding_lamina import Embedding, ScaledEmbedding
from lamina.levels_lamina import (
    BLOCK_NUMBERS,
    LEVELS,
    PACKED,
    SCALE,
    WORD_BITS,
    TableEmbedding,
    TableLinear,
    scaled_levels,
)
from pipeline.healing.processes import local, whole
from pipeline.kernels.levels import borders, nearest_places, uniform_levels
from pipeline.kernels.packing import pack

LATENT = "latent"
Even = Mapping[str, tuple[int, int | None]]  # path of a linear -> bits, columns that share a scale


class TrainedTable(TableLinear):
    """A rounded linear, weight = level · scale, whose stored tensors are parameters, so that FSDP cuts them.

    Where codes train, `latent` (O, I) is rounded to the nearest levels in each forward pass. Its gradient is that of
    the rounded weight (straight-through estimator, arXiv 1308.3432). The gradient of a scale is the sum of gradients
    times level - latent / scale (learned step size, arXiv 1902.08153), and that of a level the sum over its weights.
    """

    latent: Tensor

    def __init__(self, linear: Any, bits: int, group: int | None, even: bool, codes: bool) -> None:
        """Take the place of a linear of rounded weights.

        Args:
            linear: holds `weight_packed` and `weight_scale`, and `weight_levels` unless `even`; none in a process that
                waits for their values.
            bits: of a code.
            group: columns that share a scale; None: all.
            even: the levels are whole numbers, and stay.
            codes: they train.
        """
        device = next(itertools.chain(linear.parameters(), linear.buffers())).device
        with device:
            super().__init__(linear, bits, group)
        if even:
            self.weight_levels = uniform_levels(bits, torch.float32, device)
        for name in (PACKED, SCALE) if even else (PACKED, SCALE, LEVELS):
            stored: Tensor = getattr(linear, name, getattr(self, name)).detach()
            stored = stored.float() if stored.is_floating_point() else stored
            delattr(self, name)
            self.register_parameter(name, nn.Parameter(stored, requires_grad=False))
        if codes:
            self.latent = nn.Parameter(self._of_codes(), requires_grad=False)

    def rows(self, select: slice) -> Tensor:
        """Return rows of the weight, multiplied out."""
        if not hasattr(self, LATENT):
            return super().rows(select)
        scale_OS1 = self.weight_scale[select][..., None]
        latent_OSg = _in_scales(self.latent[select], scale_OS1)
        level_OSg = self.weight_levels[_nearest(latent_OSg, self.weight_levels)]
        weight_OI: Tensor = (scale_OS1 * (level_OSg + (latent_OSg - latent_OSg.detach()))).flatten(1)
        return weight_OI

    def _of_codes(self) -> Tensor:
        """Return this process's rows of the weight that the codes stand for."""
        packed_OW, scale_OS = local(self.weight_packed.detach()), local(self.weight_scale.detach())
        return scaled_levels(packed_OW, scale_OS, whole(self.weight_levels.detach()), self.columns)

    def take_codes(self, packed_OW: Tensor) -> None:
        """Let the latent weight be that of other codes, at the present scales and levels. All processes call it at the
        same time."""
        with torch.no_grad():
            local(self.weight_packed).copy_(local(packed_OW))
            local(self.latent).copy_(self._of_codes())

    def pack_codes(self) -> Tensor:
        """Enter the codes of the latent weight, and return them (O, W). All processes call it at the same time."""
        with torch.no_grad():
            scale_OS1, levels_n = local(self.weight_scale)[..., None], whole(self.weight_levels)
            codes_OI = _nearest(_in_scales(local(self.latent), scale_OS1), levels_n).flatten(1) - len(levels_n) // 2
            local(self.weight_packed).copy_(pack(codes_OI, (len(levels_n) - 1).bit_length()))
        return self.weight_packed.detach()


def even_codes(model: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return the linears that compressed-tensors stores as codes of even steps."""
    even = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module, PACKED):
            even[path] = even_scheme(module, module.in_features)
    return even


def even_scheme(module: nn.Module, columns: int) -> tuple[int, int | None]:
    """Return (bits, columns that share a scale; None: all) of a module that compressed-tensors has loaded."""
    words, scales = getattr(module, PACKED).shape[1], getattr(module, SCALE).shape[1]
    return words * WORD_BITS // columns, columns // scales if scales > 1 else None


def train_rounded(model: nn.Module, even: Even, trained: Container[str]) -> None:
    """Replace the linears of `even`, and those with tables of levels, by modules that train.

    `trained`: the names of the tensors that train. The codes of a linear train if its `weight_packed` is among them.
    """
    schemes = {path: (*scheme, True) for path, scheme in even.items()}
    for path, table in model.named_modules():
        if isinstance(table, TableLinear):
            scales = table.weight_scale.shape[1]
            bits = (len(table.weight_levels) - 1).bit_length()
            schemes[path] = (bits, table.columns // scales if scales > 1 else None, False)
    for path, (bits, group, is_even) in schemes.items():
        codes = f"{path}.{PACKED}" in trained
        model.set_submodule(path, TrainedTable(model.get_submodule(path), bits, group, is_even, codes))


def _in_scales(weight_OI: Tensor, scale_OS1: Tensor) -> Tensor:
    """Return weights (O, S, g) in units of their scales."""
    groups_OSg: Tensor = weight_OI.unflatten(1, (scale_OS1.shape[1], -1))
    return groups_OSg / scale_OS1


def _nearest(values: Tensor, levels_n: Tensor) -> Tensor:
    """Return the number of the level that is nearest to each value."""
    with torch.no_grad():
        ascending_n, order_n = levels_n.sort()
        nearest: Tensor = order_n[nearest_places(values, borders(ascending_n))]
        return nearest


def multiply_out(model: nn.Module, ends: tuple[nn.Module, ...]) -> None:
    """Replace rounded embeddings and a rounded head by modules with their weights."""
    paths = {module: path for path, module in model.named_modules()}
    for module in ends:
        is_even = isinstance(module, nn.Embedding) and hasattr(module, PACKED)
        table = _even_embedding(module) if is_even else module
        if isinstance(table, TableLinear | TableEmbedding):
            model.set_submodule(paths[module], _multiplied_out(table))


def _even_embedding(embedding: Any) -> TableEmbedding:
    """Return embeddings whose codes of even steps compressed-tensors has loaded as ones with a table of levels."""
    packed, scale = getattr(embedding, PACKED).detach(), getattr(embedding, SCALE).detach()
    bits, group = even_scheme(embedding, embedding.embedding_dim)
    table = TableEmbedding(embedding, bits, group)
    table.weight_levels = uniform_levels(bits, torch.float32, packed.device)
    table.weight_packed, table.weight_scale = packed, scale
    return table


def _multiplied_out(table: TableLinear | TableEmbedding) -> nn.Module:
    """Return a module with the weight (V, D) of a rounded one, in float32."""
    rows, columns = table.weight_packed.shape[0], table.columns
    step = max(1, BLOCK_NUMBERS // columns)
    weight_VD = torch.cat([table.rows(slice(at, at + step)).detach() for at in range(0, rows, step)]).float()
    with torch.device("meta"):
        module: nn.Linear | nn.Embedding
        if isinstance(table, TableLinear):
            module = nn.Linear(columns, rows, bias=False)
            module.bias = table.bias
        elif table.embed_scale is None:
            module = Embedding(rows, columns)
        else:
            module = ScaledEmbedding(rows, columns, table.embed_scale)
    module.weight = nn.Parameter(weight_VD)
    return module
