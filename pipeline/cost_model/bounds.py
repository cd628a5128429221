"""The most that a checkpoint can store, where the ranks follow what is not computed yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manifests.quantize import OUTER_BITS, OUTER_ROLES, QUANTIZED_ROLES, Quantize
from manifests.schema import Manifest
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.method import Task
from pipeline.methods.registry import build_methods, saved_numbers
from pipeline.methods.rounded_size import beside, scope_numbers

MOST_BITS = 8  # where bits are chosen


@dataclass(frozen=True)
class Size:
    """What a checkpoint stores: numbers, before they are rounded, and bytes."""

    numbers: int
    num_bytes: int


def size_bound(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task], source_bytes: int) -> Size:
    """No checkpoint of the manifest stores more. `source_bytes`: with tensors that no layer asks for, which are
    copied."""
    numbers = _most_numbers(manifest, geometry)
    beyond = max(0, source_bytes - geometry.model_bytes())
    if bounded_by(manifest) == "budget.bytes":
        assert manifest.budget is not None
        scope = geometry.model_bytes() if manifest.budget.scope == "model" else geometry.decoder_bytes()
        return Size(numbers, beyond + geometry.model_bytes() - math.floor((1 - manifest.budget.share) * scope))
    return Size(numbers, beyond + _most_bytes(manifest, geometry, tasks, numbers))


def bounded_by(manifest: Manifest) -> str:
    """The field of the manifest that bounds what is stored."""
    budget = manifest.budget
    fields = () if budget is None or _all_own(manifest) else ("keep", "bytes", "max_loss")
    return next((f"budget.{name}" for name in fields if getattr(budget, name) is not None), "methods")


def _all_own(manifest: Manifest) -> bool:
    """Whether every entry has a size of its own, so that the budget is nobody's."""
    return all(method.fixed_ranks or method.keep is not None for method in build_methods(manifest))


def _most_numbers(manifest: Manifest, geometry: Geometry) -> int:
    dense = geometry.model_numbers()
    if manifest.budget is None or _all_own(manifest):
        return dense - saved_numbers(build_methods(manifest), geometry)
    return dense - round((1 - manifest.budget.share) * scope_numbers(geometry, manifest.budget.scope))


@dataclass(frozen=True)
class _Claimed:
    """A task's matrices and vectors: how many numbers, the bits of a number of the widest matrix as it is stored, and
    the bits that vectors and what lies beside codes take besides."""

    numbers: int
    bits: float
    beside: float


def _most_bytes(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task], numbers: int) -> int:
    """Of so many numbers: as if those of the widest dtypes had stayed."""
    claimed = sorted(_claimed(manifest.quantize, geometry, tasks), key=lambda each: -each.bits)
    dense = sum(each.numbers for each in claimed)
    dense_bytes = sum(geometry.layers[layer].num_bytes(roles) for layer, roles in _claims(tasks))
    left, bits = numbers - (geometry.model_numbers() - dense), 0.0
    for each in claimed:
        stays = min(left, each.numbers)
        bits += stays * each.bits + each.beside
        left -= stays
    bits += left * max((each.bits for each in claimed), default=0.0)  # numbers that factors have beyond the dense ones
    return geometry.model_bytes() - dense_bytes + math.ceil(bits / 8)


def _claimed(quantize: Quantize | None, geometry: Geometry, tasks: Sequence[Task]) -> Iterator[_Claimed]:
    for index, roles in _claims(tasks):
        layer = geometry.layers[index]
        widest = max(_bits(quantize, layer, role) for role in roles)
        vectors = layer.numbers(roles) - sum(math.prod(layer.weight_shape(role)) for role in roles)
        own = [layer.bits_of(f"{role}.bias") for role in roles if "bias" in layer.role_shapes(role)]
        extra = vectors * max(0.0, max(own, default=0) - widest)
        if quantize is not None:
            shapes = [layer.weight_shape(role) for role in roles if _is_rounded(quantize, role)]
            numbers = beside(shapes, _code_bits(quantize, roles[0]), quantize.group, layer.bits)
            extra += numbers * max(layer.bits_of(f"{role}.weight") for role in roles)
        yield _Claimed(layer.numbers(roles), widest, extra)


def _claims(tasks: Sequence[Task]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Layer and roles of each task, without those of tasks before it: points of a sweep claim the same ones."""
    seen: set[tuple[int, str]] = set()
    for task in tasks:
        if roles := tuple(role for role in task.roles if (task.layer, role) not in seen):
            yield task.layer, roles
        seen |= {(task.layer, role) for role in roles}


def _bits(quantize: Quantize | None, layer: LayerGeometry, role: str) -> float:
    """Of a number of a role's matrix as it is stored, with its share of a scale."""
    own = layer.bits_of(f"{role}.weight")
    if quantize is None or not _is_rounded(quantize, role):
        return own
    return _code_bits(quantize, role) + (own / quantize.group if quantize.group else 0.0)


def _is_rounded(quantize: Quantize, role: str) -> bool:
    return role in (*QUANTIZED_ROLES, *quantize.outer_roles) and role not in quantize.skip


def _code_bits(quantize: Quantize, role: str) -> int:
    chosen = OUTER_BITS if role in OUTER_ROLES else MOST_BITS
    return chosen if quantize.bits == "auto" else quantize.bits
