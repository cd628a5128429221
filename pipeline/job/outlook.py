"""The phases of a job as the plan has them, for the time that is left."""

from __future__ import annotations

from pipeline.console.outlook import Ahead, Outlook
from pipeline.job.context import JobContext
from pipeline.plan.passes import gradient_tokens, pass_of
from pipeline.plan.phases import START_SECONDS, WORKERS_SECONDS, evaluate_seconds, phase_seconds
from pipeline.plan.rates import Rates
from pipeline.plan.work import layer_work, scoring_flops

TRIES = 4  # at a size, where the smallest one within a loss is sought, about
WALK = ("statistics", "reduce", "solve", "round", "propagate")


def job_outlook(job: JobContext, rates: Rates) -> Outlook:
    """What is ahead of a job that begins, with `TRIES` at a size where one is sought. Of a sweep see
    `pipeline.sweeping.planning.sweep_outlook`."""
    inputs, manifest = job.inputs, job.manifest
    if job.points:
        return Outlook()
    geometry, tasks = inputs.geometry, inputs.tasks
    tokens = gradient_tokens(manifest, geometry, tasks)
    work = layer_work(manifest, geometry, tasks, inputs.dtype.itemsize, tokens)
    way = pass_of(manifest, geometry, tasks)
    seconds = phase_seconds(work, rates, way)
    has_moments = any(task.moments for task in tasks)
    if way.compressed and has_moments:
        solving = [("walk", sum(seconds.get(name, 0.0) for name in WALK))]
    elif any(task.corrections for task in tasks):
        solving = [("correct", seconds["solve"] + seconds.get("correct", 0.0))]
    else:
        solving = [("compress", seconds["solve"] + seconds.get("round", 0.0))]
    first = "importance" if way.compressed else "statistics"
    passing = seconds.get(first, 0.0)
    if way.in_pass:  # all but the last layers are solved in it
        ((phase, amount),) = solving
        last = min(1.0, (way.workers + 2) / way.layers) * amount
        passing, solving = passing + amount - last, [(phase, last)]
    planned = [("start", START_SECONDS)]
    planned += [(first, passing)] if first in seconds and has_moments else []
    planned += [(name, seconds[name]) for name in ("gradient", "curves") if name in seconds]
    of_model = seconds.get("held-out", 0.0) / 2
    scored = job.held_out is not None and of_model > 0.0
    for number in range(1 if inputs.max_loss is None else TRIES):
        planned += solving
        if scored:
            planned += [(f"score {name}", of_model) for name in ("held-out-dense", "held-out")[number > 0 :]]
    planned.append(("assemble", seconds["assemble"]))
    if job.evaluation is not None and manifest.evaluation.perplexity is not None:
        flops = job.evaluation.numel() * scoring_flops(geometry, job.evaluation.shape[-1])
        scoring = evaluate_seconds(flops, rates, way.workers)
        planned += [("start", WORKERS_SECONDS), ("evaluate", scoring)] * (1 + manifest.evaluation.perplexity.dense)
    return Outlook([Ahead(*phase) for phase in planned], geometry.num_layers)
