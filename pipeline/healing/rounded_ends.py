"""Rounded embeddings and a rounded head of a student. They do not train, and are multiplied out when it is loaded.

Legend: V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lamina.embedding_lamina import Embedding, ScaledEmbedding
from lamina.levels_lamina import BLOCK_NUMBERS, PACKED, SCALE, TableEmbedding, TableLinear
from pipeline.healing.rounded import even_scheme
from pipeline.kernels.levels import uniform_levels


def multiply_out(model: nn.Module, ends: tuple[nn.Module, ...]) -> None:
    """Replace rounded embeddings and a rounded head, which do not train, by modules with their weights."""
    paths = {module: path for path, module in model.named_modules()}
    for module in ends:
        is_even = isinstance(module, nn.Embedding) and hasattr(module, PACKED)
        table = _even_embedding(module) if is_even else module
        if isinstance(table, TableLinear | TableEmbedding):
            model.set_submodule(paths[module], _whole(table))


def _even_embedding(embedding: Any) -> TableEmbedding:
    """Return embeddings whose codes of even steps compressed-tensors has loaded as ones with a table of levels."""
    packed, scale = getattr(embedding, PACKED).detach(), getattr(embedding, SCALE).detach()
    bits, group = even_scheme(embedding, embedding.embedding_dim)
    table = TableEmbedding(embedding, bits, group)
    table.weight_levels = uniform_levels(bits, torch.float32, packed.device)
    table.weight_packed, table.weight_scale = packed, scale
    return table


def _whole(table: TableLinear | TableEmbedding) -> nn.Module:
    """Return a module with the weight (V, D) of a rounded one, in float32."""
    rows, columns = table.weight_packed.shape[0], table.columns
    step = max(1, BLOCK_NUMBERS // columns)
    weight_VD = torch.cat([table.rows(slice(at, at + step)).detach() for at in range(0, rows, step)]).float()
    with torch.device("meta"):
        whole: nn.Linear | nn.Embedding
        if isinstance(table, TableLinear):
            whole = nn.Linear(columns, rows, bias=False)
            whole.bias = table.bias
        elif table.embed_scale is None:
            whole = Embedding(rows, columns)
        else:
            whole = ScaledEmbedding(rows, columns, table.embed_scale)
    whole.weight = nn.Parameter(weight_VD)
    return whole
