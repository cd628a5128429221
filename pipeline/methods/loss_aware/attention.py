"""Values and the output projection: a basis for each KV head, then a rank of o. METHODS §6.3, v and o.

Legend: D hidden, H query heads, G key/value heads, d head_dim, F = H·d, r directions kept of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.schema import LossAware
from pipeline.families.family import Geometry
from pipeline.kernels.sensitivity import (
    Directions,
    diagonal_blocks,
    output_directions,
    projection_losses,
    pulled,
)
from pipeline.kernels.spectra import weighted_head_pca
from pipeline.methods.loss_aware.stacks import Stack, biases_of
from pipeline.methods.method import Form, Moment, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, steps

ROLES = ("v", "o")
VALUE, OUTPUT = "value", "output"
CONTEXT = Moment("o.in")
METRIC = Moment("mid", kind="gradient")
MOMENTS = (CONTEXT, METRIC)
BASES = 16  # ranks of the value basis that are compared at most; each takes an eigenproblem of D × D


class Basis(NamedTuple):
    """Of every KV head, (G, d, d): the leading r rows of `encode` and columns of `decode` are its basis of rank r."""

    encode: Tensor
    decode: Tensor


def points(entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics) -> list[Point]:
    """Every rank of o on each of a few ranks of the value basis."""
    output_DF = weights["o.weight"].double()
    context_FF, metric_DD = found.mean(CONTEXT)[0], found.mean(METRIC)[0]
    basis = _basis(entry, geometry, output_DF, context_FF, metric_DD)
    by_rank = projection_losses(pulled(output_DF, metric_DD), context_FF, *basis)
    options = []
    for rank in steps(geometry.head_dim, entry.rank_multiple, count=BASES):
        reduced_DF, moment_FF = _on_basis(geometry, output_DF, context_FF, basis, rank)
        stack = _stack(entry, geometry, rank)
        directions = _directions(entry, reduced_DF, moment_FF, metric_DD)
        spread_DD = reduced_DF @ moment_FF @ reduced_DF.T
        losses = projection_losses(metric_DD, spread_DD, directions.encode[None], directions.decode[None])
        dropped = 0.0 if rank == geometry.head_dim else float(by_rank[rank])
        numbers = _other_numbers(geometry, rank)
        options += [
            Point({VALUE: rank, **point.ranks}, numbers + point.numbers, dropped + point.loss, geometry.kv_heads * rank)
            for point in stack.points(losses, entry.rank_multiple)
        ]
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
    whole_basis, whole_output = rank >= geometry.head_dim, ranks[OUTPUT] >= stack.full
    if whole_basis and whole_output:
        return Solution(dict(weights), {}, {"dense": True})
    context_FF, metric_DD = found.mean(CONTEXT)[0], found.mean(METRIC)[0]
    output_DF, tensors = weights["o.weight"].double(), dict(weights)
    forms: dict[str, Form] = {}
    if not whole_basis:
        basis = _basis(entry, geometry, output_DF, context_FF, metric_DD)
        output_DF, context_FF = _on_basis(geometry, output_DF, context_FF, basis, rank)
        tensors["v.weight"] = _encoded(basis, rank, weights["v.weight"])
        if "v.bias" in weights:
            tensors["v.bias"] = _encoded(basis, rank, weights["v.bias"][:, None])[:, 0]
        tensors["o.weight"] = output_DF
        form: Form = {"form": "head_pca", "rank": rank}
        forms = dict.fromkeys(ROLES, form)
    if not whole_output:
        directions = _directions(entry, output_DF, context_FF, metric_DD)
        first_rF, second_Dr = directions.encode[: ranks[OUTPUT]] @ output_DF, directions.decode[:, : ranks[OUTPUT]]
        stored, of_output = stack.store({"o": output_DF}, first_rF, second_Dr)
        del tensors["o.weight"]
        tensors, forms = tensors | stored, forms | of_output
    return Solution(tensors | biases_of(weights, ("o",)), forms)


def _other_numbers(geometry: Geometry, rank: int) -> int:
    """Of v at a rank, and of the biases."""
    rows = geometry.kv_heads * rank
    return rows * (geometry.hidden + ("v" in geometry.biases)) + geometry.hidden * ("o" in geometry.biases)


def _basis(entry: LossAware, geometry: Geometry, output_DF: Tensor, context_FF: Tensor, metric_DD: Tensor) -> Basis:
    """METHODS §1 (context, output), with G_mid in the outputs' metric."""
    metric = metric_DD if entry.weighting == "loss" else torch.ones_like(metric_DD[0])
    heads, groups = geometry.heads, geometry.kv_heads
    gram_Gdd = diagonal_blocks(pulled(output_DF, metric), heads, groups)
    moment_Gdd = diagonal_blocks(context_FF, heads, groups)
    encode_Gdd, decode_Gdd, _, _ = weighted_head_pca(moment_Gdd, gram_Gdd, geometry.head_dim)
    return Basis(encode_Gdd, decode_Gdd)


def _on_basis(
    geometry: Geometry, output_DF: Tensor, context_FF: Tensor, basis: Basis, rank: int
) -> tuple[Tensor, Tensor]:
    """W_o and the context's moment on the leading directions of each head; themselves at the full rank."""
    if rank >= geometry.head_dim:
        return output_DF, context_FF
    heads = geometry.heads
    decode_Hdr = basis.decode[..., :rank].repeat_interleave(heads // geometry.kv_heads, dim=0)
    encode_Hdr = basis.encode[:, :rank].mT.repeat_interleave(heads // geometry.kv_heads, dim=0)
    half_FR = _by_heads(context_FF, encode_Hdr)
    return _by_heads(output_DF, decode_Hdr), _by_heads(half_FR.T.contiguous(), encode_Hdr)


def _by_heads(matrix_xF: Tensor, basis_Hdr: Tensor) -> Tensor:
    """The d columns of each head times its d × r."""
    blocks_Hxd = matrix_xF.unflatten(1, (basis_Hdr.shape[0], -1)).transpose(0, 1)
    return torch.bmm(blocks_Hxd, basis_Hdr).transpose(0, 1).flatten(1).contiguous()


def _encoded(basis: Basis, rank: int, weight: Tensor) -> Tensor:
    """(G, r, d) times the G row blocks of (G·d, …) -> (G·r, …)."""
    encode_Grd = basis.encode[:, :rank]
    return torch.bmm(encode_Grd, weight.double().unflatten(0, (encode_Grd.shape[0], -1))).flatten(0, 1)


def _directions(entry: LossAware, output_DF: Tensor, context_FF: Tensor, metric_DD: Tensor) -> Directions:
    metric = (
        metric_DD if entry.weighting == "loss" else torch.eye(metric_DD.shape[0], dtype=torch.float64).to(metric_DD)
    )
    return output_directions(output_DF, context_FF, metric)


def _stack(entry: LossAware, geometry: Geometry, rank: int) -> Stack:
    widths = {} if rank >= geometry.head_dim else {"value_rank": rank}
    inputs = geometry.heads * rank
    return Stack(OUTPUT, ("o",), geometry.hidden, inputs, geometry.bits, entry.factors == "pivoted", widths)
