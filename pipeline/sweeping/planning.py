"""What `python -m pipeline.plan SWEEP` says: what all points share, and what each of them takes besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manifests.sweep import Point, Sweep
from pipeline.job.planning import Asked, asked_rates, gradient_tokens, pass_of, scoring_seconds, what_does_not_fit
from pipeline.plan.estimate import make_plan
from pipeline.plan.phases import phase_seconds
from pipeline.plan.rates import Rates
from pipeline.plan.work import layer_work
from pipeline.sweeping.points import SweptPoint, read_points, shared_inputs

SHARED = ("start", "statistics", "reduce", "gradient")  # once, whatever the points
OWN = ("solve", "assemble")  # of each


def sweep_report(sweep: Sweep, points: tuple[Point, ...], ask: Asked) -> dict[str, Any]:
    """As JSON: the plan of what all points share, seconds by phase, and `points`. Raises InputError."""
    swept = read_points(points, weights=False)
    shared = shared_inputs(swept, sweep.output)
    rates = asked_rates(shared.manifest, shared.dtype, ask)
    rows = [_row(point, rates) for point in swept]
    whole = make_plan(shared.manifest, shared.geometry, shared.tasks, shared.dtype.itemsize, shared.source_bytes)
    plan = replace(
        whole,
        output_bytes=sum(row["output_bytes"] for row in rows),
        solve_flops=sum(row["solve_flops"] for row in rows),
        read_bytes=whole.read_bytes + (len(rows) - 1) * shared.geometry.decoder_numbers() * shared.dtype.itemsize,
    )
    phases = _phases(swept, rows, rates)
    every_point = [row.pop("phases") for row in rows]
    for row, seconds in zip(rows, every_point, strict=True):
        row["seconds"] = sum(seconds.values())
    report = plan.report() | {"rates": rates.report(), "phases": phases, "estimated_seconds": sum(phases.values())}
    del report["expected_numbers"]  # of each point
    remarks = [remark for point in swept for remark in point.inputs.remarks]
    return report | {
        "points": rows,
        "remarks": list(dict.fromkeys(remarks)) + what_does_not_fit(shared.manifest, report, ask),
    }


def _row(point: SweptPoint, rates: Rates) -> dict[str, Any]:
    """Of one point: its size, and the phases of a job of its own."""
    inputs, manifest = point.inputs, point.point.manifest
    itemsize = inputs.dtype.itemsize
    plan = make_plan(manifest, inputs.geometry, inputs.tasks, itemsize, inputs.source_bytes)
    tokens, kept = gradient_tokens(manifest, inputs.geometry, inputs.tasks), plan.expected_numbers / plan.dense_numbers
    work = layer_work(manifest, inputs.geometry, inputs.tasks, itemsize, tokens, kept)
    way = pass_of(manifest, plan.layers, tokens)
    phases = phase_seconds(work, rates, way) | scoring_seconds(inputs, rates, way.workers)
    own = {name: phases.get(name, 0.0) for name in OWN}
    scored = phases.get("held-out", 0.0) / 2 + phases.get("evaluate", 0.0)
    if not point.point.save:
        own["assemble"] = 0.0
    return {
        "point": point.point.label,
        "numbers_kept": kept,
        "output_bytes": plan.output_bytes if point.point.save else 0,
        "solve_flops": plan.solve_flops,
        "phases": own | {"score": scored},
    }


def _phases(swept: Sequence[SweptPoint], rows: Sequence[dict[str, Any]], rates: Rates) -> dict[str, float]:
    """Of the whole sweep. Curves are taken once for the same methods; the dense model is scored once."""
    inputs = shared_inputs(swept, swept[0].point.manifest.output)
    manifest, itemsize = inputs.manifest, inputs.dtype.itemsize
    tokens = gradient_tokens(manifest, inputs.geometry, inputs.tasks)
    way = pass_of(manifest, inputs.geometry.num_layers, tokens)
    phases = phase_seconds(layer_work(manifest, inputs.geometry, inputs.tasks, itemsize, tokens), rates, way)
    found = {name: phases[name] for name in SHARED if name in phases}
    curves = 0.0
    for point in {point.curves_digest: point for point in swept}.values():
        own = point.inputs
        tokens = gradient_tokens(point.point.manifest, own.geometry, own.tasks)
        work = layer_work(point.point.manifest, own.geometry, own.tasks, itemsize, tokens)
        curves += phase_seconds(work, rates, pass_of(point.point.manifest, way.layers, tokens)).get("curves", 0.0)
    dense = phases.get("held-out", 0.0) / 2 + scoring_seconds(inputs, rates, way.workers).get("evaluate", 0.0)
    found |= {"curves": curves} if curves else {}
    found |= {"score dense": dense}
    for name in rows[0]["phases"]:
        found[name] = sum(row["phases"][name] for row in rows)
    return found
