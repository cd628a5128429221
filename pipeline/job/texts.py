"""A check against unsuitable text: the dense model's losses on the calibration samples and on the evaluation text.

Both texts are cut into windows of the same length, because a loss falls with the length of the window. The check runs
before any other pass, so that a user who sees the warning can stop the job.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from manifests.entries import TextLoss, TextsEntry
from manifests.errors import CorruptError
from manifests.records import ArrayRecord, StagedRecord
from pipeline.driver.ledger_keys import TEXTS
from pipeline.driver.recovery import REPAIRS
from pipeline.evaluation.losses import text_warnings, texts_line
from pipeline.inputs.calibration import tokens_digest
from pipeline.job.context import JobContext
from pipeline.job.worker_session import JobWorkers
from pipeline.units.scores import Scored, Windows
from pipeline.units.sharding import text_windows

NAME = "texts"  # of the dense model in the ledger while both texts are scored


def check_texts(job: JobContext, workers: JobWorkers) -> None:
    """Enters the dense model's losses on both texts, once for the same tokens. Reports them, and warns if they differ
    much. Does nothing for a job without calibration text.

    Raises:
        Interrupted: a signal came.
    """
    if job.tokens is None:
        return
    samples, evaluation = compared_windows(job.tokens, job.evaluation)
    ids = torch.cat((samples, evaluation)).to(torch.int32)
    of, entered = tokens_digest(ids), job.ledger.get(TEXTS)
    assert of is not None
    if entered is None or entered.of != of:
        losses = _losses(job, workers, ids, len(samples))
        entered = TextsEntry(of=of, window=ids.shape[1], **losses)
        job.ledger.commit(TEXTS, entered)
    figures = entered.as_json()
    job.observer.say(texts_line(figures))
    for warning in text_warnings(figures):
        job.observer.say(warning, logging.WARNING)


def compared_windows(samples: torch.Tensor, evaluation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns windows (n, length) of the calibration samples and of the evaluation text, evenly spread over each.

    The length is that of a sample, or of the evaluation text if that is shorter.
    """
    length = samples.shape[1] if evaluation is None else min(samples.shape[1], evaluation.numel())
    if evaluation is None:
        return _spread(samples), samples[:0]
    whole = evaluation.numel() // length
    return _spread(samples[:, :length]), _spread(evaluation.flatten()[: whole * length].view(whole, length))


def _spread(windows: torch.Tensor) -> torch.Tensor:
    count = text_windows(*windows.shape)
    return windows[torch.arange(count) * len(windows) // count]


def _losses(job: JobContext, workers: JobWorkers, ids: torch.Tensor, samples: int) -> dict[str, TextLoss]:
    """Scores the dense model on windows of token ids, of which the first `samples` are of the calibration samples."""
    for attempt in range(REPAIRS + 1):
        tokens = job.run_dir.activations.write_tokens(ids)
        workers.always.append(tokens)
        try:
            windows, first = _windows(job, tokens, samples)
            # Scoring these texts takes minutes at most: no hidden states are committed.
            scorer = replace(workers.scorer(job), cleaner=_Keeping(), every=job.inputs.geometry.num_layers + 1)
            scores = scorer.shard_scores(windows, NAME, [None] * job.inputs.geometry.num_layers)
            kinds = {"calibration": scores[:first], "evaluation": scores[first:]}
            return {kind: _text_loss(parts) for kind, parts in kinds.items() if parts}
        except CorruptError as error:
            if error.path != tokens.path or attempt == REPAIRS:
                raise
            job.observer.repaired(str(error), [])
        finally:
            workers.always.remove(tokens)
            job.run_dir.activations.drop(tokens)
    raise AssertionError("the last attempt returns or raises")


def _windows(job: JobContext, tokens: ArrayRecord, samples: int) -> tuple[Windows, int]:
    """Returns the windows in shards of one text each, and the number of shards of the calibration samples."""
    calibration = job.manifest.calibration
    assert calibration is not None, "the job has calibration samples"
    dtype = str(torch.promote_types(job.inputs.dtype, torch.float32)).removeprefix("torch.")
    parts = [
        Windows.even(count, calibration.shards, dtype, calibration.micro_batch, tokens)
        for count in (samples, tokens.shape[0] - samples)
        if count
    ]
    ranges = [
        parts[0].ranges,
        *(tuple((begin + samples, end + samples) for begin, end in part.ranges) for part in parts[1:]),
    ]
    return replace(parts[0], ranges=sum(ranges, ())), len(ranges[0])


def _text_loss(parts: list[Scored]) -> TextLoss:
    scored = sum(parts, Scored(0.0, 0))
    return TextLoss(loss=scored.loss / scored.tokens, tokens=scored.tokens)


class _Keeping:
    """A cleaner that drops nothing: hidden states of an interrupted pass may be stored."""

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops nothing."""

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops nothing."""

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops nothing."""

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Drops nothing."""
