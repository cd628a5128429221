"""Bytes of numbers that are rounded: between `budget.bytes` and the share of numbers that ranks follow.

A rounded number of a matrix takes ρ = bits / (bits of the dtype) + 1 / group of what it took before, its share of a
scale counted; norms, biases, skipped roles and what lies outside the layers take all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from manifests.methods import LossAware
from manifests.quantize import OUTER_BITS, QUANTIZED_ROLES, Quantize
from manifests.schema import Manifest
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.kernels.packing import WORD_BITS, words_of

SHAPE_BYTES = 16  # of each rounded matrix, two int64
LEAST_BITS, MOST_BITS = 3, 8
MATRICES = 2  # that a role is stored as, at most
PIVOTED, INDEX_BITS = 4, 32  # groups of a layer that may be pivoted, and bits of an index of theirs


def scope_numbers(geometry: Geometry, scope: str) -> int:
    """Stored numbers of the dense model that the budget's share is of."""
    return geometry.model_numbers() if scope == "model" else geometry.decoder_numbers()


def rounded_share(bits: int, group: int | None, dtype_bits: int) -> float:
    """ρ for codes of `bits` bits."""
    return bits / dtype_bits + (1.0 / group if group else 0.0)


def beside(shapes: Sequence[tuple[int, ...]], bits: int, group: int | None, dtype_bits: int) -> float:
    """What rounded matrices of these dense shapes store beyond ρ of their numbers, in numbers of the dtype: their
    shapes, the ends of rows, and more scales where `group` does not divide the columns, or is none: then one for each
    row, of a first factor's, too."""
    extra = 0.0
    for rows, columns in shapes:
        if group is None:
            extra += rows + min(rows, columns)
        else:
            extra += rows * columns * (1.0 / math.gcd(columns, group) - 1.0 / group)
        extra += rows * (words_of(columns, bits) * WORD_BITS - columns * bits) / dtype_bits
        extra += MATRICES * SHAPE_BYTES * 8 / dtype_bits
    return extra


def numbers_of_bytes(manifest: Manifest, geometry: Geometry) -> tuple[float, float]:
    """How many numbers all of the dense bytes would hold once they are rounded, and how many of these are taken by what
    keeps the dtype, beyond its own, and by what lies beside codes."""
    assert manifest.budget is not None
    share, total = _share(manifest, geometry), scope_numbers(geometry, manifest.budget.scope)
    taken = _unrounded(manifest, geometry, total) * (1.0 - share) + _beside(manifest, geometry)
    return total / share, taken / share


def _share(manifest: Manifest, geometry: Geometry) -> float:
    """ρ; 1 where nothing is rounded."""
    quantize = manifest.quantize
    return 1.0 if quantize is None else rounded_share(least_bits(quantize), quantize.group, geometry.bits)


def least_bits(quantize: Quantize) -> int:
    """Those asked for, or the fewest to choose from."""
    return LEAST_BITS if quantize.bits == "auto" else quantize.bits


def most_by_bits(quantize: Quantize | None, dtype_bits: int) -> float:
    """How many times as much what is rounded may take as with `least_bits`."""
    if quantize is None or quantize.bits != "auto":
        return 1.0
    least, most = (rounded_share(bits, quantize.group, dtype_bits) for bits in (LEAST_BITS, MOST_BITS))
    return most / least


def _unrounded(manifest: Manifest, geometry: Geometry, total: int) -> int:
    """Numbers in scope that keep the dtype."""
    if manifest.quantize is None:
        return total
    rounded = [shape for layer in geometry.layers for shape in _rounded_shapes(manifest, layer)]
    return total - sum(math.prod(shape) for shape in (*rounded, *_outer_shapes(manifest, geometry)))


def saved_outside(manifest: Manifest, geometry: Geometry) -> float:
    """Numbers of the dtype that rounding saves outside of the layers, where the budget is of the whole model and bits
    are chosen inside of them."""
    if (shapes := _outer_shapes(manifest, geometry)) == [] or manifest.quantize is None:
        return 0.0
    group, bits = manifest.quantize.group, geometry.bits
    share = 1.0 - rounded_share(OUTER_BITS, group, bits)
    return sum(map(math.prod, shapes)) * share - beside(shapes, OUTER_BITS, group, bits)


def _outer_shapes(manifest: Manifest, geometry: Geometry) -> list[tuple[int, ...]]:
    """Of what is rounded outside of the layers, where that is in scope."""
    if manifest.quantize is None or manifest.budget is None or manifest.budget.scope != "model":
        return []
    roles = manifest.quantize.outer_roles
    return [shape for layer in geometry.layers for role, _, shape in layer.outer if role in roles]


def _beside(manifest: Manifest, geometry: Geometry) -> float:
    """As `beside`, of all layers, and indices at most."""
    if manifest.quantize is None:
        return 0.0
    bits, group = least_bits(manifest.quantize), manifest.quantize.group
    extra = [beside(_rounded_shapes(manifest, layer), bits, group, geometry.bits) for layer in geometry.layers]
    outside = beside(_outer_shapes(manifest, geometry), bits, group, geometry.bits)
    if any(isinstance(entry, LossAware) and entry.factors == "pivoted" for entry in manifest.methods):
        indices = PIVOTED * geometry.hidden * INDEX_BITS / geometry.bits  # no rank is above the hidden size
        extra = [numbers + indices for numbers in extra]
    return math.fsum((*extra, outside))


def _rounded_shapes(manifest: Manifest, layer: LayerGeometry) -> list[tuple[int, ...]]:
    skip = manifest.quantize.skip if manifest.quantize else ()
    return [layer.weight_shape(role) for role in layer.roles if role in QUANTIZED_ROLES and role not in skip]
