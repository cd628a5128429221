"""An upper bound on the size of a checkpoint whose ranks depend on the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manifests.quantize import OUTER_BITS, OUTER_ROLES, Quantize
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.registry import Methods, saved_numbers
from pipeline.methods.rounded_size import rounding_overhead


@dataclass(frozen=True)
class Size:
    """The size of a checkpoint: numbers, before rounding, and bytes."""

    numbers: int
    num_bytes: int


def size_bound(job: PlannedJob, source_bytes: int) -> Size:
    """Return the largest size of a job's checkpoint. `source_bytes`: bytes with unused tensors."""
    geometry, numbers = job.geometry, _most_numbers(job)
    beyond, head = max(0, source_bytes - geometry.model_bytes()), added_head(job.methods, geometry)
    if bounded_by(job) == "budget.bytes":
        budget = job.manifest.budget
        assert budget is not None
        most = beyond + geometry.model_bytes() - math.floor((1 - budget.share) * geometry.scope_bytes(budget.scope))
        return Size(numbers + head.numbers, most + head.num_bytes)
    most = beyond + _most_bytes(job, numbers)
    return Size(numbers + head.numbers, most + head.num_bytes)


def added_head(methods: Methods, geometry: Geometry) -> Size:
    """Return the size of the untied output embedding of a checkpoint with its own class; 0 if nothing is added."""
    if not (geometry.tied and any(method.own_class for method in methods)):
        return Size(0, 0)
    name, shape = geometry.outer[0]
    return Size(math.prod(shape), math.prod(shape) * dict(geometry.outer_bits).get(name, geometry.bits) // 8)


def bounded_by(job: PlannedJob) -> str:
    """Return the manifest field that bounds the size."""
    budget = job.manifest.budget
    fields = () if budget is None or _ignores_budget(job.methods) else ("keep", "bytes", "max_loss")
    return next((f"budget.{name}" for name in fields if getattr(budget, name) is not None), "methods")


def _ignores_budget(methods: Methods) -> bool:
    """Return True if every entry has its own size."""
    return all(method.fixed_ranks or method.entry.keep is not None for method in methods)


def _most_numbers(job: PlannedJob) -> int:
    dense, budget = job.geometry.model_numbers(), job.manifest.budget
    if budget is None or _ignores_budget(job.methods):
        return dense - saved_numbers(job.methods, job.geometry)
    return dense - round((1 - budget.share) * job.geometry.scope_numbers(budget.scope))


@dataclass(frozen=True)
class _Claimed:
    """The tensors of a task: their numbers, the bits of a number of the widest matrix, and additional bits in all.

    Additional bits are those of wider vectors, and of the shapes and scales of codes.
    """

    numbers: int
    bits: float
    additional: float


def _most_bytes(job: PlannedJob, numbers: int) -> int:
    """Return the largest size in bytes of `numbers` numbers, those with the widest dtypes."""
    geometry, claims = job.geometry, [*_claims(job)]
    claimed = [_claimed(job, layer, roles) for layer, roles in claims]
    remaining, bits, widest = numbers - geometry.model_numbers() + sum(each.numbers for each in claimed), 0.0, 0.0
    for each in sorted(claimed, key=lambda each: -each.bits):
        stored = min(remaining, each.numbers)
        bits += stored * each.bits + each.additional
        remaining -= stored
        widest = max(widest, each.bits)
    bits += remaining * widest  # if factors have more numbers than the source
    roles_of: dict[int, set[str]] = {layer.index: set() for layer in geometry.layers}
    for layer, roles in claims:
        roles_of[layer.index].update(roles)
    grown = sum(layer.grown_bytes(roles_of[layer.index]) for layer in geometry.layers)
    outside = [f"{layer.path(role)}.weight" for layer, roles in claims for role in roles if role in OUTER_ROLES]
    grown += geometry.grown_outer_bytes(outside)
    replaced = sum(layer.num_bytes(roles) for layer, roles in claims)
    return geometry.model_bytes() + grown - replaced + math.ceil(bits / 8)


def _claimed(job: PlannedJob, layer: LayerGeometry, roles: Sequence[str]) -> _Claimed:
    quantize, widest = job.manifest.quantize, max(_bits(job, layer, role) for role in roles)
    shapes = {key: shape for key, (_, shape) in layer.tensors(roles).items() if not key.endswith(".weight")}
    vectors, own = sum(map(math.prod, shapes.values())), max(map(layer.bits_of, shapes), default=0)
    extra = vectors * max(0.0, own - widest)
    if quantize is not None:
        matrices = [layer.weight_shape(role) for role in roles if job.rounds(layer, role)]
        numbers = rounding_overhead(matrices, _code_bits(quantize, roles[0]), quantize, layer.bits)
        extra += numbers * max(layer.bits_of(f"{role}.weight") for role in roles)
    return _Claimed(layer.numbers(roles), widest, extra)


def _claims(job: PlannedJob) -> Iterator[tuple[LayerGeometry, tuple[str, ...]]]:
    """Yield layer and roles of each task, every role once, because all points of a sweep claim the same roles."""
    claimed: set[tuple[int, str]] = set()
    for task in job.tasks:
        if roles := tuple(role for role in task.roles if (task.layer, role) not in claimed):
            yield job.geometry.layers[task.layer], roles
        claimed |= {(task.layer, role) for role in roles}


def _bits(job: PlannedJob, layer: LayerGeometry, role: str) -> float:
    """Return the stored bits of a number of a role's matrix, including its share of a scale."""
    own, quantize = layer.bits_of(f"{role}.weight"), job.manifest.quantize
    if quantize is None or not job.rounds(layer, role):
        return own
    return _code_bits(quantize, role) + (own / quantize.group if quantize.group else 0.0)


def _code_bits(quantize: Quantize, role: str) -> int:
    return OUTER_BITS if quantize.bits == "auto" and role in OUTER_ROLES else max(quantize.choices)
