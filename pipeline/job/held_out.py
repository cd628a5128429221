"""Scores the compressed layers on windows of the calibration texts beyond the samples, which shows unsuitable text.

The dense model's outputs on these windows are stored once, and every size is compared with them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from manifests.entries import HeldOutEntry, HeldOutScoreEntry
from manifests.errors import CorruptError
from manifests.records import ArrayRecord
from pipeline.driver.job_spec import LayersEntered, staged_layer
from pipeline.driver.ledger_dependencies import dependents, retract_changed
from pipeline.driver.ledger_keys import HELD_OUT, HELD_OUT_SCORE, LOSS_RATIOS
from pipeline.driver.recovery import Repairs
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.driver.scoring import FIRST, Outputs, Scorer, Start, States, score_beside_dense
from pipeline.evaluation.losses import damage_warnings, perplexity_of
from pipeline.job.context import JobContext
from pipeline.job.worker_session import JobWorkers
from pipeline.ranks.calibration import runs_of_layers
from pipeline.reporting.summary import held_out_line
from pipeline.units.scores import Scored, Windows

DENSE, COMPRESSED = "held-out-dense", "held-out"  # names of the scored models in the ledger


def score_held_out(
    job: JobContext, workers: JobWorkers, scored: HeldOutScoreEntry | None = None
) -> HeldOutScoreEntry | None:
    """Return the divergence from the dense model and both perplexities, entered once; None if the texts have no more
    tokens.

    `scored`: the result of `scoring_held_out` for these layers.

    Raises:
        Interrupted: a signal came; entries stay.
        CorruptError: a staged layer is damaged.
    """
    if job.held_out is None:
        return None
    entered = job.ledger.get(HELD_OUT_SCORE)
    if entered is None:
        entered = scored or _score(job, workers)
        job.ledger.commit(HELD_OUT_SCORE, entered)
        workers.scorer(job).forget(COMPRESSED)
        if not job.inputs.passes.keep_statistics:
            _drop(job)  # no other size will be tried
        figures = entered.as_json()
        job.observer.say(held_out_line(figures) + ("" if job.inputs.rounds else ", before rounding"))
        for warning in damage_warnings({"held_out": figures}):
            job.observer.say(warning, logging.WARNING)
    return entered


def scoring_held_out(
    workers: JobWorkers, job: JobContext, scheduler: Scheduler, layers: LayersEntered
) -> Coroutine[HeldOutScoreEntry | None]:
    """Do the work of `score_held_out` in the background, while the layers are compressed. Enter only the dense
    model's outputs."""
    if job.held_out is None or job.ledger.get(HELD_OUT_SCORE) is not None:
        return None
    windows, outputs = _stored(job, workers.always)
    dense = outputs or scheduler.spawn_background(_scoring_dense(workers, job, scheduler, windows))
    scorer = workers.scorer(job, scheduler)
    return _entry((yield from score_beside_dense(scorer, windows, COMPRESSED, layers, dense)))


def _scoring_dense(
    workers: JobWorkers, job: JobContext, scheduler: Scheduler, windows: Windows
) -> Coroutine[tuple[ArrayRecord, ...]]:
    scorer = workers.scorer(job, scheduler)
    states = yield from scorer.states_coroutine(windows, DENSE, _dense_layers(job), _measured_starts(job))
    _keep(job, scorer, workers.always, windows, states)
    return states.outputs


def unscored_windows(job: JobContext) -> torch.Tensor | None:
    """Return the held-out windows if the dense model's outputs on them are not entered, else None."""
    entered = job.ledger.get(HELD_OUT)
    return job.held_out if entered is None or entered.outputs is None else None


def enter_dense_outputs(job: JobContext, workers: JobWorkers, outputs: tuple[ArrayRecord, ...]) -> None:
    """Enter the dense model's outputs on the held-out windows, by shard."""
    windows, _ = _stored(job, workers.always)
    _enter(job, workers.always, windows, States(outputs, {}))


def forget_other_text(job: JobContext) -> None:
    """Retract scores if the job's text has other held-out tokens than the stored ones, and layers whose ranks follow
    such scores.

    The fingerprint covers the samples alone: text beyond them may have changed since.
    """
    entered = job.ledger.get(HELD_OUT)
    if entered is None or job.held_out is None:
        return
    try:
        stored = job.run_dir.activations.open(entered.tokens).read(0, entered.tokens.shape[0])
    except CorruptError:
        return  # stored again when they are next needed
    if not torch.equal(stored, job.held_out.to(torch.int32)):
        retract_changed(job.ledger, job.ledger.keys(), dependents([HELD_OUT], "changed"))
        if job.ledger.keys("block/"):  # else the layers' ranks do not follow from this text
            retract_changed(job.ledger, job.ledger.keys(), ["block"])
        _drop(job)


def divergence_with(job: JobContext, workers: JobWorkers, compressed: Collection[int], name: str) -> float:
    """Return the divergence of the model in which these layers alone are compressed. `name`: of this model. Raises
    Interrupted."""
    divergence = _score(job, workers, compressed, name).divergence
    workers.scorer(job).forget(name)
    return divergence


def _score(
    job: JobContext, workers: JobWorkers, compressed: Collection[int] | None = None, name: str = COMPRESSED
) -> HeldOutScoreEntry:
    """Score the staged layers, or some of them among dense ones. Damaged tokens or dense outputs are computed again."""
    repairs, layers = Repairs(job.ledger, [HELD_OUT], job.observer), range(job.inputs.geometry.num_layers)
    chosen = layers if compressed is None else compressed
    while True:
        try:
            windows, outputs = _dense(job, workers)
            staged = [staged_layer(job.ledger, layer) if layer in chosen else None for layer in layers]
            return _entry(workers.scorer(job).score(windows, name, staged, outputs, _start(job, min(chosen))))
        except CorruptError as error:
            workers.pool.cancel_pending()
            repairs.invalidate(error)


def _entry(scored: Scored) -> HeldOutScoreEntry:
    loss, dense_loss = scored.loss / scored.tokens, scored.dense_loss / scored.tokens
    return HeldOutScoreEntry(
        divergence=scored.divergence / scored.tokens,
        dense_perplexity=perplexity_of(dense_loss),
        perplexity=perplexity_of(loss),
        tokens=scored.tokens,
        dense_loss=dense_loss,
        loss=loss,
    )


def _dense(job: JobContext, workers: JobWorkers) -> tuple[Windows, Outputs]:
    """Return the held-out tokens, and the outputs of the dense model's last layer on them. Compute them if they are
    not entered."""
    windows, outputs = _stored(job, workers.always)
    if outputs is None:
        scorer = workers.scorer(job)
        states = scorer.states(windows, DENSE, _dense_layers(job), _measured_starts(job))
        _keep(job, scorer, workers.always, windows, states)
        outputs = states.outputs
    return windows, outputs


def _measured_starts(job: JobContext) -> set[int]:
    """Return the layers from which runs of layers will be measured, `budget.measure_layers`, except the first layer."""
    if not job.manifest.measures_layers or job.ledger.get(LOSS_RATIOS) is not None:
        return set()
    return {block[0] for block in runs_of_layers(job.inputs.claimed_layers)} - {0}


def _start(job: JobContext, first: int) -> Start:
    """Return the latest stored hidden states of the dense model that enter a layer up to `first`, the first compressed
    one."""
    entered = job.ledger.get(HELD_OUT)
    inputs = {int(layer): records for layer, records in (entered.inputs if entered else {}).items()}
    layer = max((layer for layer in inputs if layer <= first), default=None)
    return FIRST if layer is None else Start(layer, inputs[layer])


def drop_inputs(job: JobContext, workers: JobWorkers) -> None:
    """Drop the dense model's hidden states that only measured layers needed."""
    entered = job.ledger.get(HELD_OUT)
    if entered is None or not entered.inputs:
        return
    job.ledger.commit(HELD_OUT, entered.model_copy(update={"inputs": {}}))
    for record in (record for inputs in entered.inputs.values() for record in inputs):
        workers.always.remove(record)
        job.run_dir.activations.drop(record)


def _dense_layers(job: JobContext) -> list[None]:
    return [None] * job.inputs.geometry.num_layers


def _stored(job: JobContext, always: list[ArrayRecord]) -> tuple[Windows, tuple[ArrayRecord, ...] | None]:
    """Store the held-out tokens if they are not stored. Return them, and the dense model's outputs on them if these
    are entered."""
    entered = job.ledger.get(HELD_OUT)
    if entered is None:
        assert job.held_out is not None
        entered = HeldOutEntry(tokens=job.run_dir.activations.write_tokens(job.held_out.to(torch.int32)))
        job.ledger.commit(HELD_OUT, entered)
        always.append(entered.tokens)
    return _windows(job, entered.tokens), entered.outputs


def _keep(job: JobContext, scorer: Scorer, always: list[ArrayRecord], windows: Windows, states: States) -> None:
    _enter(job, always, windows, states)
    scorer.forget(DENSE)


def _enter(job: JobContext, always: list[ArrayRecord], windows: Windows, states: States) -> None:
    assert windows.tokens is not None, "held-out tokens are stored"
    inputs = {f"{layer:05d}": records for layer, records in states.inputs.items()}
    entry = HeldOutEntry(tokens=windows.tokens, outputs=states.outputs, inputs=inputs)
    job.ledger.commit(HELD_OUT, entry)
    always.extend(entry.hidden_states)


def _windows(job: JobContext, tokens: ArrayRecord) -> Windows:
    """Return the windows, scored in float32, or in float64 if the model has it.

    A narrower dtype would add its rounding to the error of the compression.
    """
    calibration = job.manifest.calibration
    assert calibration is not None, "there is no text to hold out from"
    dtype = torch.promote_types(job.inputs.dtype, torch.float32)
    name = str(dtype).removeprefix("torch.")
    batch, prefix = calibration.micro_batch, len(job.prefix)
    return Windows.even(tokens.shape[0], calibration.shards, name, batch, tokens, prefix, models=2)


def _drop(job: JobContext) -> None:
    entered = job.ledger.get(HELD_OUT)
    if entered is not None:
        job.ledger.retract(HELD_OUT)
        for record in (entered.tokens, *entered.hidden_states):
            job.run_dir.activations.drop(record)
