"""Adds the moments that rounding needs to tasks, and checks that groups of columns fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from manifests.errors import InputError
from manifests.method_entry import MethodEntry
from manifests.methods import LeSTD, OfExperts
from manifests.quantize import OUTER_ROLES, Quantize, is_skipped
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.experts.mixture import ROUTER
from pipeline.methods.method import Task
from pipeline.rounding.choices import gradient_moments
from pipeline.rounding.outputs import output_moments
from pipeline.rounding.solutions import LEAST_GROUP, input_moments


def rounded_tasks(tasks: Sequence[Task], manifest: Manifest, geometry: Geometry) -> tuple[Task, ...]:
    """Add to tasks the moments that rounding with error feedback needs.

    Raises InputError for Tucker forms, for skipped roles that the model lacks, and for dense widths or fixed ranks that
    no group fits.
    """
    assert manifest.quantize is not None
    _refuse_methods(manifest)
    _check_skipped(manifest.quantize, geometry)
    _check_multiples(manifest, manifest.quantize.group)
    _check_value_ranks(manifest, geometry)
    _check_ends(manifest.quantize, geometry)
    _check_groups(manifest.quantize, geometry)
    _check_corrections(manifest, tasks)
    return tuple(with_moments(task, manifest, geometry.layers[task.layer]) for task in tasks)


def with_moments(task: Task, manifest: Manifest, layer: LayerGeometry) -> Task:
    """Add to a task the moments for rounding it and for choosing its bits."""
    quantize = manifest.rounding
    if quantize is None or quantize.feedback is False:
        return task
    roles = [role for role in task.roles if not quantize.skips(role)]
    if quantize.correct == "output":  # the pair at a corrected input has its moment
        corrected = {pair.point for pair in task.corrections}
        roles = [role for role in roles if layer.reads.get(role) not in corrected]
    needed = input_moments([role for role in roles if not _sampled(role, task, layer)], layer.reads)
    if quantize.feedback == "both":
        needed += tuple(output_moments(roles, layer).values())
    if quantize.bits == "auto" and roles:
        needed += gradient_moments(task.roles, layer)  # a skipped role may share a rounded factor
    return replace(task, moments=tuple(dict.fromkeys((*task.moments, *needed))))


def _sampled(role: str, task: Task, layer: LayerGeometry) -> bool:
    """Return True if the task's sample gives the moment of a role's input: an expert's own, where experts are chosen
    together."""
    if ROUTER not in task.roles or role not in layer.routed_roles:
        return False
    block = layer.mlp_of(role)
    return role == block.writer.role or bool(block.weighed)


def _refuse_methods(manifest: Manifest) -> None:
    chosen = manifest.quantize is not None and manifest.quantize.bits == "auto"
    for position, entry in enumerate(manifest.methods):
        if chosen and (isinstance(entry, OfExperts) or getattr(entry, "shapes", "free") != "free"):
            raise InputError(
                f"quantize.bits: auto: methods.{position} ({entry.method}) chooses the experts of a layer together, "
                "without bits for each; give bits: 8, 4, 3 or 2, or use shapes: free"
            )
        if isinstance(entry, LeSTD):
            raise InputError(
                f"quantize: methods.{position} (lestd) stores a sparse core and factors outside of linear modules, "
                "which the pack-quantized layout cannot hold: use another method, or leave out quantize"
            )


def _check_skipped(quantize: Quantize, geometry: Geometry) -> None:
    roles = {role: None for layer in geometry.layers for role in (*layer.matrices, *OUTER_ROLES)}
    if absent := [name for name in quantize.skip if not any(is_skipped(role, (name,)) for role in roles)]:
        known = dict.fromkeys(
            role if "." not in role else f"{role.split('.')[0]}.{role.split('.')[-1]}" for role in roles
        )
        raise InputError(
            f"quantize.skip: this {geometry.model_type} model has no matrix {', '.join(absent)}; it has "
            f"{', '.join(known)}"
        )


def _check_multiples(manifest: Manifest, group: int | None) -> None:
    for position, entry in enumerate(manifest.methods):
        if group and entry.rank_multiple and math.gcd(entry.rank_multiple, group) < LEAST_GROUP:
            raise InputError(
                f"methods.{position}.rank_multiple: groups of {group} (quantize.group) do not fit multiples of "
                f"{entry.rank_multiple}; budget.multiple: {math.lcm(entry.rank_multiple, group)} would, or leave it out"
            )
        _check_ranks(position, entry, group)


def _check_ranks(position: int, entry: MethodEntry, group: int | None) -> None:
    """Check fixed ranks, except those of value heads."""
    ranks = getattr(entry, "ranks", None)
    for name, rank in ranks.model_dump().items() if ranks is not None else ():
        if group and rank and math.gcd(rank, group) < LEAST_GROUP and name != "value":
            raise InputError(
                f"methods.{position}.ranks.{name}: groups of {group} (quantize.group) have less than {LEAST_GROUP} in "
                f"common with {rank}; give a multiple of it, or `keep`, whose ranks are multiples of {group}"
            )


def _check_value_ranks(manifest: Manifest, geometry: Geometry) -> None:
    """Check fixed ranks of value heads, which are concatenated in the input of o."""
    quantize = manifest.quantize
    assert quantize is not None
    for position, entry in enumerate(manifest.methods):
        rank, group = getattr(getattr(entry, "ranks", None), "value", None), quantize.group
        if not rank or not group:
            continue
        for block in (block for layer in geometry.layers for block in layer.attentions):
            read, role = block.heads * rank, block.writer.role
            if rank < block.head_dim and not quantize.skips(role) and math.gcd(read, group) < LEAST_GROUP:
                least = LEAST_GROUP // math.gcd(block.heads, LEAST_GROUP)
                raise InputError(
                    f"methods.{position}.ranks.value: {block.heads} heads of {rank} are {read} numbers that {role} "
                    f"reads, and groups of {group} (quantize.group) have less than {LEAST_GROUP} in common with them; "
                    f"give a multiple of {least}, or skip: [{role}]"
                )


def _check_ends(quantize: Quantize, geometry: Geometry) -> None:
    if quantize.what == "all" and geometry.tied:
        raise InputError(
            "quantize.what: all: this model ties its head to its embeddings (tie_word_embeddings), and the "
            "pack-quantized layout holds codes for a table or for a linear, not for both; use what: factors"
        )


def _check_corrections(manifest: Manifest, tasks: Sequence[Task]) -> None:
    assert manifest.quantize is not None
    own = (task for task in tasks if task.method == len(manifest.methods))
    if manifest.quantize.correct == "output" and not any(task.corrections for task in own):
        raise InputError(
            "quantize.correct: output: the methods claim all matrices that it would correct; leave it out, or write "
            "correct: output under loss_aware"
        )


def unfit_inputs(quantize: Quantize, geometry: Geometry) -> list[tuple[str, int]]:
    """Return the distinct roles, with the width of their dense input, that no group of scales fits."""
    group = quantize.group
    widths = _odd_widths(quantize, geometry)
    return [(role, width) for role, width in widths if group and math.gcd(width, group) < LEAST_GROUP]


def _check_groups(quantize: Quantize, geometry: Geometry) -> None:
    group = quantize.group
    faults = [f"{role} reads {width} numbers" for role, width in unfit_inputs(quantize, geometry)]
    if faults:
        raise InputError(
            f"quantize.group: {group} has less than {LEAST_GROUP} in common with what is read: {', '.join(faults)}; "
            "use group: null (a scale for each row), or skip these roles"
        )


def _odd_widths(quantize: Quantize, geometry: Geometry) -> list[tuple[str, int]]:
    """Return the distinct roles, with the width of their dense input, that groups do not divide."""
    widths = {
        (role, layer.weight_shape(role)[1]): None
        for layer in geometry.layers
        for role in (*layer.linear_roles, *(outer for outer, _, _ in layer.outer if outer in quantize.outer_roles))
        if not quantize.skips(role)
    }
    return [(role, width) for role, width in widths if quantize.group and width % quantize.group]


def rounding_remarks(manifest: Manifest, geometry: Geometry) -> tuple[str, ...]:
    """Return a remark for each setting of the manifest that cannot be met."""
    quantize = manifest.quantize
    if quantize is None:
        return ()
    group = quantize.group or 1
    unfed = quantize.feedback is None and not manifest.rounds_by_feedback
    return (("quantize: without calibration every number goes to the nearest code",) if unfed else ()) + tuple(
        f"quantize.group: {group} does not divide the {width} numbers that {role} reads; its groups, where it stays "
        f"that wide, are of {math.gcd(width, group)}, which not every engine's kernels take"
        for role, width in _odd_widths(quantize, geometry)
    )
