"""The phases of a job as the plan has them, for the time that is left."""

from __future__ import annotations

from pipeline.console.outlook import Ahead, Outlook
from pipeline.job.context import JobContext
from pipeline.job.planning import gradient_tokens, pass_of
from pipeline.plan.phases import WORKERS_SECONDS, evaluate_seconds, phase_seconds
from pipeline.plan.rates import Rates
from pipeline.plan.work import layer_work, scoring_flops

WALK = ("statistics", "reduce", "solve", "round", "propagate")


def job_outlook(job: JobContext, rates: Rates) -> Outlook:
    """What is ahead of a job that begins; of one whose phases come several times, nothing is told. Of a sweep see
    `pipeline.sweeping.planning.sweep_outlook`."""
    inputs, manifest = job.inputs, job.manifest
    if job.points or inputs.max_loss is not None or any(getattr(entry, "rounds", 1) == 2 for entry in manifest.methods):
        return Outlook()
    geometry, tasks = inputs.geometry, inputs.tasks
    tokens = gradient_tokens(manifest, geometry, tasks)
    work = layer_work(manifest, geometry, tasks, inputs.dtype.itemsize, tokens)
    way = pass_of(manifest, geometry.num_layers, tokens)
    seconds = phase_seconds(work, rates, way)
    has_moments = any(task.moments for task in tasks)
    if way.compressed and has_moments:
        solving = [("walk", sum(seconds.get(name, 0.0) for name in WALK))]
    elif any(task.corrections for task in tasks):
        solving = [("correct", seconds["solve"] + seconds.get("correct", 0.0))]
    else:
        solving = [("compress", seconds["solve"] + seconds.get("round", 0.0))]
    first = "importance" if way.compressed else "statistics"
    planned = [("start", seconds["start"])]
    planned += [(first, seconds[first])] if first in seconds and has_moments else []
    planned += [(name, seconds[name]) for name in ("gradient", "curves") if name in seconds]
    planned += solving
    if job.held_out is not None and "held-out" in seconds:
        planned += [(f"score {name}", seconds["held-out"] / 2) for name in ("held-out-dense", "held-out")]
    planned.append(("assemble", seconds["assemble"]))
    if job.evaluation is not None and manifest.evaluation.perplexity is not None:
        flops = job.evaluation.numel() * scoring_flops(geometry, job.evaluation.shape[-1])
        scoring = evaluate_seconds(flops, rates, way.workers)
        planned += [("start", WORKERS_SECONDS), ("evaluate", scoring)] * (1 + manifest.evaluation.perplexity.dense)
    return Outlook([Ahead(*phase) for phase in planned], geometry.num_layers)
