"""The first and the last stages of a job: its cluster, its heartbeat; its OUTPUT, its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manifests.entries import CompleteEntry
from manifests.importing import quick_imports
from pipeline.checkpoint.assembling import Assembler
from pipeline.checkpoint.compression_record import SEAL, quick_faults
from pipeline.checkpoint.listing import companion_faults
from pipeline.checkpoint.output_directory import claim_files, survey_output
from pipeline.console.signals import deferred_signals, interrupt_on_signals
from pipeline.cost_model.remarks import source_remarks
from pipeline.driver.ledger_keys import COMPLETE, HEALED, HELD_OUT_SCORE, REUSED, SAMPLES, TEXTS, TRIED_SIZE
from pipeline.evaluation.losses import all_warnings
from pipeline.job.context import JobContext
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.output_scores import score_output, scores
from pipeline.job.prediction import prediction_of, tries_of
from pipeline.job.worker_session import Effort
from workers.in_process_pool import check_device
from workers.memory import peak_bytes


def heartbeat(job: JobContext) -> Heartbeat:
    """Return a context manager that renews the job's locks."""
    return Heartbeat(job.locks, job.run_dir, job.stop, lambda: job.observer.saved_state)


def join_cluster(job: JobContext, address: str | None, timeout_s: float) -> None:
    """Connect to Ray, unless the job runs in this process. Raises InputError when no cluster answers."""
    job.observer.stage("start")
    if job.in_process:
        check_device(job.manifest.workers)
        job.observer.say("all work is done in this process, without Ray")
        return
    with quick_imports():
        from workers.cluster import cluster_address, connect
        from workers.hardware import unused_here
    methods = "+".join(dict.fromkeys(entry.method for entry in job.manifest.methods))
    labels = {"lamina": job.name, "run_dir": job.run_dir.place, "output": job.output, "methods": methods}
    with deferred_signals(job.stop):
        trains = job.manifest.heal is not None
        cluster = connect(address, job.manifest.workers, timeout_s, job.stop.is_set, labels, trains)
    job.observer.say(f"Ray at {cluster}")
    if not cluster_address(address) and (unused := unused_here(job.manifest.workers)):
        job.observer.say(unused)


def finished_summary(job: JobContext) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the summary of a job that is finished in this OUTPUT, and the faults of the files there."""
    complete = job.ledger.get(COMPLETE) if job.fingerprint_check.reuses_entries else None
    if complete is None or complete.output != job.output:
        return None, []
    seal = complete.contract_sha256
    summary = {**complete.summary, "evaluation": scores(job, seal), "already_finished": True}
    output, trusted = job.manifest.output, job.manifest.model.trust_remote_code
    faults = quick_faults(output, seal) or companion_faults(output, job.inputs.source.storage, trusted)
    return warned(summary), faults


def assemble_output(job: JobContext) -> dict[str, Any]:
    """Assemble OUTPUT, the index last. Return the compression record. Raises InputError when files of others have
    appeared there."""

    def guard() -> None:
        """Raise LaminaError if the lock is lost or the source has changed."""
        job.run_dir.lock.check()
        job.watch.check_all()

    interrupt_on_signals(job.stop)
    job.observer.stage("assemble")
    assembler = Assembler(job.inputs, job.ledger, job.run_dir.storage, job.source_files, guard)
    replaceable = survey_output(assembler.output, job.ledger).replaceable()  # it may be hours since the job began
    layers = [entry.staged for key in job.ledger.keys("layer/") if (entry := job.ledger.get(key))]
    claim_files(job.ledger, assembler.output, assembler.names() | replaceable, layers)
    return assembler.run(replaceable)


def score_again(job: JobContext, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the missing scores of a finished job. Return the summary with all scores."""
    complete = job.ledger.get(COMPLETE)
    assert complete is not None
    job.observer.say(f"{job.manifest.output}: finished before; only scores are missing")
    evaluation = score_output(job, complete.contract_sha256)
    job.observer.stage(None)
    entered = warned({**complete.summary, "evaluation": evaluation})
    job.ledger.commit(COMPLETE, complete.model_copy(update={"summary": entered}))
    return warned({**summary, "evaluation": evaluation, "scored_now": True})


def warned(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary with its `warnings`."""
    return {**summary, "warnings": all_warnings(summary)}


def finish(
    job: JobContext, effort: Effort, compression: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> dict[str, Any]:
    """Enter the summary of the finished job, and return it."""
    job.observer.stage(None)
    figures = {
        "output": job.manifest.output,
        "counts": compression["counts"],
        "layers": compression["layers"],
        "evaluation": dict(evaluation),
        "held_out": held_out.as_json() if (held_out := job.ledger.get(HELD_OUT_SCORE)) else None,
        "samples": samples.as_json() if (samples := job.ledger.get(SAMPLES)) else None,
        "texts": texts.as_json() if (texts := job.ledger.get(TEXTS)) else None,
        **job.read_figures(),
        "tries": tries_of(job) if job.ledger.get(TRIED_SIZE) else [],
        "prediction": prediction_of(job),
        "seconds": {"phases": job.observer.seconds, "units": effort.units, "total": job.seconds()},
        "seconds_saved": reused.seconds if (reused := job.ledger.get(REUSED)) else 0.0,
        "peak_bytes": {"driver": peak_bytes(), "workers": effort.peak_bytes},
        "plan": job.plan.report(),
    }
    asked = job.ledger.get(HEALED) if job.manifest.heal else None  # without layers, none was better than the solve
    if healed := asked.figures if asked else compression.get("healed"):
        figures["healed"] = healed
    if one_text := source_remarks(job.inputs.planned):
        figures["one_text"] = one_text[0]
    summary = warned(figures)
    complete = CompleteEntry(output=job.output, contract_sha256=compression[SEAL], summary=summary)
    job.ledger.commit(COMPLETE, complete)
    return summary
