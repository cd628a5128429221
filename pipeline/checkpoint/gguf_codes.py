"""Rounded matrices of a compressed checkpoint whose codes a GGUF file keeps, as blocks of 32 (`gguf_blocks`).

Legend: O outputs, I inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manifests.records import Scheme
from pipeline.checkpoint.expert_codes import whole_roles
from pipeline.checkpoint.gguf_blocks import Kind, block_kind, blocks
from pipeline.families.registry import geometry_of
from pipeline.kernels.packing import unpack
from pipeline.rounding.schemes import LEVELS, PACKED, SCALE, SHAPE, packed_modules, rounded_modules
from stores.source import SourceCheckpoint


def unchanged(rows: Tensor) -> Tensor:
    """Return rows in their own order."""
    return rows


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix whose codes fit llama.cpp's blocks.

    Attributes:
        path: of its module.
        scheme: bits, groups and levels.
        kind: the kind of block.
        shape: (O, I).
        arranged: returns its rows in the file's order.
    """

    path: str
    scheme: Scheme
    kind: Kind
    shape: tuple[int, int]
    arranged: Callable[[Tensor], Tensor] = unchanged

    def read(self, checkpoint: SourceCheckpoint) -> Tensor:
        """Return the blocks, (O, bytes of a row) uint8."""
        parts = checkpoint.read([self.path + part for part in (PACKED, SCALE)])
        codes_OI = unpack(parts[self.path + PACKED], self.scheme.bits, self.shape[1])
        return blocks(self.arranged(codes_OI), self.arranged(parts[self.path + SCALE]), self.kind)


@dataclass(frozen=True)
class CodedExperts:
    """The matrices of all experts of a layer, of one shape and kind of block, in one tensor of the file."""

    matrices: tuple[CodedMatrix, ...]

    @property
    def kind(self) -> Kind:
        """The kind of block."""
        return self.matrices[0].kind

    def read(self, checkpoint: SourceCheckpoint) -> Tensor:
        """Return the blocks, (E, O, bytes of a row) uint8."""
        return torch.stack([matrix.read(checkpoint) for matrix in self.matrices])


Coded = CodedMatrix | CodedExperts


def coded_matrices(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> dict[str, CodedMatrix]:
    """Map module paths to the matrices whose codes fit blocks, of those that are not factored.

    `config`: that of a checkpoint, with as many experts as it has.
    """
    whole = {config["block"][name] for name in ("embed", "head")}
    for layer in geometry_of(config).layers:
        whole.update(map(layer.path, whole_roles(config, layer)))
    coded = {}
    for path, scheme in rounded_modules(config, packed_modules(checkpoint.tensors)).items():
        if path not in whole:
            continue
        tables = [path + LEVELS] if scheme.has_table else []
        parts = checkpoint.read([path + SCALE, path + SHAPE, *tables])
        rows, columns = parts[path + SHAPE].tolist()
        kind = block_kind(scheme, columns, parts[path + SCALE], parts.get(path + LEVELS))
        if kind is not None:
            coded[path] = CodedMatrix(path, scheme, kind, (rows, columns))
    return coded


def coded_tensor(
    coded: Mapping[str, CodedMatrix],
    paths: Sequence[str],
    shape: tuple[int, ...],
    arranged: Callable[[Tensor], Tensor] = unchanged,
) -> Coded | None:
    """Return the matrices of these modules as one tensor of this shape, (O, I), or (E, O, I) of experts.

    Return None unless all have codes of one kind and fill the shape: a latent's parts are stored as other matrices,
    and narrower ones are filled up with zeros.
    """
    matrices = [replace(coded[path], arranged=arranged) for path in paths if path in coded]
    if not paths or len(matrices) < len(paths) or len({(each.kind, each.shape) for each in matrices}) > 1:
        return None
    if shape == matrices[0].shape:
        return matrices[0]
    return CodedExperts(tuple(matrices)) if shape == (len(paths), *matrices[0].shape) else None
