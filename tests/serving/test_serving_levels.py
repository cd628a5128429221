"""Modules whose codes stand for levels in a table, against the same weights multiplied out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lamina import levels_lamina
from lamina.embedding_lamina import ScaledEmbedding
from lamina.levels_lamina import TableEmbedding, TableLinear, attach_tables
from manifests.records import Scheme
from pipeline.kernels.packing import code_range, scaled
from pipeline.rounding.schemes import packed_tensors


def filled(table: Any, bits: int, group: int | None) -> torch.Tensor:
    """Fill a module with codes at random. Return its weight."""
    rows, columns = table.weight_shape.tolist()
    low, high = code_range(bits)
    codes = torch.randint(low, high + 1, (rows, columns), dtype=torch.int8)
    scales, levels = torch.randn(rows, 1 if group is None else columns // group), torch.randn(2**bits).sort().values
    stored = packed_tensors("p", codes, scales, Scheme(bits=bits, group=group, levels="learned"), levels)
    table.load_state_dict({name.removeprefix("p."): tensor for name, tensor in stored.items()}, strict=False)
    return scaled(codes, scales, levels)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(64, 32), (48, 16), (37, None)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_multiplies_blocks_of_rows(
    bits: int, columns: int, group: int | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels_lamina, "BLOCK_NUMBERS", 3 * columns)  # blocks of three rows, the last of one
    linear = nn.Linear(columns, 10, bias=bias)
    table = TableLinear(linear, bits, group)
    weight, x = filled(table, bits, group), torch.randn(2, 5, columns)
    assert torch.allclose(table(x), nn.functional.linear(x, weight, linear.bias), atol=1e-4)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_embeddings_are_looked_up(scale: float | None) -> None:
    plain = nn.Embedding(20, 32) if scale is None else ScaledEmbedding(20, 32, scale)
    table = TableEmbedding(plain, 3, 16)
    plain.weight.data = filled(table, 3, 16)
    ids = torch.randint(0, 20, (2, 7))
    assert torch.equal(table(ids), plain(ids))


@pytest.mark.parametrize(
    ("path", "scheme", "says"),
    [
        ("lost.linear", {"bits": 4, "group": None}, "lost.linear is neither a linear"),
        ("norm", {"bits": 4, "group": None}, "norm is neither a linear"),
        ("linear", {"bits": 9, "group": None}, "does not fit 32 columns"),
        ("linear", {"bits": 4, "group": 24}, "does not fit 32 columns"),
        ("linear", {}, "does not fit 32 columns"),
    ],
)
def test_wrong_config(path: str, scheme: dict[str, Any], says: str) -> None:
    root = nn.ModuleDict({"linear": nn.Linear(32, 8), "norm": nn.LayerNorm(32)})
    with pytest.raises(ValueError, match=says):
        attach_tables(root, {path: scheme})
