"""Scores on lm-eval's tasks, with standard errors. lm-eval is an extra: `pip install 'CHECKOUT[tasks]'`.

This process loads the whole model, on a GPU if there is one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manifests.entries import TaskFigure, TaskScores
from manifests.errors import InputError
from pipeline.inputs.task_names import YAML_SUFFIXES, find_tasks

Scores = dict[str, TaskScores]


def tasks_digest(tasks: Sequence[str]) -> str:
    """Return a digest of the tasks' names, and of the content of YAML files."""
    parts = [Path(task).read_bytes() if task.endswith(YAML_SUFFIXES) else task.encode() for task in tasks]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def score_tasks(
    model: str,
    tasks: Sequence[str],
    field: str,
    *,
    dtype: str = "auto",
    batch: int = 1,
    limit: int | None = None,
    trust_remote_code: bool = False,
) -> Scores:
    """Score a dense or compressed checkpoint.

    Args:
        model: a directory or a hub id, as for `from_pretrained`.
        tasks: names of lm-eval's tasks and groups, or YAML files of one task each.
        field: the name of the tasks' option or manifest field, for errors.
        dtype: the name of the forward pass's dtype; auto: as stored.
        limit: the number of documents to score for each task, from the first on; None: all.
        trust_remote_code: run Python of the checkpoint as its tokenizer; never as the model's class.

    Raises:
        InputError: lm-eval is missing, or does not know a task.
    """
    names, manager = find_tasks(tasks, field)
    import lm_eval  # slow imports, only where tasks are scored
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    import lamina  # noqa: F401 - registers its classes, so that no code of the checkpoint runs
    from stores.corpus import open_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = open_tokenizer(model, model, trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    except ImportError as error:  # rounded weights need a package that is missing or too old
        raise InputError(f"{field}: {model}: {error}") from error
    wrapped = HFLM(pretrained=loaded.to(device).eval(), tokenizer=tokenizer, batch_size=batch)
    results = lm_eval.simple_evaluate(model=wrapped, tasks=names, task_manager=manager, limit=limit, log_samples=False)
    counts = results.get("n-samples", {})
    return {task: _scores(figures, counts.get(task)) for task, figures in results["results"].items()}


def _scores(figures: Mapping[str, Any], count: Mapping[str, int] | None) -> TaskScores:
    """Convert lm-eval's `metric,filter` and `metric_stderr,filter`. The filter is named unless it is `none`."""
    metrics: dict[str, TaskFigure] = {}
    for key, value in figures.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{filter_name}")
        stderr = float(error) if isinstance(error, int | float) and math.isfinite(error) else None
        name = metric if filter_name == "none" else f"{metric} ({filter_name})"
        metrics[name] = TaskFigure(value=float(value), stderr=stderr)
    return TaskScores(documents=int(count["effective"]) if count else None, metrics=metrics)


def read_scores(stored: Mapping[str, Any]) -> Scores:
    """Parse the scores in a summary."""
    return {task: TaskScores.model_validate(scores) for task, scores in stored.items()}


def task_lines(columns: Mapping[str, Scores]) -> list[str]:
    """Return the lines of a table with a row for each task and metric and a column for each model."""
    rows = [["task", "metric", *columns]]
    for task, first in next(iter(columns.values())).items():
        rows += [[task, name, *(_cell(scores, task, name) for scores in columns.values())] for name in first.metrics]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(scores: Scores, task: str, name: str) -> str:
    figure = scores[task].metrics.get(name) if task in scores else None
    if figure is None:
        return "-"
    return f"{figure.value:.4f}" + ("" if figure.stderr is None else f" ± {figure.stderr:.4f}")
