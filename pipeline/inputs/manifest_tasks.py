"""Checks the lm-eval tasks of a manifest against its model, before the job starts."""

from __future__ import annotations

from manifests.schema import Manifest
from pipeline.inputs.task_names import (
    CHAT_FIELD,
    TASKS_FIELD,
    check_chat_template,
    check_reader_of_rounded,
    check_tasks,
)
from stores.corpus import load_tokenizer
from stores.source import SourceCheckpoint


def check_manifest_tasks(manifest: Manifest, source: SourceCheckpoint) -> None:
    """Raise InputError if the tasks of the evaluation are not known, or cannot be scored as the manifest asks."""
    tasks, whole = manifest.evaluation.tasks, manifest.evaluation.whole_model
    check_tasks(tasks, TASKS_FIELD, (manifest.output, manifest.model.source) if whole else None)
    rounded = manifest.quantize is not None and "uniform" in manifest.quantize.kinds_of_levels
    if tasks and whole and rounded:
        check_reader_of_rounded(TASKS_FIELD)
    if tasks and manifest.evaluation.chat_template:
        tokenizer = load_tokenizer(source.storage, manifest.model.trust_remote_code)
        check_chat_template(tokenizer, CHAT_FIELD, manifest.model.source)
