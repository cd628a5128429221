"""A guard against the wrong text: the compressed layers, scored on windows of the calibration texts beyond the samples.

What leaves the dense model on them is stored once and serves every try at a size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from manifests.entries import HeldOutEntry, HeldOutScoreEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, Key
from pipeline.driver.background_pool import BackgroundPool
from pipeline.driver.job_spec import LayersEntered, staged_layer
from pipeline.driver.ledger_keys import HELD_OUT, HELD_OUT_SCORE, TRIES
from pipeline.driver.recovery import Repairs
from pipeline.driver.scheduler import NOTHING_DUE, TaskStream
from pipeline.driver.scoring import Scorer
from pipeline.evaluation.losses import damage_warnings, perplexity_of
from pipeline.job.context import JobContext, driver_job
from pipeline.job.worker_session import JobWorkers
from pipeline.reporting.summary import held_out_line
from pipeline.units.scores import Scored, Windows

DENSE, COMPRESSED = "held-out-dense", "held-out"  # as the ledger names what is scored


def score_held_out(
    job: JobContext, workers: JobWorkers, found: HeldOutScoreEntry | None = None
) -> HeldOutScoreEntry | None:
    """Divergence from the dense model and both perplexities, entered once; None where the texts have no more tokens.

    `found`: what `scoring_held_out` gave, of these layers.

    Raises:
        Interrupted: a signal came; what is entered stays.
        CorruptError: a staged layer is damaged.
    """
    if job.held_out is None:
        return None
    entered = job.ledger.get(HELD_OUT_SCORE)
    if entered is None:
        entered = found or _measured(job, workers)
        job.ledger.commit(HELD_OUT_SCORE, entered)
        workers.scorer(job).forget(COMPRESSED)
        if not driver_job(job.inputs).keep_statistics:
            _drop(job)  # no other size will be tried
        measured = entered.as_json()
        job.observer.say(held_out_line(measured))
        for warning in damage_warnings({"held_out": measured}):
            job.observer.say(warning, logging.WARNING)
    return entered


def scoring_held_out(
    workers: JobWorkers, job: JobContext, background: BackgroundPool, layers: LayersEntered
) -> TaskStream[HeldOutScoreEntry | None]:
    """The same while the layers are compressed, if it will be asked for; nothing of it is entered but what the dense
    model gives. Several workers go through both models side by side, one goes through one after the other."""
    if job.held_out is None or job.ledger.get(HELD_OUT_SCORE) is not None:
        return None
    windows, outputs = _held(job, workers.always)
    dense = background.add(_scoring_dense(workers, job, background, windows)) if outputs is None else None
    while dense and dense.live and background.size < 2:
        yield NOTHING_DUE

    def dense_outputs() -> Sequence[ArrayRecord] | None:
        if dense is None or dense.live or dense.outcome:
            return dense.outcome if dense else outputs
        raise LostInputError("held-out text: what the dense model gives is lost")

    scorer = workers.scorer_in_background(job, background, lambda: dense is None or not dense.live)
    found = yield from scorer.score_stream(windows, COMPRESSED, layers, dense_outputs)
    return _entry(found)


def _scoring_dense(
    workers: JobWorkers, job: JobContext, background: BackgroundPool, windows: Windows
) -> TaskStream[tuple[ArrayRecord, ...]]:
    scorer = workers.scorer_in_background(job, background)
    outputs = yield from scorer.outputs_stream(windows, DENSE, _dense_layers(job))
    _keep(job, scorer, workers.always, outputs)
    return outputs


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


def _measured(job: JobContext, workers: JobWorkers) -> HeldOutScoreEntry:
    """Of the layers as they are staged. Damaged tokens or dense outputs are made again."""
    repairs, layers = Repairs(job.ledger, [HELD_OUT], job.observer), range(job.inputs.geometry.num_layers)
    while True:
        try:
            windows, outputs = _dense(job, workers)
            staged = [staged_layer(job.ledger, layer) for layer in layers]
            found = workers.scorer(job).score(windows, COMPRESSED, staged, outputs)
        except CorruptError as error:
            workers.pool.cancel_pending()
            repairs.invalidate(error)
        else:
            return _entry(found)


def _entry(found: Scored) -> HeldOutScoreEntry:
    loss, dense_loss = found.loss / found.tokens, found.dense_loss / found.tokens
    return HeldOutScoreEntry(
        divergence=found.divergence / found.tokens,
        dense_perplexity=perplexity_of(dense_loss),
        perplexity=perplexity_of(loss),
        tokens=found.tokens,
        dense_loss=dense_loss,
        loss=loss,
    )


def _dense(job: JobContext, workers: JobWorkers) -> tuple[Windows, Sequence[ArrayRecord]]:
    """The held-out tokens, and what leaves the dense model's last layer on them: entered, or made now."""
    windows, outputs = _held(job, workers.always)
    if outputs is None:
        scorer = workers.scorer(job)
        outputs = scorer.outputs(windows, DENSE, _dense_layers(job))
        _keep(job, scorer, workers.always, outputs)
    return windows, outputs


def _dense_layers(job: JobContext) -> list[None]:
    return [None] * job.inputs.geometry.num_layers


def _held(job: JobContext, always: list[ArrayRecord]) -> tuple[Windows, tuple[ArrayRecord, ...] | None]:
    """The held-out tokens, stored by now; and the dense model's outputs on them, if they are."""
    entered = job.ledger.get(HELD_OUT)
    if entered is None:
        assert job.held_out is not None
        entered = HeldOutEntry(tokens=job.run_dir.activations.write_tokens(job.held_out.to(torch.int32)))
        job.ledger.commit(HELD_OUT, entered)
        always.append(entered.tokens)
    return _windows(job, entered.tokens), entered.outputs


def _keep(job: JobContext, scorer: Scorer, always: list[ArrayRecord], outputs: tuple[ArrayRecord, ...]) -> None:
    entered = job.ledger.get(HELD_OUT)
    assert entered is not None
    job.ledger.commit(HELD_OUT, HeldOutEntry(tokens=entered.tokens, outputs=outputs))
    always.extend(outputs)
    scorer.forget(DENSE)


def _windows(job: JobContext, tokens: ArrayRecord) -> Windows:
    """In float32, or in float64 if the model is: what rounding does is not what compression does."""
    calibration = job.manifest.calibration
    assert calibration is not None, "there is no text to hold out from"
    dtype = torch.promote_types(job.inputs.dtype, torch.float32)
    name = str(dtype).removeprefix("torch.")
    return Windows.even(tokens.shape[0], calibration.shards, name, calibration.micro_batch, tokens)


def _drop(job: JobContext) -> None:
    entered = job.ledger.get(HELD_OUT)
    if entered is not None:
        job.ledger.retract(HELD_OUT)
        for record in (entered.tokens, *(entered.outputs or ())):
            job.run_dir.activations.drop(record)
