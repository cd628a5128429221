"""Bytes of numbers that are rounded: between `budget.bytes` and the share of numbers that ranks follow.

A rounded number of a matrix takes ρ = bits / (bits of the dtype) + 1 / group of what it took before, its share of a
scale counted; norms, biases, skipped roles and what lies outside the layers take all of it.
"""

from __future__ import annotations

import math

from manifests.methods import LossAware
from manifests.quantize import QUANTIZED_ROLES
from manifests.schema import Manifest
from pipeline.families.family import Geometry
from pipeline.kernels.packing import WORD_BITS, words_of

SHAPE_BYTES = 16  # of each rounded matrix, two int64
MATRICES = 2  # that a role is stored as, at most
PIVOTED, INDEX_BITS = 4, 32  # groups of a layer that may be pivoted, and bits of an index of theirs


def scope_numbers(geometry: Geometry, scope: str) -> int:
    """Stored numbers of the dense model that the budget's share is of."""
    return geometry.model_numbers() if scope == "model" else geometry.num_layers * geometry.layer_numbers()


def rounded_share(manifest: Manifest, geometry: Geometry) -> float:
    """ρ; 1 where nothing is rounded."""
    quantize = manifest.quantize
    if quantize is None:
        return 1.0
    return quantize.bits / geometry.bits + (1.0 / quantize.group if quantize.group else 0.0)


def keep_of_bytes(manifest: Manifest, geometry: Geometry) -> float:
    """The share of numbers, at most 1, that takes no more than `budget.bytes` of the bytes once it is rounded."""
    assert manifest.budget is not None
    assert manifest.budget.bytes is not None
    share, total = rounded_share(manifest, geometry), scope_numbers(geometry, manifest.budget.scope)
    left = manifest.budget.bytes * total - _unrounded(manifest, geometry, total) * (1.0 - share)
    return min(1.0, max(0.0, left - _beside(manifest, geometry)) / share / total)


def bytes_of_keep(manifest: Manifest, geometry: Geometry, keep: float) -> float:
    """The share of bytes that a share of numbers takes."""
    assert manifest.budget is not None
    share, total = rounded_share(manifest, geometry), scope_numbers(geometry, manifest.budget.scope)
    unrounded = _unrounded(manifest, geometry, total) * (1.0 - share)
    return keep * share + (unrounded + _beside(manifest, geometry)) / total


def _unrounded(manifest: Manifest, geometry: Geometry, total: int) -> int:
    """Numbers in scope that keep the dtype."""
    if manifest.quantize is None:
        return total
    rounded = sum(math.prod(geometry.weight_shape(role)) for role in _rounded_roles(manifest, geometry))
    return total - geometry.num_layers * rounded


def _beside(manifest: Manifest, geometry: Geometry) -> float:
    """Shapes, indices at most, ends of rows, and scales where groups are smaller, in numbers of the dtype."""
    if manifest.quantize is None or manifest.quantize.group is None:
        return 0.0
    extra, group = 0.0, manifest.quantize.group
    for role in _rounded_roles(manifest, geometry):
        rows, columns = geometry.weight_shape(role)
        extra += rows * columns * (1.0 / math.gcd(columns, group) - 1.0 / group)
        extra += rows * (words_of(columns, manifest.quantize.bits) * WORD_BITS / geometry.bits)
        extra -= rows * columns * manifest.quantize.bits / geometry.bits
        extra += MATRICES * SHAPE_BYTES * 8 / geometry.bits
    if any(isinstance(entry, LossAware) and entry.factors == "pivoted" for entry in manifest.methods):
        extra += PIVOTED * geometry.hidden * INDEX_BITS / geometry.bits  # no rank is above the hidden size
    return geometry.num_layers * extra


def _rounded_roles(manifest: Manifest, geometry: Geometry) -> list[str]:
    skip = manifest.quantize.skip if manifest.quantize else ()
    return [role for role in geometry.roles if role in QUANTIZED_ROLES and role not in skip]
