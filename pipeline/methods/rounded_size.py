"""Converts `budget.bytes` of rounded weights into a number of stored numbers, from which ranks follow.

A rounded number takes the share ρ = bits / (bits of the dtype) + 1 / group of its previous size, including its part of
a scale. Norms, biases, skipped roles and tensors outside the layers keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RoundedSizes:
    """The stored sizes of a model whose matrices a manifest rounds, in numbers of the most common dtype."""

    manifest: Manifest
    geometry: Geometry

    @property
    def scope(self) -> str:
        """Return the scope of the budget."""
        assert self.manifest.budget is not None
        return self.manifest.budget.scope

    @property
    def share(self) -> float:
        """Return ρ for the bits of the manifest, or the fewest to choose from; 1 where nothing is rounded."""
        quantize = self.manifest.quantize
        return 1.0 if quantize is None else rounded_share(quantize.choices[0], quantize.group, self.geometry.bits)

    @property
    def units(self) -> float:
        """Return the source's bytes that the budget counts."""
        return 8 * self.geometry.scope_bytes(self.scope) / self.geometry.bits

    @property
    def whole(self) -> float:
        """Return how many rounded numbers fit into the dense bytes."""
        return self.units / self.share

    def reserved(self, claimed: Claimed = None) -> float:
        """Return how many of the `whole` are reserved: the excess of unrounded tensors, of wider dtypes, and the
        overhead of codes.

        `claimed`: layers and roles that methods claim; None: all.
        """
        numbers = self.geometry.scope_numbers(self.scope)
        units = self.units + 8 * self._decoded_bytes(claimed) / self.geometry.bits
        plain, plain_units, widest = float(numbers), units, 1.0
        for layer, role, shape in self._counted(claimed):
            wide = layer.bits_of(f"{role}.weight") / layer.bits
            plain, plain_units = plain - math.prod(shape), plain_units - wide * math.prod(shape)
            widest = max(widest, wide)
        excess = plain_units - plain + plain * (1.0 - self.share) + widest * self._overhead()
        return excess / self.share

    @property
    def most_by_bits(self) -> float:
        """Return the largest size of rounded numbers relative to their size with the fewest bits."""
        quantize = self.manifest.quantize
        if quantize is None or quantize.bits != "auto":
            return 1.0
        return rounded_share(MOST_BITS, quantize.group, self.geometry.bits) / self.share

    @property
    def saved_outside(self) -> float:
        """Return the numbers that rounding saves outside the layers, if the budget counts the whole model."""
        saved, quantize = 0.0, self.manifest.quantize
        for layer, role, shape in self._outer():
            assert quantize is not None
            wide = layer.bits_of(f"{role}.weight") / layer.bits
            saved += math.prod(shape) * (wide - rounded_share(OUTER_BITS, quantize.group, layer.bits, wide))
            saved -= max(1.0, wide) * rounding_overhead([shape], OUTER_BITS, quantize, layer.bits)
        return saved

    def weight_of(self, layer: LayerGeometry, roles: Sequence[str]) -> float:
        """Return f such that n numbers of these roles' matrices take at most the bytes of f n numbers of `whole`.

        f is determined by the widest dtype of the matrices that are factored or rounded.
        """
        matrices = [role for role in roles if self._is_counted(layer, role)]
        widest = max((layer.bits_of(f"{role}.weight") / layer.bits for role in matrices), default=1.0)
        quantize = self.manifest.quantize
        if quantize is None:
            return widest
        return rounded_share(quantize.choices[0], quantize.group, layer.bits, widest) / self.share

    def overcounted(self, layer: LayerGeometry, roles: Sequence[str], weight: float) -> float:
        """Return how far `weight` times these roles' numbers, plus their reserved numbers, exceeds their size.

        A tensor of p numbers that is neither factored nor rounded, such as a bias, takes ω p, of which `reserved` has
        (ω - 1) p. A bias that may be cut and has a smaller ω than `weight` is counted with `weight`.
        """
        excess = 0.0
        for key, (_, shape) in layer.tensors(roles).items():
            role, _, part = key.rpartition(".")
            if part == "weight" and self._is_counted(layer, role):
                continue
            own = layer.bits_of(key) / layer.bits / self.share
            stays = part == "bias" and not (role in layer.matrices and layer.matrices[role].feeds_matrix)
            excess += math.prod(shape) * ((weight - own if stays or weight <= own else 0.0) + own - 1.0)
        return excess

    def _is_counted(self, layer: LayerGeometry, role: str) -> bool:
        """Return True if a role's matrix takes ρ of its size, because it is rounded or because nothing is (ρ = 1)."""
        quantize = self.manifest.quantize
        return quantize is None or (role in layer.matrices and not quantize.skips(role))

    def _decoded_bytes(self, claimed: Claimed) -> int:
        """Return the bytes by which decoded weights are larger than in the source. Claimed weights are decoded, and
        those in formats that OUTPUT cannot keep."""
        if claimed is None:
            return self.geometry.saved_bytes(self.scope)
        roles: dict[int, set[str]] = {}
        for layer, role in claimed:
            roles.setdefault(layer, set()).add(role)
        return sum(layer.grown_bytes(roles.get(layer.index, ())) for layer in self.geometry.layers)

    def _counted(self, claimed: Claimed) -> Iterator[tuple[LayerGeometry, str, tuple[int, ...]]]:
        """Yield layer, role and shape of each matrix whose bytes are ρ times its numbers."""
        for layer in self.geometry.layers:
            for role in layer.linear_roles:
                if (claimed is None or (layer.index, role) in claimed) and self._is_counted(layer, role):
                    yield layer, role, layer.weight_shape(role)
        yield from self._outer()

    def _outer(self) -> list[tuple[LayerGeometry, str, tuple[int, ...]]]:
        """Return layer, role and shape of each rounded matrix outside the layers, if the budget counts it."""
        if self.manifest.quantize is None or self.manifest.budget is None or self.scope != "model":
            return []
        roles, layers = self.manifest.quantize.outer_roles, self.geometry.layers
        return [(layer, role, shape) for layer in layers for role, _, shape in layer.outer if role in roles]

    def _overhead(self) -> float:
        """Sum `rounding_overhead` over the model, with a bound on indices."""
        quantize, bits = self.manifest.quantize, self.geometry.bits
        if quantize is None:
            return 0.0
        shapes = [
            [layer.weight_shape(role) for role in layer.linear_roles if self._is_counted(layer, role)]
            for layer in self.geometry.layers
        ]
        extra = [rounding_overhead(each, quantize.choices[0], quantize, bits) for each in shapes]
        outside = rounding_overhead([shape for _, _, shape in self._outer()], quantize.choices[0], quantize, bits)
        if any(isinstance(entry, LossAware) and entry.factors == "pivoted" for entry in self.manifest.methods):
            indices = PIVOTED * self.geometry.hidden * INDEX_BITS / bits  # no rank is above the hidden size
            extra = [numbers + indices for numbers in extra]
        return math.fsum((*extra, outside))
