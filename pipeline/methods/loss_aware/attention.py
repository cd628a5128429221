"""Values and the output projection: a basis for each KV head, o fitted again behind it, then a rank of o.

METHODS §6.3, v and o. Legend: D hidden, H query heads, G key/value heads, d head_dim, F = H·d, r directions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.schema import LossAware
from pipeline.families.family import Geometry
from pipeline.kernels.sensitivity import (
    Directions,
    change_loss,
    diagonal_blocks,
    output_directions,
    projection_losses,
    pulled,
    pushed,
)
from pipeline.kernels.spectra import weighted_head_pca
from pipeline.kernels.value_output import fit_value_output
from pipeline.methods.loss_aware.stacks import Stack, biases_of
from pipeline.methods.method import Form, Moment, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, steps

ROLES = ("v", "o")
VALUE, OUTPUT = "value", "output"
CONTEXT = Moment("o.in")
METRIC = Moment("mid", kind="gradient")
MOMENTS = (CONTEXT, METRIC)
BASES = 16  # ranks of the value basis that are compared at most; each takes an eigenproblem of D × D
TURNS = 4  # of encoder and refit


class Reduced(NamedTuple):
    """What a basis of r directions leaves: `encode` (G, r, d), o (D, R) behind it, R = H·r or F, and what it reads.

    `encode` is None where every direction stays.
    """

    encode: Tensor | None
    output: Tensor
    moment: Tensor


def points(entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics) -> list[Point]:
    """Every rank of o on each of a few ranks of the value basis."""
    solver = _Solver(entry, geometry, weights, found)
    options = []
    for rank in steps(geometry.head_dim, entry.rank_multiple, count=BASES):
        reduced = solver.reduced(rank)
        dropped, numbers = solver.basis_loss(reduced), _other_numbers(geometry, rank)
        for point in _stack(entry, geometry, rank).points(solver.rank_losses(reduced), entry.rank_multiple):
            ranks = {VALUE: rank, **point.ranks}
            options.append(Point(ranks, numbers + point.numbers, dropped + point.loss, geometry.kv_heads * rank))
    return options


def least_numbers(entry: LossAware, geometry: Geometry) -> int:
    """Stored at the smallest ranks."""
    rank = min(entry.rank_multiple, geometry.head_dim)
    return _stack(entry, geometry, rank).least(entry.rank_multiple) + _other_numbers(geometry, rank)


def solve(
    entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics, ranks: Ranks
) -> Solution:
    """v and o on the basis of rank `value`; then o at rank `output`."""
    rank, stack = ranks[VALUE], _stack(entry, geometry, ranks[VALUE])
    whole_output = ranks[OUTPUT] >= stack.full
    if rank >= geometry.head_dim and whole_output:
        return Solution(dict(weights), {}, {"dense": True})
    solver = _Solver(entry, geometry, weights, found)
    reduced = solver.reduced(rank)
    tensors, forms = dict(weights) | biases_of(weights, ROLES), dict[str, Form]()
    if reduced.encode is not None:
        tensors["v.weight"] = _encoded(reduced.encode, weights["v.weight"])
        if "v.bias" in weights:
            tensors["v.bias"] = _encoded(reduced.encode, weights["v.bias"][:, None])[:, 0]
        form: Form = {"form": "head_pca", "rank": rank}
        forms = dict.fromkeys(ROLES, form)
    tensors["o.weight"] = reduced.output
    if not whole_output:
        directions = solver.directions(reduced)
        first_rR, second_Dr = directions.encode[: ranks[OUTPUT]] @ reduced.output, directions.decode[:, : ranks[OUTPUT]]
        stored, of_output = stack.store({"o": reduced.output}, first_rR, second_Dr)
        del tensors["o.weight"]
        tensors, forms = tensors | stored, forms | of_output
    return Solution(tensors, forms)


class _Solver:
    """What curve and solution of one layer's values share."""

    def __init__(self, entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics) -> None:
        self.geometry = geometry
        self.output_DF = weights["o.weight"].double()
        self.context_FF, self.metric_DD = found.mean(CONTEXT)[0], found.mean(METRIC)[0]
        even_DD = torch.eye(len(self.metric_DD)).to(self.metric_DD)
        self.solved_DD = self.metric_DD if entry.weighting == "loss" else even_DD

    @cached_property
    def basis(self) -> Tensor:
        """(G, d, d): where the search starts. METHODS §1 (context, output), by the metric solved in."""
        heads, groups = self.geometry.heads, self.geometry.kv_heads
        gram_Gdd = diagonal_blocks(pulled(self.output_DF, self.solved_DD), heads, groups)
        moment_Gdd = diagonal_blocks(self.context_FF, heads, groups)
        return weighted_head_pca(moment_Gdd, gram_Gdd, self.geometry.head_dim)[0]

    def reduced(self, rank: int) -> Reduced:
        """v and o at a rank of the value basis."""
        if rank >= self.geometry.head_dim:
            return Reduced(None, self.output_DF, self.context_FF)
        fitted = fit_value_output(self.output_DF, self.solved_DD, self.context_FF, self.basis[:, :rank], TURNS)
        basis_Hdr = self._of_heads(fitted.encode.mT)
        half_FR = _by_heads(self.context_FF, basis_Hdr)
        return Reduced(fitted.encode, fitted.output, _by_heads(half_FR.T.contiguous(), basis_Hdr))

    def basis_loss(self, reduced: Reduced) -> float:
        """Predicted loss of the basis, o whole."""
        if reduced.encode is None:
            return 0.0
        kept_DF = _by_heads(reduced.output, self._of_heads(reduced.encode))
        return max(0.0, change_loss(self.output_DF - kept_DF, self.context_FF, self.metric_DD))

    def rank_losses(self, reduced: Reduced) -> Tensor:
        """Predicted loss by rank of o; nothing of it is correlated with what the basis lost, as o was fitted to it."""
        found, spread_DD = self.directions(reduced), pushed(reduced.output, reduced.moment)
        return projection_losses(self.metric_DD, spread_DD, found.encode[None], found.decode[None])

    def directions(self, reduced: Reduced) -> Directions:
        """Of the outputs of o."""
        return output_directions(reduced.output, reduced.moment, self.solved_DD)

    def _of_heads(self, basis_G: Tensor) -> Tensor:
        return basis_G.repeat_interleave(self.geometry.heads // self.geometry.kv_heads, dim=0)


def _other_numbers(geometry: Geometry, rank: int) -> int:
    """Of v at a rank, and of the biases."""
    rows = geometry.kv_heads * rank
    return rows * (geometry.hidden + ("v" in geometry.biases)) + geometry.hidden * ("o" in geometry.biases)


def _by_heads(matrix_xI: Tensor, basis_Hio: Tensor) -> Tensor:
    """The i columns of each head times its i × o."""
    blocks_Hxi = matrix_xI.unflatten(1, (basis_Hio.shape[0], -1)).transpose(0, 1)
    return torch.bmm(blocks_Hxi, basis_Hio).transpose(0, 1).flatten(1).contiguous()


def _encoded(encode_Grd: Tensor, weight: Tensor) -> Tensor:
    """(G, r, d) times the G row blocks of (G·d, …) -> (G·r, …)."""
    return torch.bmm(encode_Grd, weight.double().unflatten(0, (encode_Grd.shape[0], -1))).flatten(0, 1)


def _stack(entry: LossAware, geometry: Geometry, rank: int) -> Stack:
    widths = {} if rank >= geometry.head_dim else {"value_rank": rank}
    inputs = geometry.heads * rank
    return Stack(OUTPUT, ("o",), geometry.hidden, inputs, geometry.bits, entry.factors == "pivoted", widths)
