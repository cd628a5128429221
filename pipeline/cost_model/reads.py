"""The bytes that a job reads, by phase: weights of the source, compressed layers and moments. docs/plan.md#bytes-read.

Weights of the source count as it stores them; they are decoded after they are read.

The workers of a node read a layer at about the same time, so that it counts once for all of them. Nothing is assumed to
stay in the page cache from one phase to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from manifests.schema import Manifest
from pipeline.cost_model.bounds import Size
from pipeline.cost_model.passes import PlannedPasses
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import build_methods, layer_gradients, layers_of, predict_tasks, task_groups
from pipeline.methods.work import moment_width
from pipeline.units.sharding import expert_parts

TILE = 1024  # rows of a tile of a stored moment, as in `stores.statistics`
MOMENT_BYTES = 8


def read_phases(
    manifest: Manifest, geometry: Geometry, tasks: Sequence[Task], size: Size, source_bytes: int, passes: PlannedPasses
) -> dict[str, int]:
    """Return phase -> bytes read, in the order of the phases; phases that read nothing are left out.

    `size`: of the checkpoint. Hidden states, files beside the weights, and headers are not counted.
    """
    model, decoder = geometry.model_bytes(), geometry.decoder_bytes()
    outer, layers = model - decoder, [geometry.layers[layer] for layer in layers_of(tasks)]
    copied = {layer.index: layer.stored_bytes() - layer.stored_bytes(_roles(tasks, layer.index)) for layer in layers}
    rest = model - sum(layer.stored_bytes() for layer in layers)
    staged = max(0, size.num_bytes - rest)
    moments = any(task.moments for task in tasks)
    phases = {"digests": source_bytes + rest + sum(copied.values())}
    if manifest.calibration is not None:
        phases |= {"texts": model}
        if passes.importance:
            phases["importance"] = decoder + outer
        if moments:
            phases["statistics"] = decoder + outer
        if passes.compressed and moments:
            phases["propagate"] = sum(copied.values())
    phases["gradient"] = _gradient_bytes(manifest, geometry, tasks) + outer * any(
        layer_gradients(tasks, layer.index) for layer in layers
    )
    phases |= _solving_phases(manifest, geometry, tasks, passes)
    phases["solve"] += sum(copied.values())
    steps = {task.layer: len(geometry.layers[task.layer].corrected_points) + 1 for task in tasks if task.corrections}
    phases["correct"] = 2 * sum(geometry.layers[layer].stored_bytes() * count for layer, count in steps.items())
    trained = {task.layer for task in tasks if task.refine is not None}
    phases["refine"] = 2 * sum(geometry.layers[layer].stored_bytes() for layer in trained)
    phases |= {"verify": staged, "compare": model + size.num_bytes}
    if manifest.calibration is not None:
        phases["held-out"] = size.num_bytes + (0 if passes.joined else model)
    phases["assemble"] = rest
    if (perplexity := manifest.evaluation.perplexity) is not None:
        phases["evaluate"] = size.num_bytes + (model if perplexity.dense else 0)
    if manifest.evaluation.tasks:
        phases["tasks"] = size.num_bytes + model
    return {name: amount for name, amount in phases.items() if amount}


def _roles(tasks: Iterable[Task], layer: int) -> tuple[str, ...]:
    """Return the claimed roles of a layer, each once."""
    return tuple(dict.fromkeys(role for task in tasks if task.layer == layer for role in task.roles))


def _gradient_bytes(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> int:
    """Return the bytes of the layers that the backward pass reads.

    If the gradient follows from the output of a layer with streamed experts, these pass forwards twice before: all
    samples, and the tokens by which the grids of the last slice are chosen, which leave that slice in memory.
    """
    asking = [layer for layer in layers_of(tasks) if layer_gradients(tasks, layer)]
    total = 0
    for layer in geometry.layers[asking[0] :] if asking else ():
        slices = len(expert_parts(layer.num_experts, manifest.workers.experts))
        local = manifest.calibration is not None and manifest.calibration.gradient.kind == "local"
        forwards = 2 - 1 / slices if slices > 1 and (local or layer.index + 1 == geometry.num_layers) else 0.0
        total += layer.stored_bytes() + round(forwards * _experts_bytes(layer))
    return total


def _experts_bytes(layer: LayerGeometry) -> int:
    return layer.stored_bytes(tuple(role for block in layer.mlps if block.routing for role in block.roles))


def _solving_phases(
    manifest: Manifest, geometry: Geometry, tasks: Sequence[Task], passes: PlannedPasses
) -> dict[str, int]:
    """Return the bytes of weights and moments that curves and solves read."""
    methods, calibration = build_methods(manifest), manifest.calibration
    tokens = calibration.samples * calibration.sequence_length if calibration else 0
    predicted, groups = {task.key for task in predict_tasks(methods, geometry)}, task_groups(methods, geometry)
    phases = {"curves": 0, "solve": 0}
    for index in layers_of(tasks):
        layer, own = geometry.layers[index], [task for task in tasks if task.layer == index]
        held = manifest.workers.experts
        for phase, some in (("curves", [task for task in own if task.key in predicted]), ("solve", own)):
            phases[phase] += sum(_weight_bytes(task, groups.get(task.key), layer, held, tokens, phase) for task in some)
            sliced = layer.num_experts > held  # the moments of earlier slices are stored
            if phase == "curves" or sliced or not passes.from_memory:
                each = {moment for task in some for moment in task.moments}
                phases[phase] += sum(_stored_bytes(moment, layer, tokens) for moment in each)
    return phases


def _weight_bytes(
    task: Task, group: Group[Any] | None, layer: LayerGeometry, held: int, tokens: int, phase: str
) -> int:
    """Return the bytes of a task's weights, those of streamed experts as often as its group visits them.

    `group`: None for a task of another point of a sweep, whose weights are counted once.
    """
    whole, visits = layer.stored_bytes(task.roles), None if group is None else group.visits(tokens)
    experts = [block for block in layer.mlps if block.routing and block.roles[0] in task.roles]
    if len(experts) <= held or visits is None:
        return whole
    routed = layer.stored_bytes(tuple(role for block in experts for role in block.roles))
    return whole + round(((visits.curve if phase == "curves" else visits.solve) - 1) * routed)


def _stored_bytes(moment: Moment, layer: LayerGeometry, tokens: int) -> int:
    """Return the bytes of a stored moment: the upper tiles, if it has more than one."""
    width = moment_width(moment, layer)
    if moment.kind == "sample":
        return min(moment.tokens, tokens) * width * layer.bits // 8
    if moment.diagonal:
        return MOMENT_BYTES * moment.groups * width
    tiles = math.ceil(width / TILE)
    return round(MOMENT_BYTES * moment.groups * width**2 * (tiles + 1) / (2 * tiles))
