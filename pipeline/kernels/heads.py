"""Matrices whose rows or columns belong to attention heads, head by head.

H heads, G groups of neighbouring heads (KV heads), d numbers of a head, r after a change of basis, x any size.
"""

import torch
from torch import Tensor


def repeat_groups(parts_G: Tensor, heads: int) -> Tensor:
    """Repeat each group's part for its heads: (G, …) -> (H, …)."""
    return parts_G.repeat_interleave(heads // parts_G.shape[0], dim=0)


def project_heads(matrix_xI: Tensor, basis_Hio: Tensor) -> Tensor:
    """matrix · blockdiag(basis): each head's i columns become o; (x, H·i) -> (x, H·o)."""
    blocks_Hxi = matrix_xI.unflatten(1, (basis_Hio.shape[0], -1)).transpose(0, 1)
    return torch.bmm(blocks_Hxi, basis_Hio).transpose(0, 1).flatten(1).contiguous()


def encode_heads(encode_nrd: Tensor, matrix: Tensor) -> Tensor:
    """blockdiag(encode) · matrix in float64: each of n row blocks of d rows becomes r; (n·d, x) -> (n·r, x)."""
    return torch.bmm(encode_nrd, matrix.double().unflatten(0, (encode_nrd.shape[0], -1))).flatten(0, 1)


def head_blocks(matrix: Tensor, heads: int) -> Tensor:
    """The diagonal blocks (H, i, o) of single heads of a matrix (H·i, H·o)."""
    blocks = matrix.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))
    return torch.stack([blocks[head, :, head] for head in range(heads)])


def group_sums(blocks_H: Tensor, groups: int) -> Tensor:
    """Sum over the heads of each group: (H, …) -> (G, …)."""
    sums_G: Tensor = blocks_H.unflatten(0, (groups, -1)).sum(dim=1)
    return sums_G


def diagonal_blocks(moment_FF: Tensor, heads: int, groups: int) -> Tensor:
    """The diagonal blocks of single heads of (H·d, H·d), summed over the heads of each group: (G, d, d)."""
    return group_sums(head_blocks(moment_FF, heads), groups)
