"""Plans a sweep: the costs that all points share, and those of each point. `python -m pipeline.plan SWEEP`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from manifests.sweep import Sweep, SweepPoint
from pipeline.checkpoint.planned_size import bounded_plan, plan_of
from pipeline.console.eta import Eta, PlannedPhase
from pipeline.cost_model.estimate import Plan
from pipeline.cost_model.healing_work import HealingWork, healing_work
from pipeline.cost_model.phases import object_store_bytes, scored_seconds, solving_seconds
from pipeline.cost_model.prices import Prices, prices_of
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.texts import job_seconds
from pipeline.inputs.calibration import EvaluationTokens, evaluation_tokens
from pipeline.inputs.job_inputs import Inputs
from pipeline.job.context import JobContext
from pipeline.job.plan_report import (
    RateSource,
    offloaded_layers,
    rates_from,
    seconds_of,
    stored_bytes,
    uncounted_healing,
    verdict,
)
from pipeline.job.planned_tasks import tasks_seconds
from pipeline.job.remaining_phases import healing_phases
from pipeline.sweeping.points import SharedInputs, SweptPoint, read_points, series_of, shared_inputs

SHARED = ("start", "texts", "statistics", "reduce", "gradient")  # phases that all points share


def sweep_report(sweep: Sweep, points: tuple[SweepPoint, ...], request: RateSource) -> dict[str, Any]:
    """Return the plan as JSON: shared amounts, seconds by phase, and `points`. Raises InputError."""
    swept = read_points(points, weights=False)
    shared = shared_inputs(swept, sweep.output)
    rates = rates_from(request, shared.manifest, shared.geometry, shared.dtype)
    tokens = evaluation_tokens(shared)
    whole, workers = _seconds(shared, tokens, rates), _prices(shared, rates).passes.workers
    on_tasks, unknown = tasks_seconds(shared, shared.manifest.evaluation, rates, workers)
    of_tasks = on_tasks / 2  # of one model
    phases = {name: whole[name] for name in SHARED if name in whole}
    phases |= {"score dense": _scoring(whole) + of_tasks, "curves": 0.0, "solve": 0.0, "score": 0.0, "assemble": 0.0}
    rows, curved, healings = [], set(), [work for point in swept if (work := _healing(point.inputs))]
    if healings:
        phases |= {"score teacher": healings[0].seconds(rates, workers)["score teacher"], "heal": 0.0}
    for point in swept:
        seconds = _seconds(point.inputs, tokens, rates)
        own = {"solve": seconds["solve"], "score": _scoring(seconds) + of_tasks, "assemble": 0.0}
        if point.point.save:
            own["assemble"] = seconds["assemble"] + seconds["verify"] + seconds.get("compare", 0.0)
        if healing := _healing(point.inputs):  # healed points are scored again
            own |= {"heal": healing.seconds(rates, workers)["heal"], "score": 2 * own["score"]}
        rows.append(_row(point, sum(own.values())))
        if point.curves_digest not in curved:  # points with the same methods share their curves
            own["curves"] = seconds.get("curves", 0.0)
        curved.add(point.curves_digest)
        phases |= {name: phases[name] + amount for name, amount in own.items()}
    plan, others = _plan(shared), (len(rows) - 1) * shared.geometry.decoder_bytes()
    plan = replace(
        plan,
        run_dir_bytes=run_dir_bytes(swept, plan),
        output_bytes=sum(row["output_bytes"] for row in rows),
        solve_flops=sum(_plan(point.inputs).solve_flops for point in swept),
        read_bytes=plan.read_bytes + others,
        read_phases={**plan.read_phases, "other points": others},
    )
    report = plan.report() | _stored_bytes(swept, shared, rates) | seconds_of(phases, rates)
    report |= max(healings, key=lambda work: work.memory_bytes(rates)).report(rates) if healings else {}
    del report["expected_numbers"]  # points differ in it
    remarks = [*dict.fromkeys(remark for point in swept for remark in point.inputs.remarks), *unknown]
    remarks += [*uncounted_healing(shared.manifest), *offloaded_layers(report)]
    return report | verdict(shared.manifest, report, request, remarks) | {"points": rows}


def _stored_bytes(swept: Sequence[SweptPoint], shared: Inputs, rates: Rates) -> dict[str, int]:
    """Return `stored_bytes` of the pass over the text. The object store must also hold the joint solves of a series."""
    stored = stored_bytes(_prices(shared, rates), shared.manifest)
    for series in series_of(swept):
        points = [_prices(point.inputs, rates) for point in series]
        work = replace(points[0].work, written_bytes=sum(point.work.written_bytes for point in points))
        joint = object_store_bytes(replace(points[0], work=work))
        stored["object_store_bytes"] = max(stored["object_store_bytes"], joint)
    return stored


def sweep_eta(pending: Sequence[SweptPoint], healed: Sequence[SweptPoint], job: JobContext, rates: Rates) -> Eta:
    """Return the phases ahead of a sweep. `pending`: the points that are not solved. `healed`: those that will be
    healed when all are solved. `job`: the context that the points share."""
    healings = [healing_phases(job, point.inputs, _plan(point.inputs), rates) for point in healed]
    planned = [*_dense_phases(job, rates)] if pending else []
    planned += [phase for phases in healings[:1] for phase in phases[:-1]]  # the teacher's pass, once
    planned += [*_solving_phases(pending, job, rates), *(phases[-1] for phases in healings)]
    for point in healed:
        planned += _scored_and_assembled(point, job, _seconds(point.inputs, job.evaluation, rates))
    return Eta(planned, job.inputs.geometry.num_layers)


def _dense_phases(job: JobContext, rates: Rates) -> Iterator[PlannedPhase]:
    """Yield the phases that all points share."""
    whole = _seconds(job.inputs, job.evaluation, rates)
    whole["score texts"] = whole["texts"]
    names = ("start", "score texts", "statistics", "gradient")
    yield from (PlannedPhase(name, whole[name]) for name in names if name in whole)
    if "evaluate" in whole:
        yield PlannedPhase("score evaluation-dense", whole["evaluate"])


def _solving_phases(pending: Sequence[SweptPoint], job: JobContext, rates: Rates) -> Iterator[PlannedPhase]:
    """Yield the phases of points, until they are solved, scored and assembled."""
    curved: set[str] = set()
    for series in series_of(pending):
        name, each = series[0].point.series, [_seconds(point.inputs, job.evaluation, rates) for point in series]
        if series[0].curves_digest not in curved and "curves" in each[0]:
            yield PlannedPhase("curves", each[0]["curves"], name)
        curved.add(series[0].curves_digest)
        phase = "correct" if series[0].walks else "compress"
        yield PlannedPhase(phase, sum(seconds["solve"] for seconds in each), name)
        for point, seconds in zip(series, each, strict=True):
            has_dense = point is not pending[0] or _prices(point.inputs, rates).passes.joined
            yield from _scored_and_assembled(point, job, seconds, ("held-out-dense", "held-out")[has_dense:])


def _scored_and_assembled(
    point: SweptPoint, job: JobContext, seconds: Mapping[str, float], models: Sequence[str] = ("held-out",)
) -> Iterator[PlannedPhase]:
    """Yield the scores of a point's layers, and the assembly of a saved point. `models`: those of the held-out text."""
    if job.held_out is not None:
        yield from (PlannedPhase(f"score {model}", seconds["held-out"]) for model in models)
    if "evaluate" in seconds:
        yield PlannedPhase("score evaluation", seconds["evaluate"])
    if point.point.save:
        yield PlannedPhase("assemble", seconds["assemble"])


def run_dir_bytes(swept: Sequence[SweptPoint], plan: Plan) -> int:
    """Return the peak of bytes in the run directory. `plan`: the plan of the work that the points share."""
    staged = max(sum(_plan(point.inputs).output_bytes for point in series) for series in series_of(swept))
    healed = [_plan(point.inputs).output_bytes for point in swept if point.point.manifest.heal is not None]
    staged += 2 * sum(healed)  # solved layers wait for the training, and healed ones stay
    return plan.run_dir_bytes + max(0, staged - plan.output_bytes)


def _seconds(inputs: Inputs, evaluation: EvaluationTokens | None, rates: Rates) -> dict[str, float]:
    """Return phase -> seconds of a job with these inputs; `evaluate` and `held-out` are those of one model."""
    prices = _prices(inputs, rates)
    seconds = job_seconds(inputs.planned, prices, evaluation.ids.shape if evaluation else ())
    seconds["held-out"] = scored_seconds(seconds, prices.passes)
    seconds["solve"] = solving_seconds(seconds)
    return seconds


@lru_cache(maxsize=256)  # as of its plan
def _prices(inputs: Inputs, rates: Rates) -> Prices:
    """Return the prices of a job with these inputs. A sweep does not solve layers during the pass."""
    prices = prices_of(inputs.planned, rates, _plan(inputs).kept)
    return replace(prices, passes=replace(prices.passes, in_pass=False))


def _scoring(seconds: dict[str, float]) -> float:
    """Return the seconds of scoring one model on the evaluation text and on held-out text."""
    return seconds["held-out"] + seconds.get("evaluate", 0.0)


@lru_cache(maxsize=256)
def _healing(inputs: Inputs) -> HealingWork | None:
    """Return the work of healing a point; None if it is not healed, or of a text of unknown length."""
    return healing_work(inputs.manifest, inputs.geometry, _plan(inputs).kept)


@lru_cache(maxsize=256)  # the plan of a point is needed in several places
def _plan(inputs: Inputs) -> Plan:
    return bounded_plan(inputs) if isinstance(inputs, SharedInputs) else plan_of(inputs)


def _row(point: SweptPoint, seconds: float) -> dict[str, Any]:
    plan = _plan(point.inputs)
    return {
        "point": point.point.label,
        "numbers_kept": plan.kept,
        "output_bytes": plan.output_bytes if point.point.save else 0,
        "seconds": seconds,
    }
