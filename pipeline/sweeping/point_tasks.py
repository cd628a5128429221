"""Scores a sweep's points on lm-eval's tasks, from their staged layers and by the sweep's own workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch

from manifests.entries import TaskScoreEntry
from manifests.records import ArrayRecord, StagedLayer
from pipeline.driver.scoring import Layers
from pipeline.evaluation.questions import Answered, Question, in_order, packed, windows_of
from pipeline.evaluation.streamed_tasks import batch_tokens, can_branch, questions_digest
from pipeline.evaluation.task_scores import Scores, asked_by, load_tasks, run_tasks
from pipeline.families.foreign import sequence_limit
from pipeline.families.latent_config import latent_form
from pipeline.job.context import JobContext
from pipeline.job.output_scores import dense_task_key
from pipeline.job.worker_session import JobWorkers
from pipeline.units.questions import Questions
from stores.corpus import load_tokenizer

DENSE, COMPRESSED = "evaluation-tasks-dense", "evaluation-tasks"  # names of the scored models in the ledger


class PointTasks:
    """The tasks of a sweep. The numbers of their questions are stored once for all points."""

    def __init__(self, job: JobContext) -> None:
        """`job`: the context that the points share."""
        self.asked = asked_by(job.manifest.evaluation)
        self.trusted = job.manifest.model.trust_remote_code
        self.tokenizer = load_tokenizer(job.inputs.source.storage, self.trusted) if self.asked.tasks else None
        self.stored: dict[str, ArrayRecord] = {}

    def score_dense(self, job: JobContext, workers: JobWorkers) -> None:
        """Score the dense model, and enter its scores, once."""
        if not self.asked.tasks or job.ledger.get(key := dense_task_key(job)) is not None:
            return
        scores = self._scored(job, workers, DENSE, [None] * job.inputs.geometry.num_layers)
        job.ledger.commit(key, TaskScoreEntry(model="dense", seal=key.rpartition("/")[2], tasks=scores))

    def score(self, job: JobContext, workers: JobWorkers, layers: Sequence[StagedLayer | None]) -> Scores | None:
        """Return the scores of a point; None without tasks. Raises the errors of `Scorer.answers`."""
        return self._scored(job, workers, COMPRESSED, layers) if self.asked.tasks else None

    def _scored(self, job: JobContext, workers: JobWorkers, model: str, layers: Layers) -> Scores:
        from pipeline.evaluation.streamed_lm import StreamedLM  # imports lm-eval

        answers = partial(self._answers, job, workers, model, layers)
        with redirect_stdout(sys.stderr):  # lm-eval prints
            lm = StreamedLM(self.tokenizer, sequence_limit(job.inputs.config)[1], answers)
            return run_tasks(lm, job.inputs.source.place, self.asked, load_tasks(self.asked, generates=False))

    def _answers(
        self, job: JobContext, workers: JobWorkers, model: str, layers: Layers, _: str, questions: Sequence[Question],
        most: int,
    ) -> Answered:  # fmt: skip
        if not questions:
            return []
        branching = can_branch(job.inputs.config, job.manifest.workers.experts) and not any(map(_is_foreign, layers))
        shards, numbers = packed(windows_of(questions, most, branching))
        dtype = str(torch.promote_types(job.inputs.dtype, torch.float32)).removeprefix("torch.")
        batch = batch_tokens(job.manifest.workers.gpus > 0)
        digest = questions_digest(numbers, shards, dtype, batch)
        if digest not in self.stored:
            self.stored[digest] = job.run_dir.activations.write_tokens(numbers)
            workers.always.append(self.stored[digest])
        scorer = workers.scorer(job)
        passed = Questions.of_shards(shards, dtype, batch, digest, self.stored[digest])
        answers = scorer.answers(passed, model, layers)
        scorer.forget(model)
        return in_order(answers, len(questions))


def _is_foreign(staged: StagedLayer | None) -> bool:
    """True if a staged layer has attention of another class than the source's."""
    return staged is not None and bool(latent_form([staged.as_json()["forms"]]))


def task_figures(scores: Mapping[str, Any] | None, first: bool = False) -> dict[str, float]:
    """Return `task metric` -> value of the scores in a result. `first`: only the first metric of each task."""
    return {
        f"{task} {metric}": figure["value"]
        for task, each in (scores or {}).items()
        for metric, figure in list(each["metrics"].items())[: 1 if first else None]
    }
