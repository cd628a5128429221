"""What the manifest asks to be scored of OUTPUT: measured once, entered in the ledger beside all earlier scores.

A score belongs to a checkpoint (by the seal of its compression record, the source by the digests of its files) and to
token ids, not to the name of a text file: a text that was changed is another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from manifests.entries import ScoreEntry, TaskScoreEntry
from manifests.records import Key
from pipeline.console.signals import catch_signals
from pipeline.driver.ledger_keys import COMPLETE, score_key, task_score_key
from pipeline.evaluation.losses import damage_warnings, shown_perplexity
from pipeline.evaluation.perplexity import Scoring, score_tokens, sweep_scratch
from pipeline.evaluation.task_scores import score_tasks, tasks_digest
from pipeline.inputs.calibration import seen_share, tokens_digest
from pipeline.job.context import JobContext
from pipeline.reporting.summary import SEEN_LIMIT, seen_warning


def missing_scores(job: JobContext) -> list[str]:
    """The ledger keys that evaluating the finished OUTPUT would enter."""
    if (done := job.ledger.get(COMPLETE)) is None:
        return []
    seal = done.contract_sha256
    texts = [str(key) for key in _wanted(job, seal) if job.ledger.get(key) is None]
    return texts + [str(key) for key in _wanted_tasks(job, seal) if job.ledger.get(key) is None]


def score_output(job: JobContext, seal: str) -> None:
    """Measures and enters what is missing.

    Raises:
        Interrupted: a signal came; what is entered stays.
    """
    sweep_scratch(job.run_dir.storage)
    for key, model in _wanted(job, seal).items():
        if job.ledger.get(key) is not None:
            continue
        catch_signals(job.stop)
        assert job.evaluation is not None
        scratch = job.run_dir.storage.folder
        scoring = Scoring(job.manifest.workers, torch.float32, job.stop, job.observer, scratch, job.in_process)
        found = score_tokens(model, job.evaluation, scoring)
        entry = score_entry(job, "dense" if key.startswith("score/dense/") else "compressed", seal, found)
        job.ledger.commit(key, entry)
        which = "of the dense model " if entry.model == "dense" else ""
        job.observer.say(f"perplexity {which}{_shown(found)} over {found['tokens']:,} tokens")
        if (seen := _seen(job)) > SEEN_LIMIT:
            job.observer.say(f"perplexity: {seen_warning(seen)}", logging.WARNING)
    for task_key, model in _wanted_tasks(job, seal).items():
        if job.ledger.get(task_key) is None:
            catch_signals(job.stop)
            which = "dense" if task_key.startswith("task_score/dense/") else "compressed"
            job.observer.say(f"tasks: the {which} model, whole, in this process")
            trusted, asked = job.manifest.model.trust_remote_code, job.manifest.evaluation.tasks
            tasks = score_tasks(model, asked, "evaluation.tasks", trust_remote_code=trusted)
            job.ledger.commit(task_key, TaskScoreEntry(model=which, seal=seal, tasks=tasks))
    for warning in damage_warnings({"evaluation": scores(job, seal)}):
        job.observer.say(warning, logging.WARNING)


def _shown(found: Mapping[str, Any]) -> str:
    return shown_perplexity(found["perplexity"], found["loss"])


def score_entry(job: JobContext, model: str, seal: str, found: Mapping[str, Any]) -> ScoreEntry:
    """What is entered of the `dense` or the `compressed` model. `found`: as `score_tokens` gives it."""
    wanted = job.manifest.evaluation.perplexity
    assert wanted is not None
    return ScoreEntry(
        kind="perplexity",
        model=model,
        seal=seal,
        text=wanted.text.model_dump(mode="json", exclude_none=True),
        seen=_seen(job),
        perplexity=found["perplexity"],
        loss=found["loss"],
        tokens=found["tokens"],
        windows=found["windows"],
        window=found["window"],
    )


def scores(job: JobContext, seal: str) -> dict[str, Any]:
    """`perplexity`: what the manifest asks for; `dense`: the source's on the same tokens, where it was measured;
    `earlier`: what was asked for before, of this checkpoint."""
    now = {key: job.ledger.get(key) for key in (*_wanted(job, seal), *dense_score_key(job))}
    found: dict[str, Any] = {}
    for key, entry in now.items():
        if entry is not None:
            found["dense" if key.startswith("score/dense/") else "perplexity"] = entry.as_json()
    others = [job.ledger.get(key) for key in job.ledger.keys("score/") if key not in now]
    ours = [entry for entry in others if entry and entry.seal == seal and entry.model == "compressed"]
    earlier = [entry.as_json() for entry in ours]
    of_tasks = [job.ledger.get(key) for key in _wanted_tasks(job, seal)]
    tasks = {entry.model: entry.as_json()["tasks"] for entry in of_tasks if entry}
    return found | ({"earlier": earlier} if earlier else {}) | ({"tasks": tasks} if tasks else {})


def _seen(job: JobContext) -> float:
    """The share of the evaluation text that occurs in the calibration samples."""
    if job.tokens is None or job.evaluation is None:
        return 0.0
    return seen_share(job.tokens, job.evaluation)


def _wanted(job: JobContext, seal: str) -> dict[Key[ScoreEntry], str]:
    """Ledger key -> the model to be scored."""
    if job.evaluation is None:
        return {}
    wanted = {score_key("output", _digest(seal, tokens_digest(job.evaluation))): job.manifest.output}
    if job.manifest.evaluation.perplexity and job.manifest.evaluation.perplexity.dense:
        wanted |= dict.fromkeys(dense_score_key(job), job.inputs.source.place)
    return wanted


def _wanted_tasks(job: JobContext, seal: str) -> dict[Key[TaskScoreEntry], str]:
    """Ledger key -> the model to be scored on the manifest's tasks: the compressed one, and the dense one beside it."""
    if not (tasks := job.manifest.evaluation.tasks):
        return {}
    digest, source = tasks_digest(tasks), {file: found.sha256 for file, found in job.source_files.items()}
    return {
        task_score_key("output", _digest(seal, digest)): job.manifest.output,
        task_score_key("dense", _digest(source, digest)): job.inputs.source.place,
    }


def dense_score_key(job: JobContext) -> tuple[Key[ScoreEntry], ...]:
    """Where the score of the source on these tokens is, or would be."""
    if job.evaluation is None:
        return ()
    source = {file: found.sha256 for file, found in job.source_files.items()}
    return (score_key("dense", _digest(source, tokens_digest(job.evaluation))),)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
