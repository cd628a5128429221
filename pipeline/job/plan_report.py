"""The report of `python -m pipeline.plan`: bytes and operations, seconds by phase, and the limits that are exceeded."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manifests.errors import InputError, reason
from manifests.fit import memory_text
from manifests.heal import device_fault, host_fault
from manifests.schema import Manifest, Workers
from pipeline.checkpoint.engines import planned_lines
from pipeline.checkpoint.planned_size import plan_of
from pipeline.console.amounts import duration
from pipeline.cost_model.commits import committed_bytes, layers_per_commit
from pipeline.cost_model.estimate import Plan, make_plan
from pipeline.cost_model.healing_work import healing_work
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.phases import object_store_bytes, phase_seconds, scored_seconds, solving_seconds
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import WORKERS_SECONDS, Prices, prices_of
from pipeline.cost_model.probe import ProbedShape, measured_rates
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.cost_model.remarks import text_remarks
from pipeline.cost_model.serving_memory import ServingMemory
from pipeline.cost_model.texts import job_seconds
from pipeline.driver.ledger_keys import SAMPLES
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.calibration import EvaluationTokens, evaluation_tokens
from pipeline.inputs.fitting import shown_bytes
from pipeline.inputs.job_inputs import Inputs, fit_methods, fitted, measuring_layers, read_inputs
from pipeline.job.context import with_samples
from pipeline.job.planned_tasks import tasks_seconds
from pipeline.ranks.calibration import BLOCKS, OTHER_SIZES
from stores.run_directory import RunDirectory
from workers.hardware import machine_cores, thread_fault, unused_here
from workers.memory import map_large_tensors

LONGEST_PHASES = 3


@dataclass(frozen=True)
class RateSource:
    """The source of rates: a GPU by name, one figure for all products, a worker that is measured, or this machine."""

    gpu: str | None = None
    tflops: float | None = None
    probe: bool = False
    address: str | None = None
    connect_timeout_s: float = 30.0

    @property
    def is_here(self) -> bool:
        """True if the workers would run on this machine."""
        return self.gpu is None and not self.address and not os.environ.get("RAY_ADDRESS")


@dataclass(frozen=True)
class _Planned:
    """A job to report on. `inputs`: None if only a config is known."""

    job: PlannedJob
    plan: Plan
    dtype: torch.dtype
    serving: ServingMemory | None
    remarks: Sequence[str]
    inputs: Inputs | None = None


def plan_report(manifest: Manifest, config: Path | None, source: RateSource) -> dict[str, Any]:
    """Return the report as JSON.

    `config`: a config.json to plan for, without reading the source. Raises InputError.
    """
    manifest, chosen = planned_samples(manifest)
    planned = _of_source(manifest) if config is None else _of_config(manifest, config)
    job, plan, inputs, manifest = planned.job, planned.plan, planned.inputs, measuring_layers(planned.job)
    rates = rates_from(source, manifest, job.geometry, planned.dtype)
    prices = prices_of(job, rates, plan.kept)
    tokens = evaluation_tokens(inputs) if inputs else None
    phases = _phases(job, manifest, prices, tokens)
    of_tasks, unknown = tasks_seconds(inputs, manifest.evaluation, rates, prices.passes.workers)
    phases |= {"tasks": of_tasks} if of_tasks else {}
    healing = healing_work(manifest, job.geometry, plan.kept)
    phases |= healing.seconds(rates, prices.passes.workers) if healing else {}
    report = plan.report() | stored_bytes(prices, manifest) | seconds_of(phases, rates)
    report |= healing.report(rates) if healing else {}
    remarks = [*planned.remarks, *chosen, *_not_counted(manifest, inputs), *unknown]
    remarks += [*(tokens.read.left_out() if tokens else ()), *offloaded_layers(report)]
    further: dict[str, Any] = {} if inputs is None else {"engines": planned_lines(inputs)}
    further |= {} if planned.serving is None else {"serving": planned.serving.report(plan.output_bytes)}
    return report | verdict(manifest, report, source, remarks) | further


def _of_source(manifest: Manifest) -> _Planned:
    inputs = read_inputs(manifest, weights=False)
    return _Planned(inputs.planned, plan_of(inputs), inputs.dtype, inputs.serving, inputs.remarks, inputs)


def _of_config(manifest: Manifest, path: Path) -> _Planned:
    standard, geometry, dtype = _read_config(path)
    manifest, serving = fitted(manifest, standard, geometry, geometry.model_bytes())
    job = PlannedJob(manifest, geometry, *fit_methods(manifest, geometry))
    return _Planned(job, make_plan(job, geometry.model_bytes()), dtype, serving, text_remarks(job))


def _phases(
    job: PlannedJob, manifest: Manifest, prices: Prices, evaluation: EvaluationTokens | None
) -> dict[str, float]:
    """Return the seconds by phase, without tasks and a healing. `manifest`: the job's, after `measuring_layers`."""
    phases = job_seconds(job, prices, evaluation.ids.shape if evaluation else ())
    evaluate, passes = phases.pop("evaluate", 0.0), prices.passes
    if manifest.evaluation.calibrate_prediction:
        phases["other sizes"] = OTHER_SIZES * _size_seconds(phases, passes)
    if manifest.measures_layers:
        alone = phase_seconds(prices.of_layers_alone(manifest))
        models = (BLOCKS + 1) / 2  # each run of layers passes only the layers from its own first one on
        phases["measured layers"] = _size_seconds(alone, passes) + models * scored_seconds(phases, passes)
    if evaluation is not None:
        phases["evaluate"] = (1 + manifest.evaluation.with_dense) * (WORKERS_SECONDS + evaluate)
    return phases


def _size_seconds(phases: Mapping[str, float], passes: PlannedPasses) -> float:
    """Return the seconds to compress a model to one more size, and to score it on held-out text."""
    return solving_seconds(phases) + phases["verify"] + scored_seconds(phases, passes)


def planned_samples(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """Return the manifest with the number of samples for the plan, and remarks about that number.

    For `samples: auto`, the number chosen in its run directory, or the largest one if none is chosen yet.
    """
    calibration = manifest.calibration
    if calibration is None or not calibration.chooses_samples:
        return manifest, []
    entered = RunDirectory(manifest.run_dir).ledger.get(SAMPLES)
    if entered is None:
        remark = f"the plan is for all {calibration.samples}; the job chooses a quarter, a half or all of them"
        return manifest, [f"calibration.samples: auto: {remark}"]
    return with_samples(manifest, entered.samples), [f"calibration.samples: auto: {entered.samples} are chosen"]


def stored_bytes(prices: Prices, manifest: Manifest) -> dict[str, int]:
    """Return the bytes between workers and those of commits, for the report."""
    every = layers_per_commit(prices) if manifest.resume.every == "auto" else manifest.resume.every
    return {
        "object_store_bytes": object_store_bytes(prices),
        "layers_per_commit": every,
        "committed_bytes": committed_bytes(prices, every),
    }


def seconds_of(phases: Mapping[str, float], rates: Rates) -> dict[str, Any]:
    """Return the rates, and the seconds by phase and in all, for the report."""
    return {"rates": rates.report(), "phases": dict(phases), "estimated_seconds": sum(phases.values())}


def verdict(
    manifest: Manifest, report: Mapping[str, Any], source: RateSource, remarks: Sequence[str]
) -> dict[str, Any]:
    """Return `fits`, as far as it can be known here, `limits` that are exceeded, and all `remarks`, for the report."""
    limits = exceeded_limits(manifest, report, source)
    here = [*_spilled(report), *_unused(manifest.workers)] if source.is_here else []
    return {"fits": not limits, "limits": limits, "remarks": [*remarks, *limits, *here]}


def _not_counted(manifest: Manifest, inputs: Inputs | None) -> list[str]:
    """Return remarks on what the plan does not count."""
    remarks = []
    if inputs is None and manifest.evaluation.perplexity is not None:
        remarks.append("evaluation.perplexity is not among the seconds: with --config its text is not read")
    return remarks + uncounted_healing(manifest)


def offloaded_layers(report: Mapping[str, Any]) -> list[str]:
    """Return a remark if the layers of a healing are in host memory, because the GPUs do not hold them."""
    if "healing_host_bytes" not in report:
        return []
    return [
        "heal: the GPUs do not hold the layers that train, which are in host memory, "
        f"{_gb(report['healing_host_bytes'])} GB for each of {report['healing_processes']} processes; steps take "
        "longer than with more workers (workers.max)"
    ]


def uncounted_healing(manifest: Manifest) -> list[str]:
    """Return a remark if the plan cannot count the healing."""
    if manifest.heal is None or manifest.heal.text is None or manifest.heal.tokens is not None:
        return []
    return ["heal is not among the seconds: the plan does not read heal.text; give heal.tokens"]


def _read_config(path: Path) -> tuple[dict[str, Any], Geometry, torch.dtype]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--config: {path} cannot be read ({reason(error)}); give the config.json of a model on the hub"
        ) from error
    if not isinstance(config, dict):
        raise InputError(f"--config: {path} holds no mapping of fields; give the config.json of a model on the hub")
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"--config: {path}: dtype: {config.get('dtype') or config.get('torch_dtype')!r} is none of torch's; set it "
            "to bfloat16, float16 or float32"
        )
    standard = standard_config(config)
    return standard, geometry_of(standard, 8 * dtype.itemsize), dtype


def rates_from(source: RateSource, manifest: Manifest, geometry: Geometry, dtype: torch.dtype) -> Rates:
    """Return the rates of this source. Raises InputError."""
    workers, shape = manifest.workers, ProbedShape.of(geometry, manifest)
    if source.gpu is not None:
        try:
            return rates_of(source.gpu)
        except ValueError as error:
            raise InputError(f"--gpu: {error}") from error
    if source.probe:
        from workers.cluster import connect, probe_workers  # and Ray

        connect(source.address, workers, source.connect_timeout_s, threading.Event().is_set)
        return probe_workers(workers, dtype, shape)
    map_large_tensors()  # as workers do
    threads = min(workers.cpus, machine_cores())
    measured = measured_rates(torch.device("cpu"), dtype, threads, workers.max, shape)
    if source.tflops is None:
        return measured
    return measured.with_operations(source.tflops * 1e12)


def exceeded_limits(manifest: Manifest, plan: Mapping[str, Any], source: RateSource) -> list[str]:
    """Return the limits of this machine, of the named GPU and of the disks that the job exceeds. The limits of other
    nodes are unknown."""
    faults = [*_disk_faults(manifest, plan)]
    if source.gpu is not None:
        faults = [*_gpu_faults(manifest, plan), *faults]
    if source.is_here:
        faults = [*_machine_faults(manifest, plan), *faults]
    return [f"does not fit: {fault}" for fault in faults]


def _gpu_faults(manifest: Manifest, plan: Mapping[str, Any]) -> Iterator[str]:
    device, healing = plan["rates"]["device_bytes"], plan.get("healing_bytes", 0)
    if plan["worker_device_bytes"] > device:
        yield (
            f"a worker needs {plan['worker_device_bytes'] / 1e9:.0f} GB of its GPU, which has {device / 1e9:.0f}; "
            "lower calibration.micro_batch, or take a larger one"
        )
    if manifest.workers.gpus and healing > device:
        yield device_fault(healing, plan["healing_processes"], device)


def _disk_faults(manifest: Manifest, plan: Mapping[str, Any]) -> Iterator[str]:
    run_dir_bytes = plan["run_dir_bytes"] + plan.get("healing_disk_bytes", 0)
    for name, needed in (("output", plan["output_bytes"]), ("run_dir", run_dir_bytes)):
        place = Path(getattr(manifest, name))
        if "://" in str(place):
            continue
        nearest = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
        free = shutil.disk_usage(nearest).free
        if needed > free:
            yield f"{name} takes {_gb(needed)} GB, {_gb(free)} are free at {nearest}"


def _machine_faults(manifest: Manifest, plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the limits of this machine's memory and cores that the workers exceed."""
    from workers.cluster import machine_bytes  # and Ray

    workers, machine = manifest.workers, machine_bytes()
    needed = plan["workers"] * plan["worker_host_bytes"] + plan["driver_peak_bytes"]
    if needed > machine:
        yield (
            f"{plan['workers']} workers of {_gb(plan['worker_host_bytes'])} GB and the driver take {_gb(needed)} GB of "
            f"memory, this machine has {_gb(machine)}; lower workers.max, or give --address of a cluster"
        )
    healing, on_host = plan.get("healing_bytes", 0), plan.get("healing_host_bytes", 0)
    processes = plan.get("healing_processes", 0)
    if not workers.gpus and healing * processes > machine:
        yield (
            f"heal trains in {processes} processes of {_gb(healing)} GB of memory, this machine has {_gb(machine)}; "
            "leave out heal, or give --address of a cluster"
        )
    if on_host * processes > machine:
        yield host_fault(on_host, processes, machine / processes)
    gpus = torch.cuda.device_count()
    if workers.gpus * workers.min > gpus:
        yield (
            f"workers.gpus: {workers.gpus:g} for each of {workers.min} workers, this machine has {gpus} GPUs; plan for "
            "one with --gpu NAME, or for a cluster with --address"
        )
    if fault := thread_fault(workers.cpus, machine_cores(), "this machine"):
        yield fault


def _spilled(plan: Mapping[str, Any]) -> list[str]:
    """Return a remark if Ray would spill to disk, which is slower but works."""
    from workers.cluster import object_store_room  # and Ray

    if plan["object_store_bytes"] <= (store := object_store_room()):
        return []
    return [
        f"spills to disk: workers exchange {_gb(plan['object_store_bytes'])} GB through Ray's object store, "
        f"which holds {_gb(store)} of it in this machine's memory and writes the rest to disk"
    ]


def _unused(workers: Workers) -> list[str]:
    """Return a remark if the workers leave GPUs or most cores of this machine unused."""
    unused = unused_here(workers)
    return [f"slower than it could be: {unused}"] if unused else []


def _gb(amount: float) -> str:
    return f"{amount / 1e9:,.1f}"


def serving_line(serving: Mapping[str, Any]) -> str:
    """Return a line that adds up the memory of serving, for a job with `budget.fit`."""
    names = ("weights", *(["copies"] if serving["copies"] else []), "cache", "activations", "overhead")
    parts = " + ".join(f"{name} {shown_bytes(serving[name])}" for name in names)
    sequences = f"{serving['sequences']} sequence{'s' if serving['sequences'] > 1 else ''}"
    return (
        f"{parts} = {shown_bytes(serving['total'])} of {memory_text(serving['memory'])}, {serving['engine']} on a "
        f"{serving['device'].upper()}, {sequences} of {serving['context']:,} tokens; the engine's figures are "
        f"{serving['source']}"
    )


def time_line(plan: Mapping[str, Any]) -> str:
    """Return the time of a job or a sweep, and its longest phases."""
    seconds, phases = plan["estimated_seconds"], plan["phases"]
    longest = sorted(phases, key=lambda phase: -phases[phase])[:LONGEST_PHASES]
    parts = ", ".join(f"{phase} {duration(phases[phase])}" for phase in longest)
    workers = f"{plan['workers']} worker{'s' if plan['workers'] > 1 else ''}"
    return f"about {duration(seconds)} with {workers}; longest: {parts}"
