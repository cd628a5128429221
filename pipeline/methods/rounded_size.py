"""Bytes of numbers that are rounded: between `budget.bytes` and the share of numbers that ranks follow.

A rounded number of a matrix takes ρ = bits / (bits of the dtype) + 1 / group of what it took before, its share of a
scale counted; norms, biases, skipped roles and what lies outside the layers take all of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from manifests.methods import LossAware
from manifests.quantize import OUTER_BITS, Quantize
from manifests.schema import Manifest
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.kernels.packing import WORD_BITS, words_of

SHAPE_BYTES = 16  # of each rounded matrix, two int64
LEAST_BITS, MOST_BITS = 3, 8
MATRICES = 2  # that a role is stored as, at most
Claimed = Collection[tuple[int, str]] | None  # layers and roles
PIVOTED, INDEX_BITS = 4, 32  # groups of a layer that may be pivoted, and bits of an index of theirs


def scope_numbers(geometry: Geometry, scope: str) -> int:
    """Stored numbers of the dense model that the budget's share is of."""
    return geometry.model_numbers() if scope == "model" else geometry.decoder_numbers()


def rounded_share(bits: int, group: int | None, dtype_bits: int, scale: float = 1.0) -> float:
    """ρ for codes of `bits` bits. `scale`: what a scale takes, in numbers of the dtype."""
    return bits / dtype_bits + (scale / group if group else 0.0)


def weight_of(manifest: Manifest, layer: LayerGeometry, roles: Sequence[str]) -> float:
    """f: n numbers of the matrices of these roles take what f n of those that `numbers_of_bytes` counts do, or less.

    It is of the widest matrix that ranks or codes make smaller.
    """
    matrices = [role for role in roles if _is_counted(manifest, role, layer)]
    widest = max((layer.bits_of(f"{role}.weight") / layer.bits for role in matrices), default=1.0)
    quantize = manifest.quantize
    if quantize is None:
        return widest
    return rounded_share(least_bits(quantize), quantize.group, layer.bits, widest) / _share(manifest, layer.bits)


def overcounted(manifest: Manifest, layer: LayerGeometry, roles: Sequence[str], weight: float) -> float:
    """Numbers by which `weight` n, n with all that these roles store, and their part of what `numbers_of_bytes` says is
    taken are more than what they take at any rank.

    A tensor of p numbers that is neither factored nor rounded, as a bias, takes ω p, and (ω - 1) p of that is in what
    is taken. Where a bias may be cut and weighs less than the matrices, it counts as they do.
    """
    found = 0.0
    for key, (_, shape) in layer.tensors(roles).items():
        role, _, part = key.partition(".")
        if part == "weight" and _is_counted(manifest, role, layer):
            continue
        own = layer.bits_of(key) / layer.bits / _share(manifest, layer.bits)
        stays = part == "bias" and not (role in layer.matrices and layer.matrices[role].feeds_matrix)
        found += math.prod(shape) * ((weight - own if stays or weight <= own else 0.0) + own - 1.0)
    return found


def _is_counted(manifest: Manifest, role: str, layer: LayerGeometry) -> bool:
    """Tell whether bytes of a role's matrix follow from its numbers at ρ: it is rounded, where anything is."""
    return manifest.quantize is None or (role in layer.matrices and role not in manifest.quantize.skip)


def scope_units(geometry: Geometry, scope: str) -> float:
    """The dense bytes that the budget's share is of, in numbers of the dtype that most are stored in."""
    return 8 * (geometry.model_bytes() if scope == "model" else geometry.decoder_bytes()) / geometry.bits


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


def numbers_of_bytes(manifest: Manifest, geometry: Geometry, claimed: Claimed = None) -> tuple[float, float]:
    """How many numbers all of the dense bytes would hold once they are rounded, and how many of these are taken by what
    keeps the dtype, beyond its own, by what is stored in a wider one, and by what lies beside codes.

    `claimed`: layers and roles that methods claim; None: all.
    """
    assert manifest.budget is not None
    share, total = _share(manifest, geometry.bits), scope_units(geometry, manifest.budget.scope)
    return total / share, _taken(manifest, geometry, claimed) / share


def _taken(manifest: Manifest, geometry: Geometry, claimed: Claimed) -> float:
    """What is stored beyond ρ of the numbers, matrices as `weight_of` weighs them, in numbers of the dtype."""
    assert manifest.budget is not None
    numbers, units = (count(geometry, manifest.budget.scope) for count in (scope_numbers, scope_units))
    plain, plain_units, widest = float(numbers), units, 1.0
    for layer, role, shape in _counted(manifest, geometry, claimed):
        wide = layer.bits_of(f"{role}.weight") / layer.bits
        plain, plain_units, widest = plain - math.prod(shape), plain_units - wide * math.prod(shape), max(widest, wide)
    share = _share(manifest, geometry.bits)
    return plain_units - plain + plain * (1.0 - share) + widest * _beside(manifest, geometry)


def _counted(
    manifest: Manifest, geometry: Geometry, claimed: Claimed
) -> Iterator[tuple[LayerGeometry, str, tuple[int, ...]]]:
    """Layer, role and shape of each matrix whose bytes follow from its numbers."""
    for layer in geometry.layers:
        for role in layer.linear_roles:
            is_claimed = claimed is None or (layer.index, role) in claimed
            if is_claimed and _is_counted(manifest, role, layer):
                yield layer, role, layer.weight_shape(role)
    yield from _outer(manifest, geometry)


def _share(manifest: Manifest, dtype_bits: int) -> float:
    """ρ; 1 where nothing is rounded."""
    quantize = manifest.quantize
    return 1.0 if quantize is None else rounded_share(least_bits(quantize), quantize.group, dtype_bits)


def least_bits(quantize: Quantize) -> int:
    """Those asked for, or the fewest to choose from."""
    return LEAST_BITS if quantize.bits == "auto" else quantize.bits


def most_by_bits(quantize: Quantize | None, dtype_bits: int) -> float:
    """How many times as much what is rounded may take as with `least_bits`."""
    if quantize is None or quantize.bits != "auto":
        return 1.0
    least, most = (rounded_share(bits, quantize.group, dtype_bits) for bits in (LEAST_BITS, MOST_BITS))
    return most / least


def saved_outside(manifest: Manifest, geometry: Geometry) -> float:
    """Numbers of the dtype that rounding saves outside of the layers, where the budget is of the whole model and bits
    are chosen inside of them."""
    saved, quantize = 0.0, manifest.quantize
    for layer, role, shape in _outer(manifest, geometry):
        assert quantize is not None
        wide = layer.bits_of(f"{role}.weight") / layer.bits
        saved += math.prod(shape) * (wide - rounded_share(OUTER_BITS, quantize.group, layer.bits, wide))
        saved -= max(1.0, wide) * beside([shape], OUTER_BITS, quantize.group, layer.bits)
    return saved


def _outer(manifest: Manifest, geometry: Geometry) -> list[tuple[LayerGeometry, str, tuple[int, ...]]]:
    """Of what is rounded outside of the layers, where that is in scope: the layer that it goes with, role and shape."""
    if manifest.quantize is None or manifest.budget is None or manifest.budget.scope != "model":
        return []
    roles = manifest.quantize.outer_roles
    return [(layer, role, shape) for layer in geometry.layers for role, _, shape in layer.outer if role in roles]


def _beside(manifest: Manifest, geometry: Geometry) -> float:
    """As `beside`, of all layers, and indices at most."""
    if manifest.quantize is None:
        return 0.0
    bits, group = least_bits(manifest.quantize), manifest.quantize.group
    extra = [beside(_rounded_shapes(manifest, layer), bits, group, geometry.bits) for layer in geometry.layers]
    outside = beside([shape for _, _, shape in _outer(manifest, geometry)], bits, group, geometry.bits)
    if any(isinstance(entry, LossAware) and entry.factors == "pivoted" for entry in manifest.methods):
        indices = PIVOTED * geometry.hidden * INDEX_BITS / geometry.bits  # no rank is above the hidden size
        extra = [numbers + indices for numbers in extra]
    return math.fsum((*extra, outside))


def _rounded_shapes(manifest: Manifest, layer: LayerGeometry) -> list[tuple[int, ...]]:
    skip = manifest.quantize.skip if manifest.quantize else ()
    return [layer.weight_shape(role) for role in layer.linear_roles if role not in skip]
