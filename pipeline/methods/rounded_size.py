"""Converts `budget.bytes` of rounded weights into a number of stored numbers, from which ranks follow.

A rounded number takes the share ρ = bits / (bits of the dtype) + 1 / group of its previous size, including its part of
a scale. Norms, biases, skipped roles and tensors outside the layers keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from manifests.methods import LossAware
from manifests.quantize import OUTER_BITS, Quantize
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.packing import WORD_BITS, words_of

SHAPE_BYTES = 16  # the stored shape of a rounded matrix, two int64
MOST_BITS = 8
MATRICES = 2  # the largest number of matrices that store a role
Claimed = Collection[tuple[int, str]] | None  # layers and roles
PIVOTED, INDEX_BITS = 4, 32  # groups of a layer that may be pivoted, and the bits of an index


def rounded_share(bits: int, group: int | None, dtype_bits: int, scale: float = 1.0) -> float:
    """Return ρ for codes of `bits` bits. `scale`: the size of a scale, relative to a number of the dtype."""
    return bits / dtype_bits + (scale / group if group else 0.0)


def weight_of(manifest: Manifest, layer: LayerGeometry, roles: Sequence[str]) -> float:
    """Return f such that n numbers of these roles' matrices take at most the bytes of f n numbers of
    `numbers_of_bytes`.

    f is determined by the widest dtype of the matrices that are factored or rounded.
    """
    matrices = [role for role in roles if _is_counted(manifest, role, layer)]
    widest = max((layer.bits_of(f"{role}.weight") / layer.bits for role in matrices), default=1.0)
    quantize = manifest.quantize
    if quantize is None:
        return widest
    return rounded_share(least_bits(quantize), quantize.group, layer.bits, widest) / _share(manifest, layer.bits)


def overcounted(manifest: Manifest, layer: LayerGeometry, roles: Sequence[str], weight: float) -> float:
    """Return how far `weight` times these roles' numbers, plus their reserved numbers, exceeds their size.

    A tensor of p numbers that is neither factored nor rounded, such as a bias, takes ω p, of which `numbers_of_bytes`
    reserves (ω - 1) p. A bias that may be cut and has a smaller ω than `weight` is counted with `weight`.
    """
    excess = 0.0
    for key, (_, shape) in layer.tensors(roles).items():
        role, _, part = key.rpartition(".")
        if part == "weight" and _is_counted(manifest, role, layer):
            continue
        own = layer.bits_of(key) / layer.bits / _share(manifest, layer.bits)
        stays = part == "bias" and not (role in layer.matrices and layer.matrices[role].feeds_matrix)
        excess += math.prod(shape) * ((weight - own if stays or weight <= own else 0.0) + own - 1.0)
    return excess


def _is_counted(manifest: Manifest, role: str, layer: LayerGeometry) -> bool:
    """Return True if a role's matrix takes ρ of its size, because it is rounded or because nothing is (ρ = 1)."""
    return manifest.quantize is None or (role in layer.matrices and not manifest.quantize.skips(role))


def scope_units(geometry: Geometry, scope: str) -> float:
    """Return the source's bytes that the budget counts, in numbers of the most common dtype."""
    return 8 * geometry.scope_bytes(scope) / geometry.bits


def rounding_overhead(shapes: Sequence[tuple[int, ...]], bits: int, quantize: Quantize, dtype_bits: int) -> float:
    """Return the size of rounded matrices of these dense shapes beyond ρ of their numbers, in numbers of the dtype.

    It consists of their shapes, the padding of rows, tables of levels, and the additional scales where groups do not
    divide the columns. Without groups, each row has a scale, also those of a first factor.
    """
    extra, group = 0.0, quantize.group
    for rows, columns in shapes:
        if group is None:
            extra += rows + min(rows, columns)
        else:
            extra += rows * columns * (1.0 / math.gcd(columns, group) - 1.0 / group)
        extra += rows * (words_of(columns, bits) * WORD_BITS - columns * bits) / dtype_bits
        extra += MATRICES * (SHAPE_BYTES * 8 / dtype_bits + (2**bits if quantize.may_have_tables else 0))
    return extra


def numbers_of_bytes(manifest: Manifest, geometry: Geometry, claimed: Claimed = None) -> tuple[float, float]:
    """Return how many rounded numbers fit into the dense bytes, and how many of them are reserved.

    Reserved are the excess of unrounded tensors, of wider dtypes, and the overhead of codes. `claimed`: layers and
    roles that methods claim; None: all.
    """
    assert manifest.budget is not None
    share, total = _share(manifest, geometry.bits), scope_units(geometry, manifest.budget.scope)
    return total / share, _reserved(manifest, geometry, claimed) / share


def _reserved(manifest: Manifest, geometry: Geometry, claimed: Claimed) -> float:
    """Return the size beyond ρ times the numbers, with matrices weighted by `weight_of`, in numbers of the dtype."""
    assert manifest.budget is not None
    scope = manifest.budget.scope
    numbers, units = geometry.scope_numbers(scope), scope_units(geometry, scope)
    units += 8 * _decoded_bytes(geometry, scope, claimed) / geometry.bits
    plain, plain_units, widest = float(numbers), units, 1.0
    for layer, role, shape in _counted(manifest, geometry, claimed):
        wide = layer.bits_of(f"{role}.weight") / layer.bits
        plain, plain_units, widest = plain - math.prod(shape), plain_units - wide * math.prod(shape), max(widest, wide)
    share = _share(manifest, geometry.bits)
    return plain_units - plain + plain * (1.0 - share) + widest * _total_overhead(manifest, geometry)


def _decoded_bytes(geometry: Geometry, scope: str, claimed: Claimed) -> int:
    """Return the bytes by which decoded weights are larger than in the source. Claimed weights are decoded, and those
    in formats that OUTPUT cannot keep."""
    if claimed is None:
        return geometry.saved_bytes(scope)
    roles: dict[int, set[str]] = {}
    for layer, role in claimed:
        roles.setdefault(layer, set()).add(role)
    return sum(layer.grown_bytes(roles.get(layer.index, ())) for layer in geometry.layers)


def _counted(
    manifest: Manifest, geometry: Geometry, claimed: Claimed
) -> Iterator[tuple[LayerGeometry, str, tuple[int, ...]]]:
    """Yield layer, role and shape of each matrix whose bytes are ρ times its numbers."""
    for layer in geometry.layers:
        for role in layer.linear_roles:
            is_claimed = claimed is None or (layer.index, role) in claimed
            if is_claimed and _is_counted(manifest, role, layer):
                yield layer, role, layer.weight_shape(role)
    yield from _outer(manifest, geometry)


def _share(manifest: Manifest, dtype_bits: int) -> float:
    """Return ρ; 1 where nothing is rounded."""
    quantize = manifest.quantize
    return 1.0 if quantize is None else rounded_share(least_bits(quantize), quantize.group, dtype_bits)


def least_bits(quantize: Quantize) -> int:
    """Return the bits of the manifest, or the fewest to choose from."""
    return quantize.choices[0]


def most_by_bits(quantize: Quantize | None, dtype_bits: int) -> float:
    """Return the largest size of rounded numbers relative to their size with `least_bits`."""
    if quantize is None or quantize.bits != "auto":
        return 1.0
    least, most = (rounded_share(bits, quantize.group, dtype_bits) for bits in (least_bits(quantize), MOST_BITS))
    return most / least


def saved_outside(manifest: Manifest, geometry: Geometry) -> float:
    """Return the numbers of the dtype that rounding saves outside the layers, if the budget counts the whole model."""
    saved, quantize = 0.0, manifest.quantize
    for layer, role, shape in _outer(manifest, geometry):
        assert quantize is not None
        wide = layer.bits_of(f"{role}.weight") / layer.bits
        saved += math.prod(shape) * (wide - rounded_share(OUTER_BITS, quantize.group, layer.bits, wide))
        saved -= max(1.0, wide) * rounding_overhead([shape], OUTER_BITS, quantize, layer.bits)
    return saved


def _outer(manifest: Manifest, geometry: Geometry) -> list[tuple[LayerGeometry, str, tuple[int, ...]]]:
    """Return layer, role and shape of each rounded matrix outside the layers, if the budget counts it."""
    if manifest.quantize is None or manifest.budget is None or manifest.budget.scope != "model":
        return []
    roles = manifest.quantize.outer_roles
    return [(layer, role, shape) for layer in geometry.layers for role, _, shape in layer.outer if role in roles]


def _total_overhead(manifest: Manifest, geometry: Geometry) -> float:
    """Sum `rounding_overhead` over the model, with a bound on indices."""
    if manifest.quantize is None:
        return 0.0
    quantize, bits = manifest.quantize, least_bits(manifest.quantize)
    extra = [
        rounding_overhead(_rounded_shapes(manifest, layer), bits, quantize, geometry.bits) for layer in geometry.layers
    ]
    outside = rounding_overhead([shape for _, _, shape in _outer(manifest, geometry)], bits, quantize, geometry.bits)
    if any(isinstance(entry, LossAware) and entry.factors == "pivoted" for entry in manifest.methods):
        indices = PIVOTED * geometry.hidden * INDEX_BITS / geometry.bits  # no rank is above the hidden size
        extra = [numbers + indices for numbers in extra]
    return math.fsum((*extra, outside))


def _rounded_shapes(manifest: Manifest, layer: LayerGeometry) -> list[tuple[int, ...]]:
    return [layer.weight_shape(role) for role in layer.linear_roles if _is_counted(manifest, role, layer)]
