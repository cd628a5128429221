"""What `python -m pipeline.plan` says: bytes and operations, seconds by phase, and what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manifests.errors import InputError, reason
from manifests.schema import Manifest
from pipeline.checkpoint.planned_size import plan_of
from pipeline.cost_model.estimate import Plan, make_plan, rank_remarks
from pipeline.cost_model.passes import gradient_tokens, pass_of
from pipeline.cost_model.phases import (
    WORKERS_SECONDS,
    Pass,
    committed_bytes,
    evaluate_seconds,
    layers_per_commit,
    object_store_bytes,
    phase_seconds,
)
from pipeline.cost_model.probe import ProbedShape, measured_rates
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.cost_model.work import LayerWork, layer_work, scoring_flops
from pipeline.families.family import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs.calibration import evaluation_tokens
from pipeline.inputs.job_inputs import Inputs, fit_methods, read_inputs
from pipeline.methods.method import Task
from workers.hardware import machine_cores, thread_fault
from workers.memory import map_large_tensors


@dataclass(frozen=True)
class Asked:
    """Where rates come from: a GPU by name, one figure for all products, a worker that is measured, or this machine."""

    gpu: str | None = None
    tflops: float | None = None
    probe: bool = False
    address: str | None = None
    connect_timeout_s: float = 30.0


def plan_report(manifest: Manifest, config: Path | None, asked: Asked) -> dict[str, Any]:
    """As JSON. With `config`, from that file alone: no source is looked at. Raises InputError."""
    inputs = read_inputs(manifest, weights=False) if config is None else None
    if inputs is not None:
        geometry, tasks, dtype, remarks = inputs.geometry, inputs.tasks, inputs.dtype, list(inputs.remarks)
    else:
        assert config is not None
        geometry, dtype = _of_config(config)
        _, tasks = fit_methods(manifest, geometry)
        remarks = list(rank_remarks(manifest, geometry, tasks))
    plan = (
        plan_of(inputs)
        if inputs is not None
        else make_plan(manifest, geometry, tasks, dtype.itemsize, geometry.model_bytes())
    )
    rates = asked_rates(manifest, geometry, dtype, asked)
    work, way = planned_work(manifest, geometry, tasks, dtype, plan), pass_of(manifest, geometry, tasks)
    phases = phase_seconds(work, rates, way) | scoring_seconds(inputs, rates, way.workers)
    report = plan.report() | stored_bytes(work, way, rates, manifest) | seconds_of(phases, rates)
    remarks += _not_counted(manifest, inputs)
    return report | verdict(manifest, report, asked, remarks)


def planned_work(
    manifest: Manifest, geometry: Geometry, tasks: Sequence[Task], dtype: torch.dtype, plan: Plan
) -> LayerWork:
    """A layer's, of a job with this plan."""
    tokens, kept = gradient_tokens(manifest, geometry, tasks), plan.expected_numbers / plan.dense_numbers
    return layer_work(manifest, geometry, tasks, dtype.itemsize, tokens, kept)


def stored_bytes(work: LayerWork, way: Pass, rates: Rates, manifest: Manifest) -> dict[str, int]:
    """For the report: bytes between workers, and of commits."""
    every = manifest.resume.every
    every = layers_per_commit(work, rates, way) if every == "auto" else every
    return {
        "object_store_bytes": object_store_bytes(work, rates, way),
        "layers_per_commit": every,
        "committed_bytes": committed_bytes(work, way, every),
    }


def seconds_of(phases: Mapping[str, float], rates: Rates) -> dict[str, Any]:
    """For the report: rates, seconds by phase and in all."""
    return {"rates": rates.report(), "phases": dict(phases), "estimated_seconds": sum(phases.values())}


def verdict(manifest: Manifest, report: Mapping[str, Any], asked: Asked, remarks: Sequence[str]) -> dict[str, Any]:
    """For the report: `fits`, as far as can be known from here, `limits` where it does not, and all `remarks`."""
    limits = what_does_not_fit(manifest, report, asked)
    spilled = _beyond_the_object_store(report) if _is_here(asked) else []
    return {"fits": not limits, "limits": limits, "remarks": [*remarks, *limits, *spilled]}


def _not_counted(manifest: Manifest, inputs: Inputs | None) -> list[str]:
    """What is measured on OUTPUT, and for how long is not known."""
    found = []
    if inputs is None and manifest.evaluation.perplexity is not None:
        found.append("evaluation.perplexity is not among the seconds: with --config its text is not read")
    if manifest.evaluation.tasks:
        found.append("evaluation.tasks is not among the seconds")
    return found


def scoring_seconds(inputs: Inputs | None, rates: Rates, workers: int) -> dict[str, float]:
    """The phase of evaluation, its workers' start included, where the text is here to be counted. Raises InputError
    about it."""
    tokens = evaluation_tokens(inputs) if inputs else None
    if inputs is None or tokens is None:
        return {}
    perplexity = inputs.manifest.evaluation.perplexity
    models = 1 + (perplexity is not None and perplexity.dense)
    flops = models * tokens.numel() * scoring_flops(inputs.geometry, tokens.shape[-1])
    return {"evaluate": models * WORKERS_SECONDS + evaluate_seconds(flops, rates, workers)}


def _of_config(path: Path) -> tuple[Geometry, torch.dtype]:
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
    return geometry_of(standard_config(config), 8 * dtype.itemsize), dtype


def asked_rates(manifest: Manifest, geometry: Geometry, dtype: torch.dtype, asked: Asked) -> Rates:
    """From where they are asked for. Raises InputError."""
    workers, shape = manifest.workers, ProbedShape.of(geometry, manifest)
    if asked.gpu is not None:
        try:
            return rates_of(asked.gpu)
        except ValueError as error:
            raise InputError(f"--gpu: {error}") from error
    if asked.probe:
        from workers.cluster import connect, probe_workers  # and Ray

        connect(asked.address, workers, asked.connect_timeout_s, threading.Event().is_set)
        return probe_workers(workers, dtype, shape)
    map_large_tensors()  # as workers do
    threads = min(workers.cpus, machine_cores())
    measured = measured_rates(torch.device("cpu"), dtype, threads, workers.max, shape)
    if asked.tflops is None:
        return measured
    return measured.with_operations(asked.tflops * 1e12)


def _is_here(asked: Asked) -> bool:
    """Whether the workers would be on this machine."""
    return asked.gpu is None and not asked.address and not os.environ.get("RAY_ADDRESS")


def _beyond_this_machine(manifest: Manifest, plan: Mapping[str, Any]) -> list[str]:
    """In its memory and its cores, where all workers are here."""
    from workers.cluster import machine_bytes  # and Ray

    found, machine = [], machine_bytes()
    needed = plan["workers"] * plan["worker_host_bytes"] + plan["driver_peak_bytes"]
    if needed > machine:
        found.append(
            f"does not fit: {plan['workers']} workers of {plan['worker_host_bytes'] / 1e9:,.1f} GB and the driver take "
            f"{needed / 1e9:,.1f} GB of memory, this machine has {machine / 1e9:,.1f}; lower workers.max, or give "
            "--address of a cluster"
        )
    gpus, workers = torch.cuda.device_count(), manifest.workers
    if workers.gpus * workers.min > gpus:
        found.append(
            f"does not fit: workers.gpus: {workers.gpus:g} for each of {workers.min} workers, this machine has {gpus} "
            "GPUs; plan for one with --gpu NAME, or for a cluster with --address"
        )
    if fault := thread_fault(manifest.workers.cpus, machine_cores(), "this machine"):
        found.append(f"does not fit: {fault}")
    return found


def _beyond_the_object_store(plan: Mapping[str, Any]) -> list[str]:
    """What is slower for it, and works."""
    from workers.cluster import object_store_room  # and Ray

    if plan["object_store_bytes"] <= (store := object_store_room()):
        return []
    return [
        f"goes to disk: what workers pass on takes {plan['object_store_bytes'] / 1e9:,.1f} GB, a Ray of this "
        f"machine holds {store / 1e9:,.1f} of it in memory and writes the rest to disk"
    ]


def what_does_not_fit(manifest: Manifest, plan: Mapping[str, Any], asked: Asked) -> list[str]:
    """Here, or on the GPU that was named; what another node has is not known."""
    found = _beyond_this_machine(manifest, plan) if _is_here(asked) else []
    if asked.gpu is not None and plan["worker_device_bytes"] > plan["rates"]["device_bytes"]:
        found.append(
            f"does not fit: a worker needs {plan['worker_device_bytes'] / 1e9:.0f} GB of its GPU, which has "
            f"{plan['rates']['device_bytes'] / 1e9:.0f}; lower calibration.micro_batch, or take a larger one"
        )
    for name, needed in (("output", plan["output_bytes"]), ("run_dir", plan["run_dir_bytes"])):
        place = Path(getattr(manifest, name))
        if "://" in str(place):
            continue
        nearest = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
        free = shutil.disk_usage(nearest).free
        if needed > free:
            found.append(f"does not fit: {name} takes {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} are free at {nearest}")
    return found
