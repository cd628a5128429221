"""The dense model's distribution on the text of a healing: computed by a pass of the workers, and stored once.
docs/methods.md#healing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from manifests.entries import TeacherEntry
from manifests.records import ArrayRecord
from pipeline.driver.ledger_keys import TEACHER
from pipeline.inputs.calibration import tokens_digest
from pipeline.inputs.healing_text import HealingTokens
from pipeline.job.context import JobContext, healing_tokens
from pipeline.job.worker_session import JobWorkers, teacher_arrays
from pipeline.kernels.teacher_rows import FORMAT
from pipeline.units.scores import Windows

WorkerStarter: TypeAlias = Callable[[], AbstractContextManager[JobWorkers]]  # starts workers for a block

NAME = "teacher"  # the dense model's name among scored models
SHARDS = 16  # shards of the text in a job without calibration


def stored_teacher(job: JobContext, pool: WorkerStarter) -> TeacherEntry:
    """Return the dense model's distribution on the text. Compute it by a pass of the workers if it is not stored."""
    forget_other_teacher(job)
    if (entered := job.ledger.get(TEACHER)) is not None:
        return entered
    job.observer.stage("start")
    with pool() as workers:
        return enter_teacher(job, workers)


def forget_other_teacher(job: JobContext) -> None:
    """Retract the dense model's distribution on another text than that of the healing."""
    entered = job.ledger.get(TEACHER)
    if entered is not None and job.manifest.heal is not None and entered.of != _text_digest(healing_tokens(job)):
        job.ledger.retract(TEACHER)
        job.run_dir.activations.drop(entered.tokens, *entered.rows, *entered.outputs)


def enter_teacher(job: JobContext, workers: JobWorkers) -> TeacherEntry:
    """Compute the dense model's distribution on the text of the healing, unless it is entered. Return its entry."""
    if (entered := job.ledger.get(TEACHER)) is not None:
        return entered
    tokens = healing_tokens(job)
    stored = job.run_dir.activations.write_tokens(tokens.windows.to(torch.int32))
    workers.always.append(stored)
    windows, taught = _teacher_windows(job, tokens, stored)
    scorer = workers.scorer(job)
    rows, outputs = scorer.taught(windows, NAME, [None] * job.inputs.geometry.num_layers, taught)
    entry = TeacherEntry(of=_text_digest(tokens), tokens=stored, rows=rows, outputs=outputs)
    job.ledger.commit(TEACHER, entry)
    workers.always.extend(teacher_arrays(job.ledger))
    scorer.forget(NAME)
    return entry


def _text_digest(tokens: HealingTokens) -> str:
    return digest_of((FORMAT, tokens_digest(tokens.windows), len(tokens.trained), tokens.prefix))


def _teacher_windows(job: JobContext, tokens: HealingTokens, stored: ArrayRecord) -> tuple[Windows, int]:
    """Return the windows of the teacher's pass, trained ones first, and the number of shards with these."""
    calibration = job.manifest.calibration
    shards, micro_batch = (calibration.shards, calibration.micro_batch) if calibration else (SHARDS, 1)
    dtype = str(torch.promote_types(job.inputs.dtype, torch.float32)).removeprefix("torch.")
    count = len(tokens.trained)
    trained = Windows.even(count, shards, dtype, micro_batch).ranges
    held_out = Windows.even(len(tokens.held_out), shards, dtype, micro_batch).ranges
    ranges = (*trained, *((count + first, count + end) for first, end in held_out))
    return Windows(ranges, dtype, micro_batch, stored, len(tokens.prefix)), len(trained)


def digest_of(described: Any) -> str:
    """Return the digest of JSON."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
