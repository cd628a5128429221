"""The scores of OUTPUT in the manifest's evaluation: measured once, and entered in the ledger beside earlier ones.

A score belongs to a checkpoint and to token ids, not to the name of a text file: a changed text is another text. The
seal of its compression record identifies OUTPUT, and the digests of its files the source.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch

from manifests.entries import ScoreEntry, TaskScoreEntry
from manifests.records import LedgerKey
from pipeline.console.signals import catch_signals
from pipeline.driver.ledger_keys import COMPLETE, SCHEDULE, score_key, task_score_key
from pipeline.evaluation.losses import damage_warnings, shown_perplexity
from pipeline.evaluation.perplexity import Scoring, score_tokens, sweep_scratch
from pipeline.evaluation.streamed_tasks import Kept, score_streamed
from pipeline.evaluation.task_scores import asked_by, load_tasks, score_whole, tasks_digest
from pipeline.inputs.calibration import seen_share, tokens_digest
from pipeline.job.context import JobContext, check_loss
from pipeline.reporting.summary import SEEN_LIMIT, seen_warning

TASKS = "tasks"  # the folder of a run directory where passes of tasks resume


def missing_scores(job: JobContext) -> list[str]:
    """Return the ledger keys that evaluating the finished OUTPUT would enter."""
    if (complete := job.ledger.get(COMPLETE)) is None:
        return []
    seal = complete.contract_sha256
    texts = [str(key) for key in _score_keys(job, seal) if job.ledger.get(key) is None]
    return texts + [str(key) for key in _task_score_keys(job, seal) if job.ledger.get(key) is None]


def score_output(job: JobContext, seal: str) -> dict[str, Any]:
    """Measure and enter the missing scores of OUTPUT, loaded as a user loads it. Return all, as `scores`.

    Raises:
        InputError: as `score_dense_first`.
        Interrupted: a signal came; entries stay.
    """
    for key, model in _score_keys(job, seal).items():
        _score(job, key, model, seal)
    for task_key, model in _task_score_keys(job, seal).items():
        if job.ledger.get(task_key) is None:
            _score_tasks(job, task_key, model, seal)
    entered = scores(job, seal)
    for warning in damage_warnings({"evaluation": entered}):
        job.observer.say(warning, logging.WARNING)
    return entered


def check_task_documents(job: JobContext) -> None:
    """Load the manifest's tasks and their documents before a job compresses layers, which may take hours.

    Raises InputError: as `load_tasks`.
    """
    evaluation = job.manifest.evaluation
    if evaluation.tasks:
        with redirect_stdout(sys.stderr):  # lm-eval prints
            load_tasks(asked_by(evaluation), generates=evaluation.whole_model)


def score_dense_first(job: JobContext) -> None:
    """Measure the dense model's score on the evaluation text before a data-free job compresses layers, if the manifest
    asks for it. Jobs with calibration text score the dense model anyway.

    Raises:
        InputError: the loss shows that something was read wrongly.
        Interrupted: a signal came.
    """
    if job.tokens is None and job.manifest.evaluation.with_dense:
        for key in dense_score_key(job):
            _score(job, key, job.inputs.source.place, key.rpartition("/")[2])


def _score(job: JobContext, key: LedgerKey[ScoreEntry], model: str, seal: str) -> None:
    """Measure and enter a score, if it is missing. Raises InputError if the dense model's loss is too large."""
    is_dense = key.startswith("score/dense/")
    if (entered := job.ledger.get(key)) is None:
        catch_signals(job.stop)
        sweep_scratch(job.run_dir.storage)
        assert job.evaluation is not None
        scratch = job.run_dir.storage.folder
        scoring = Scoring(job.manifest.workers, torch.float32, job.stop, job.observer, scratch, job.in_process)
        figures = score_tokens(model, job.evaluation, scoring)
        entered = score_entry(job, "dense" if is_dense else "compressed", seal, figures)
        job.ledger.commit(key, entered)
        shown = shown_perplexity(figures["perplexity"], figures["loss"])
        job.observer.say(f"perplexity {'of the dense model ' * is_dense}{shown} over {figures['tokens']:,} tokens")
        if (share := _seen_share(job)) > SEEN_LIMIT:
            job.observer.say(f"perplexity: {seen_warning(share)}", logging.WARNING)
    if is_dense and entered.loss is not None:
        check_loss(job, entered.loss, "the evaluation text")


def _score_tasks(job: JobContext, key: LedgerKey[TaskScoreEntry], model: str, seal: str) -> None:
    """Measure and enter a model's scores on the manifest's tasks. The passes resume after the last committed layer."""
    catch_signals(job.stop)
    which = "dense" if key.startswith("task_score/dense/") else "compressed"
    asked, trusted = asked_by(job.manifest.evaluation), job.manifest.model.trust_remote_code
    whole = job.manifest.evaluation.whole_model
    job.observer.say(f"tasks: the {which} model, {'whole, in this process' if whole else 'layer by layer'}")
    with redirect_stdout(sys.stderr):  # lm-eval prints
        if whole:
            tasks = score_whole(model, asked, "auto", 1, trusted)
        else:
            sweep_scratch(job.run_dir.storage)
            kept = Kept(job.run_dir.storage.below(f"{TASKS}/{which}"), _every(job), key.rpartition("/")[2])
            scratch = job.run_dir.storage.folder
            scoring = Scoring(job.manifest.workers, torch.float32, job.stop, job.observer, scratch, job.in_process)
            tasks = score_streamed(model, asked, scoring, kept=lambda _: kept, trust_remote_code=trusted)
    job.ledger.commit(key, TaskScoreEntry(model=which, seal=seal, tasks=tasks))
    job.run_dir.storage.delete_folder(TASKS)


def _every(job: JobContext) -> int:
    """Return the number of layers between two commits of hidden states, which is that of the job's own passes."""
    every, chosen = job.manifest.resume.every, job.ledger.get(SCHEDULE)
    return every if every != "auto" else chosen.every if chosen else 1


def score_entry(job: JobContext, model: str, seal: str, figures: Mapping[str, Any]) -> ScoreEntry:
    """Return the entry of the `dense` or the `compressed` model. `figures`: as `score_tokens` returns them."""
    perplexity = job.manifest.evaluation.perplexity
    assert perplexity is not None
    return ScoreEntry(
        kind="perplexity",
        model=model,
        seal=seal,
        text=perplexity.text.model_dump(mode="json", exclude_none=True),
        seen=_seen_share(job),
        **{name: figures[name] for name in ("perplexity", "loss", "tokens", "windows", "window", "prefix")},
    )


def scores(job: JobContext, seal: str) -> dict[str, Any]:
    """Return the entered scores by kind, without kinds that have none.

    `perplexity`: of OUTPUT on the manifest's text; `dense`: of the source on the same tokens; `earlier`: of OUTPUT on
    other texts; `tasks`: of both models, by lm-eval; `task_settings`: those that are not the defaults.
    """
    now = {key: job.ledger.get(key) for key in (*_score_keys(job, seal), *dense_score_key(job))}
    entered: dict[str, Any] = {}
    for key, entry in now.items():
        if entry is not None:
            entered["dense" if key.startswith("score/dense/") else "perplexity"] = entry.as_json()
    others = [job.ledger.get(key) for key in job.ledger.keys("score/") if key not in now]
    ours = [entry for entry in others if entry and entry.seal == seal and entry.model == "compressed"]
    earlier = [entry.as_json() for entry in ours]
    of_tasks = [job.ledger.get(key) for key in _task_score_keys(job, seal)]
    tasks = {entry.model: entry.as_json()["tasks"] for entry in of_tasks if entry}
    settings = asked_by(job.manifest.evaluation).settings if tasks else {}
    named = {"earlier": earlier, "tasks": tasks, "task_settings": settings}
    return entered | {name: value for name, value in named.items() if value}


def _seen_share(job: JobContext) -> float:
    """Return the share of the evaluation text that occurs in the calibration samples."""
    if job.tokens is None or job.evaluation is None:
        return 0.0
    return seen_share(job.tokens, job.evaluation.ids)


def _score_keys(job: JobContext, seal: str) -> dict[LedgerKey[ScoreEntry], str]:
    """Return ledger key -> the model to be scored."""
    if job.evaluation is None:
        return {}
    keys = {score_key("output", _digest(seal, tokens_digest(job.evaluation.ids))): job.manifest.output}
    if job.manifest.evaluation.with_dense:
        keys |= dict.fromkeys(dense_score_key(job), job.inputs.source.place)
    return keys


def _task_score_keys(job: JobContext, seal: str) -> dict[LedgerKey[TaskScoreEntry], str]:
    """Return ledger key -> the model to be scored on the manifest's tasks: the compressed and the dense one."""
    if not job.manifest.evaluation.tasks:
        return {}
    digest = tasks_digest(asked_by(job.manifest.evaluation))
    return {
        task_score_key("output", _digest(seal, digest)): job.manifest.output,
        dense_task_key(job): job.inputs.source.place,
    }


def dense_task_key(job: JobContext) -> LedgerKey[TaskScoreEntry]:
    """Return the key of the source's scores on the manifest's tasks."""
    return task_score_key("dense", _digest(_source_digests(job), tasks_digest(asked_by(job.manifest.evaluation))))


def dense_score_key(job: JobContext) -> tuple[LedgerKey[ScoreEntry], ...]:
    """Return the key of the source's score on the evaluation tokens; none without such tokens."""
    if job.evaluation is None:
        return ()
    return (score_key("dense", _digest(_source_digests(job), tokens_digest(job.evaluation.ids))),)


def _source_digests(job: JobContext) -> dict[str, str]:
    return {file: record.sha256 for file, record in job.source_files.items()}


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
