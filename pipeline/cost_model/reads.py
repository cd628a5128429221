"""The bytes that a job reads, by phase: weights of the source, compressed layers and moments. docs/plan.md#bytes-read.

Weights of the source count as it stores them; they are decoded after they are read.

The workers of a node read a layer at about the same time, so that it counts once for all of them. Nothing is assumed to
stay in the page cache from one phase to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pipeline.cost_model.bounds import Size
from pipeline.cost_model.memory import MOMENT_BYTES, moment_bytes
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Moment, Task
from pipeline.methods.work import moment_width
from pipeline.units.sharding import expert_parts

TILE = 1024  # rows of a tile of a stored moment, as in `stores.statistics`


def read_phases(job: PlannedJob, size: Size, source_bytes: int, passes: PlannedPasses) -> dict[str, int]:
    """Return phase -> bytes read, in the order of the phases; phases that read nothing are left out.

    `size`: of the checkpoint. Hidden states, files beside the weights, and headers are not counted.
    """
    manifest, geometry = job.manifest, job.geometry
    model, decoder = geometry.model_bytes(), geometry.decoder_bytes()
    outer = model - decoder
    copied = sum(layer.stored_bytes() - layer.stored_bytes(_roles(own.tasks)) for layer, own in job.claimed)
    rest = model - sum(layer.stored_bytes() for layer, _ in job.claimed)
    staged = max(0, size.num_bytes - rest)
    moments = any(own.moments or own.gradients for _, own in job.claimed)
    phases = {"digests": source_bytes + rest + copied}
    if manifest.calibration is not None:
        phases |= {"texts": model}
        if passes.importance:
            phases["importance"] = decoder + outer
        if moments:
            phases["statistics"] = decoder + outer
        if passes.compressed and moments:
            phases["propagate"] = copied
    phases["gradient"] = _gradient_bytes(job) + outer * any(own.gradients for _, own in job.claimed)
    phases |= _solving_phases(job, passes)
    phases["solve"] += copied
    corrected = [layer for layer, own in job.claimed if any(task.corrections for task in own.tasks)]
    phases["correct"] = 2 * sum(layer.stored_bytes() * (len(layer.corrected_points) + 1) for layer in corrected)
    trained = [layer for layer, own in job.claimed if any(task.refine for task in own.tasks)]
    phases["refine"] = 2 * sum(layer.stored_bytes() for layer in trained)
    phases |= {"verify": staged, "compare": model + size.num_bytes}
    if manifest.calibration is not None:
        phases["held-out"] = size.num_bytes + (0 if passes.joined else model)
    phases["assemble"] = rest
    if manifest.evaluation.perplexity is not None:
        phases["evaluate"] = size.num_bytes + model * manifest.evaluation.with_dense
    if manifest.evaluation.tasks:
        phases["tasks"] = size.num_bytes + model
    return {name: amount for name, amount in phases.items() if amount}


def _roles(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Return the claimed roles of a layer, each once."""
    return tuple(dict.fromkeys(role for task in tasks for role in task.roles))


def _gradient_bytes(job: PlannedJob) -> int:
    """Return the bytes of the layers that the backward pass reads.

    If the gradient follows from the output of a layer with streamed experts, these pass forwards twice before: all
    samples, and the tokens by which the grids of the last slice are chosen, which leave that slice in memory.
    """
    manifest, geometry, total = job.manifest, job.geometry, 0
    asking = [layer.index for layer, own in job.claimed if own.gradients]
    for layer in geometry.layers[asking[0] :] if asking else ():
        slices = len(expert_parts(layer.num_experts, manifest.workers.experts))
        local = manifest.calibration is not None and manifest.calibration.gradient.kind == "local"
        forwards = 2 - 1 / slices if slices > 1 and (local or layer.index + 1 == geometry.num_layers) else 0.0
        total += layer.stored_bytes() + round(forwards * _experts_bytes(layer))
    return total


def _experts_bytes(layer: LayerGeometry) -> int:
    return layer.stored_bytes(tuple(role for block in layer.mlps if block.routing for role in block.roles))


def _solving_phases(job: PlannedJob, passes: PlannedPasses) -> dict[str, int]:
    """Return the bytes of weights and moments that curves and solves read."""
    phases = {"curves": 0, "solve": 0}
    for layer, own in job.claimed:
        predicted = [task for task in own.tasks if task.key in job.predicted]
        for phase, some in (("curves", predicted), ("solve", own.tasks)):
            phases[phase] += sum(_weight_bytes(job, task, layer, phase) for task in some)
            sliced = layer.num_experts > job.manifest.workers.experts  # the moments of earlier slices are stored
            if phase == "curves" or sliced or not passes.from_memory:
                each = {moment for task in some for moment in task.moments}
                phases[phase] += sum(_stored_bytes(moment, layer) for moment in each)
    return phases


def _weight_bytes(job: PlannedJob, task: Task, layer: LayerGeometry, phase: str) -> int:
    """Return the bytes of a task's weights, those of streamed experts as often as its group visits them.

    The weights of a task of another point of a sweep, which has no group here, are counted once.
    """
    whole, group = layer.stored_bytes(task.roles), job.groups.get(task.key)
    visits = None if group is None else group.visits(job.tokens)
    if visits is None:
        return whole
    experts = [block for block in layer.mlps if block.routing and block.roles[0] in task.roles]
    if len(experts) <= job.manifest.workers.experts:
        return whole
    routed = layer.stored_bytes(tuple(role for block in experts for role in block.roles))
    return whole + round(((visits.curve if phase == "curves" else visits.solve) - 1) * routed)


def _stored_bytes(moment: Moment, layer: LayerGeometry) -> int:
    """Return the bytes of a stored moment: the upper tiles, if it has more than one."""
    width = moment_width(moment, layer)
    if moment.kind == "sample" or moment.diagonal:
        return moment_bytes(moment, layer)
    tiles = math.ceil(width / TILE)
    return round(MOMENT_BYTES * moment.groups * width**2 * (tiles + 1) / (2 * tiles))
