"""Scores on lm-eval's tasks, with standard errors. lm-eval is an extra: `pip install 'CHECKOUT[tasks]'`.

The whole model is loaded by the process that asks, on a GPU where there is one.
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
    """Of the names, and of the content of those that are YAML files."""
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
    """Scores of a dense or compressed checkpoint.

    Args:
        model: a directory or a hub id, as `from_pretrained` takes it.
        tasks: names of lm-eval's tasks and groups, or YAML files of one task each.
        field: names the tasks in errors.
        dtype: of the forward pass, by its name; auto: as stored.
        limit: so many documents of each task, the first ones; None: all.
        trust_remote_code: whether the tokenizer may be code of the checkpoint; the model's class is never.

    Raises:
        InputError: no lm-eval, or a task that it does not know.
    """
    names, manager = find_tasks(tasks, field)
    import lm_eval  # these take seconds, which a job without tasks need not
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    import lamina  # noqa: F401 - registers its classes, so that no checkpoint's code is run
    from stores.corpus import open_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = open_tokenizer(model, model, trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    except ImportError as error:  # of rounded weights without the package that reads them, or with an old one
        raise InputError(f"{field}: {model}: {error}") from error
    wrapped = HFLM(pretrained=loaded.to(device).eval(), tokenizer=tokenizer, batch_size=batch)
    found = lm_eval.simple_evaluate(model=wrapped, tasks=names, task_manager=manager, limit=limit, log_samples=False)
    counts = found.get("n-samples", {})
    return {task: _scores(figures, counts.get(task)) for task, figures in found["results"].items()}


def _scores(figures: Mapping[str, Any], count: Mapping[str, int] | None) -> TaskScores:
    """From lm-eval's `metric,filter` and `metric_stderr,filter`; the filter is named unless it is `none`."""
    metrics: dict[str, TaskFigure] = {}
    for key, value in figures.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{kind}")
        known = isinstance(error, int | float) and math.isfinite(error)
        name = metric if kind == "none" else f"{metric} ({kind})"
        metrics[name] = TaskFigure(value=float(value), stderr=float(error) if known and error is not None else None)
    return TaskScores(documents=int(count["effective"]) if count else None, metrics=metrics)


def read_scores(stored: Mapping[str, Any]) -> Scores:
    """Scores as a summary has them."""
    return {task: TaskScores.model_validate(found) for task, found in stored.items()}


def task_lines(columns: Mapping[str, Scores]) -> list[str]:
    """One table: a row for each task and metric, a column for each model."""
    rows = [["task", "metric", *columns]]
    first = next(iter(columns.values()))
    for task, found in first.items():
        rows += [[task, name, *(_cell(scores, task, name) for scores in columns.values())] for name in found.metrics]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(scores: Scores, task: str, name: str) -> str:
    figure = scores[task].metrics.get(name) if task in scores else None
    if figure is None:
        return "-"
    return f"{figure.value:.4f}" + ("" if figure.stderr is None else f" ± {figure.stderr:.4f}")
