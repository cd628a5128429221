"""Head by head, against block-diagonal matrices written out."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.heads import diagonal_blocks, encode_heads, group_sums, head_blocks, project_heads, repeat_groups
from tests.tensors import randn


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 6), (6, 2), (4, 1)])
def test_products_with_block_diagonals(heads: int, groups: int) -> None:
    basis_Hio = repeat_groups(randn(groups, 5, 3), heads)
    whole = torch.block_diag(*basis_Hio)
    matrix = randn(7, 5 * heads)
    torch.testing.assert_close(project_heads(matrix, basis_Hio), matrix @ whole)
    assert project_heads(matrix, basis_Hio).is_contiguous()
    torch.testing.assert_close(encode_heads(basis_Hio.mT, matrix.T.float()), whole.T @ matrix.T.float().double())
    assert [int(part) for part in repeat_groups(torch.arange(groups), heads)] == [
        h * groups // heads for h in range(heads)
    ]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 6), (6, 2), (4, 1)])
def test_blocks_on_the_diagonal(heads: int, groups: int) -> None:
    matrix = randn(4 * heads, 3 * heads)
    blocks = head_blocks(matrix, heads)
    for head in range(heads):
        assert torch.equal(blocks[head], matrix[4 * head : 4 * head + 4, 3 * head : 3 * head + 3])
    square = randn(4 * heads, 4 * heads)
    torch.testing.assert_close(diagonal_blocks(square, heads, groups), group_sums(head_blocks(square, heads), groups))
    torch.testing.assert_close(diagonal_blocks(square, heads, groups).sum(0), head_blocks(square, heads).sum(0))
