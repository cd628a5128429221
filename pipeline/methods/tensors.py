"""Tensors that several methods store in the same way: biases, values in another basis, channels, factors of a weight.

Legend: G key/value heads, d head_dim, r rank, m outputs, D inputs, N channels, k of them kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.kernels.heads import encode_heads
from pipeline.kernels.lowrank import InputRoots, low_rank
from pipeline.kernels.spectra import dropped_share, spectrum
from pipeline.methods.method import Solution


def biases_of(weights: Mapping[str, Tensor], matrices: Iterable[Matrix]) -> dict[str, Tensor]:
    """Return the biases of some matrices, float64."""
    return {matrix.bias_key: weights[matrix.bias_key].double() for matrix in matrices if matrix.bias}


def encoded_values(weights: Mapping[str, Tensor], value: Matrix, encode_Grd: Tensor) -> dict[str, Tensor]:
    """Return the weight and the bias of the values after an encoder of each head, E W_v and E b_v."""
    tensors = {value.weight_key: encode_heads(encode_Grd, weights[value.weight_key])}
    if value.bias:
        tensors[value.bias_key] = encode_heads(encode_Grd, weights[value.bias_key][:, None])[:, 0]
    return tensors


def kept_channels(
    weights: Mapping[str, Tensor], block: MLPBlock, kept_k: Tensor, written_Dk: Tensor
) -> dict[str, Tensor]:
    """Return the tensors of an MLP on its kept channels (k,). `written_Dk`: the new weight of its writer."""
    whole = (block.writer.weight_key, block.writer.bias_key)
    kept = {key: tensor if key in whole else tensor[kept_k] for key, tensor in weights.items()}
    return {**kept, block.writer.weight_key: written_Dk}


def factors_of(role: str, weight_mD: Tensor, rank: int, roots: InputRoots | None) -> Solution:
    """Return the factors first (r, D) and second (m, r) of a weight, with its error and spectrum, without forms."""
    first_rD, second_mr, values = low_rank(weight_mD, rank, roots, balanced=True)
    energies = values.square()
    report = {f"{role}_error": dropped_share(energies, rank), f"{role}_spectrum": spectrum(energies)}
    return Solution({f"{role}.first.weight": first_rD, f"{role}.second.weight": second_mr}, {}, report)


def channel_priority(eliminated_n: Tensor, channels: int) -> Tensor:
    """Return all channels (N,): first the kept ones, ascending, then the eliminated ones, the last eliminated first."""
    kept_N = torch.ones(channels, dtype=torch.bool, device=eliminated_n.device)
    return torch.cat((kept_N.index_fill_(0, eliminated_n, False).nonzero()[:, 0], eliminated_n.flip(0)))
