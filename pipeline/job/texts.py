"""A check against unsuitable text: the dense model's losses on the calibration samples and on the evaluation text.

Both texts are cut into windows of the same length, because a loss falls with the length of the window. The check runs
before any other pass, so that a user who sees a remark can stop the job. Where experts are streamed, the held-out
windows pass the dense model together with both texts, so that it is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from manifests.entries import TextLoss, TextsEntry
from manifests.errors import CorruptError
from manifests.records import ArrayRecord
from pipeline.driver.ledger_keys import TEXTS
from pipeline.driver.recovery import REPAIRS
from pipeline.evaluation.losses import texts_line
from pipeline.evaluation.text_remarks import text_remark
from pipeline.inputs.calibration import EvaluationTokens, tokens_digest
from pipeline.job.context import JobContext, check_loss
from pipeline.job.held_out import enter_dense_outputs, unscored_windows
from pipeline.job.store_cleaner import KeepingCleaner
from pipeline.job.worker_session import JobWorkers
from pipeline.units.scores import Scored, Windows
from pipeline.units.sharding import TEXT_TOKENS, text_windows
from stores.corpus import cut_windows, load_tokenizer

WORD_TOKENS = 32_768  # at most this many tokens of each text are compared word by word
NAME = "texts"  # the dense model's name in the ledger while both texts are scored


def check_texts(job: JobContext, workers: JobWorkers) -> None:
    """Enter the dense model's losses on both texts, once for the same tokens. Report them, and remark on calibration
    text that looks damaged. Also enter its outputs on held-out text that passes with them. Do nothing for a job without
    calibration text.

    Raises:
        InputError: a loss shows that something was read wrongly.
        Interrupted: a signal came.
    """
    if job.tokens is None:
        return
    samples, evaluation = compared_windows(job.tokens, job.evaluation, job.prefix)
    ids = torch.cat((samples, evaluation)).to(torch.int32)
    of, entered = tokens_digest(ids), job.ledger.get(TEXTS)
    assert of is not None
    if entered is None or entered.of != of:
        losses = _losses(job, workers, ids, len(samples), _joined(job, ids.shape[1]))
        remark = _remark(job, losses)
        entered = TextsEntry(of=of, window=ids.shape[1], prefix=job.prefix, **losses, remark=remark)
        job.ledger.commit(TEXTS, entered)
    figures = entered.as_json()
    job.observer.say(texts_line(figures))
    check_loss(job, entered.calibration.loss, "the calibration samples")
    if entered.evaluation:
        check_loss(job, entered.evaluation.loss, "the evaluation text")
    if entered.remark:
        job.observer.say(entered.remark)


def compared_windows(
    samples: torch.Tensor,
    evaluation: EvaluationTokens | None,
    prefix: tuple[int, ...],
    most: int = TEXT_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows (n, length) of the calibration samples and of the evaluation text, evenly spread over each, with
    at most about `most` tokens of each.

    The length is that of a sample, or of the evaluation text if that is shorter. All begin with the samples' `prefix`,
    whatever the evaluation has, because losses with and without one cannot be compared.
    """
    if evaluation is None:
        return _spread(samples, most), samples[:0]
    text = evaluation.ids[:, len(evaluation.prefix) :].flatten()
    length = min(samples.shape[1], len(text) + len(prefix))
    return _spread(samples[:, :length], most), _spread(cut_windows(text, length, prefix), most)


def _spread(windows: torch.Tensor, most: int) -> torch.Tensor:
    count = text_windows(len(windows), windows.shape[1], most)
    return windows[torch.arange(count) * len(windows) // count]


def _remark(job: JobContext, losses: Mapping[str, TextLoss]) -> str | None:
    """Return a remark on samples that look damaged."""
    if "evaluation" not in losses or job.tokens is None:
        return None
    tokenizer = load_tokenizer(job.inputs.source.storage, job.manifest.model.trust_remote_code)
    windows = compared_windows(job.tokens, job.evaluation, job.prefix, WORD_TOKENS)
    texts = [" ".join(tokenizer.batch_decode(ids, skip_special_tokens=True)) for ids in windows]
    return text_remark(texts[0], texts[1], (losses["calibration"].loss, losses["evaluation"].loss))


def _joined(job: JobContext, length: int) -> torch.Tensor:
    """Return the held-out windows that pass the model together with the texts. There are none if no experts are
    streamed, if the dense model's outputs on them are known, or if the texts have windows of another length."""
    held_out = unscored_windows(job)
    joins = held_out is not None and held_out.shape[1] == length
    if held_out is None or not (joins and job.inputs.geometry.streams(job.manifest.workers.experts)):
        return torch.empty(0, length, dtype=torch.int32)
    return held_out.to(torch.int32)


def _losses(
    job: JobContext, workers: JobWorkers, ids: torch.Tensor, samples: int, held_out: torch.Tensor
) -> dict[str, TextLoss]:
    """Score the dense model on windows of token ids. The first `samples` windows are calibration samples. Enter its
    outputs on the `held_out` windows, if any."""
    for attempt in range(REPAIRS + 1):
        tokens = job.run_dir.activations.write_tokens(torch.cat((ids, held_out)))
        workers.always.append(tokens)
        try:
            counts = samples, len(ids) - samples, len(held_out)
            windows, ends = _windows(job, tokens, counts)
            # Scoring these texts takes minutes at most: no hidden states are committed.
            scorer = replace(workers.scorer(job), cleaner=KeepingCleaner(), every=job.inputs.geometry.num_layers + 1)
            layers = [None] * job.inputs.geometry.num_layers
            scores, outputs = scorer.scores_and_outputs(windows, NAME, layers, ends[1])
            if outputs:
                enter_dense_outputs(job, workers, outputs)
            kinds = {"calibration": scores[: ends[0]], "evaluation": scores[ends[0] :]}
            return {kind: _text_loss(parts) for kind, parts in kinds.items() if parts}
        except CorruptError as error:
            if error.path != tokens.path or attempt == REPAIRS:
                raise
            job.observer.repaired(str(error), [])
        finally:
            workers.always.remove(tokens)
            job.run_dir.activations.drop(tokens)
    raise AssertionError("the last attempt returns or raises")


def _windows(job: JobContext, tokens: ArrayRecord, counts: tuple[int, ...]) -> tuple[Windows, list[int]]:
    """Return the windows of several texts, which follow each other in `tokens`, and the end of each text's shards.

    `counts`: the number of windows of each text, the held-out ones last. A shard has windows of one text only. The
    forward pass is in the source's dtype, which is enough to judge a text. Held-out windows need float32, as in
    `held_out`, because a divergence is measured from their outputs.
    """
    calibration = job.manifest.calibration
    assert calibration is not None, "the job has calibration samples"
    stored = job.inputs.dtype
    dtype = str(torch.promote_types(stored, torch.float32) if counts[-1] else stored).removeprefix("torch.")
    ranges: list[tuple[int, int]] = []
    ends, begin = [], 0
    for count in counts:
        even = Windows.even(count, calibration.shards, dtype, calibration.micro_batch)
        ranges += [(begin + first, begin + end) for first, end in even.ranges]
        ends.append(len(ranges))
        begin += count
    return Windows(tuple(ranges), dtype, calibration.micro_batch, tokens, len(job.prefix)), ends


def _text_loss(parts: list[Scored]) -> TextLoss:
    scored = sum(parts, Scored(0.0, 0))
    return TextLoss(loss=scored.loss / scored.tokens, tokens=scored.tokens)
