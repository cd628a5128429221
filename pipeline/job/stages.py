"""The stages of a job in the order in which `pipeline.run` tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.checkpoint.compression_record import SEAL
from pipeline.console.signals import catch_signals, deferred_signals
from pipeline.evaluation.perplexity import measure_perplexity
from pipeline.job.compressing import Effort, assemble_output, compress_layers
from pipeline.job.context import JobContext, begin, finished_summary, open_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.run_record import recorded
from workers.cluster import connect
from workers.memory import peak_bytes

__all__ = [
    "assemble_output",
    "begin",
    "compress_layers",
    "evaluate_output",
    "finish",
    "finished_summary",
    "heartbeat",
    "join_cluster",
    "open_job",
    "recorded",
]


def heartbeat(job: JobContext) -> Heartbeat:
    """Renews the job's locks while it is entered."""
    return Heartbeat(job.locks, job.run_dir, job.stop, lambda: job.observer.state)


def join_cluster(job: JobContext, address: str | None) -> None:
    """Connects to Ray. Raises InputError when no cluster answers."""
    job.observer.stage("start")
    with deferred_signals(job.stop):
        job.observer.say(f"Ray at {connect(address, job.manifest.workers)}")


def evaluate_output(job: JobContext) -> dict[str, Any]:
    """Scores of OUTPUT, loaded as a user loads it: kind of score -> figures."""
    wanted = job.manifest.evaluation.perplexity
    if wanted is None:
        return {}
    catch_signals(job.stop)
    found = measure_perplexity(
        job.manifest.output,
        wanted.text,
        wanted.window,
        job.manifest.workers,
        torch.float32,
        job.stop,
        job.observer,
        trust_remote_code=job.manifest.model.trust_remote_code,
    )
    job.observer.say(f"perplexity {found['perplexity']:.4f} over {found['tokens']:,} tokens")
    return {"perplexity": found}


def finish(
    job: JobContext, effort: Effort, compression: Mapping[str, Any], scores: Mapping[str, Any]
) -> dict[str, Any]:
    """Enters that the job is done, with its summary."""
    job.observer.stage(None)
    summary = {
        "output": job.manifest.output,
        "counts": compression["counts"],
        "layers": compression["layers"],
        "evaluation": dict(scores),
        "seconds": {"phases": job.observer.seconds, "units": effort.units, "total": job.seconds()},
        "seconds_saved": (job.ledger.get("reused") or {}).get("seconds", 0.0),
        "peak_bytes": {"driver": peak_bytes(), "workers": effort.peak_bytes},
        "plan": job.plan.report(),
    }
    job.ledger.commit("complete", {"output": job.output, "contract_sha256": compression[SEAL], "summary": summary})
    return summary
