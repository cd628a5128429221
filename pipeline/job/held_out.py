"""A guard against the wrong text: the compressed layers, scored on windows of the calibration texts beyond the samples.

What leaves the dense model on them is stored once and serves every try at a size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from manifests.errors import CorruptError
from manifests.records import ArrayRecord, HeldOutEntry, HeldOutScoreEntry, Key
from pipeline.computation import staged_layer
from pipeline.console.signals import catch_signals
from pipeline.console.summary import held_out_line
from pipeline.evaluation.divergence import compare, dense_outputs
from pipeline.job.compressing import worker_config
from pipeline.job.context import JobContext, driver_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.pool import worker_pool
from pipeline.keys import HELD_OUT, HELD_OUT_SCORE, TRIES
from workers.config import WorkerConfig


def score_held_out(job: JobContext, heartbeat: Heartbeat) -> HeldOutScoreEntry | None:
    """Divergence from the dense model and both perplexities, entered once; None where the texts have no more tokens.

    Raises:
        Interrupted: a signal came; what is entered stays.
    """
    if job.held_out is None:
        return None
    entered = job.ledger.get(HELD_OUT_SCORE)
    if entered is None:
        try:
            entered = _measured(job, heartbeat)
        except CorruptError as error:
            job.observer.repaired(str(error), [HELD_OUT])
            job.ledger.retract(HELD_OUT)
            entered = _measured(job, heartbeat)
        job.ledger.commit(HELD_OUT_SCORE, entered)
        if not driver_job(job.inputs).keep_statistics:
            _drop(job)  # no other size will be tried
        job.observer.say(held_out_line(entered.as_json()))
    return entered


def forget_other_text(job: JobContext) -> None:
    """Takes back what was measured on held-out tokens that are not those of the job's text any more.

    The fingerprint covers the samples alone: text beyond them may have changed since.
    """
    entered = job.ledger.get(HELD_OUT)
    if entered is None or job.held_out is None:
        return
    try:
        stored = job.run_dir.activations.open(entered.tokens).read(0, entered.tokens.shape[0])
    except CorruptError:
        return  # made again when it is next needed
    if not torch.equal(stored, job.held_out.to(torch.int32)):
        measured: list[Key[Any]] = [HELD_OUT_SCORE, *job.ledger.keys(TRIES)]
        for key in measured:
            job.ledger.retract(key)
        _drop(job)


def _measured(job: JobContext, heartbeat: Heartbeat) -> HeldOutScoreEntry:
    assert job.held_out is not None
    catch_signals(job.stop)
    entered = job.ledger.get(HELD_OUT)
    tokens = entered.tokens if entered else job.run_dir.activations.write_tokens(job.held_out.to(torch.int32))
    setup, layers = _worker_config(job, tokens), job.inputs.geometry.num_layers
    with worker_pool(setup, job.manifest.workers, job.stop, job.observer) as pool, heartbeat.attending(pool):
        outputs = entered.outputs if entered else dense_outputs(pool, layers, setup.shards, job.observer)
        if entered is None:
            job.ledger.commit(HELD_OUT, HeldOutEntry(tokens=tokens, outputs=outputs))
        return compare(pool, [staged_layer(job.ledger, layer) for layer in range(layers)], outputs, job.observer)


def _drop(job: JobContext) -> None:
    entered = job.ledger.get(HELD_OUT)
    if entered is not None:
        job.ledger.retract(HELD_OUT)
        for record in (entered.tokens, *entered.outputs):
            job.run_dir.activations.drop(record)


def _worker_config(job: JobContext, tokens: ArrayRecord) -> WorkerConfig:
    """In float32, or in float64 if the model is: what rounding does is not what compression does."""
    setup = worker_config(job, tokens)
    windows = tokens.shape[0]
    dtype = torch.promote_types(setup.dtype, torch.float32)
    return replace(setup, shards=min(setup.shards, windows), dtype=dtype, gradient_samples=0)
