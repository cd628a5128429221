"""Scores on lm-eval's tasks, with standard errors. lm-eval is an extra: `pip install 'CHECKOUT[tasks]'`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.entries import TaskFigure, TaskScores
from manifests.errors import InputError, reason
from manifests.evaluation import Evaluation
from manifests.packages import install_advice
from pipeline.inputs.task_names import (
    CHAT_FIELD,
    GENERATE,
    TASKS_FIELD,
    YAML_SUFFIXES,
    check_chat_template,
    find_tasks,
    refuse_generating,
)

ENDPOINT_TIMEOUT_S = 30.0
SERVED_TOKENS = 2048  # of a context, as in lm-eval's class for servers
BOOTSTRAPS = 1000  # drawn for the standard error of a perplexity, which is then known to 2 %

Scores = dict[str, TaskScores]


@dataclass(frozen=True)
class AskedTasks:
    """The tasks to score, and how.

    Attributes:
        tasks: names of lm-eval's tasks and groups, or YAML files of one task or group each.
        field: the name of the tasks' option or manifest field, for errors.
        chat_field: likewise that of the chat template.
        limit: the number of documents to score for each task, from the first on; None: all.
        fewshot: the number of answered documents before each question; None: as each task says.
        chat_template: apply the tokenizer's chat template to each context.
        samples: a file to which a line of JSON is appended for each document: `model`, `task`, and lm-eval's fields.
    """

    tasks: tuple[str, ...]
    field: str
    limit: int | None = None
    fewshot: int | None = None
    chat_template: bool = False
    samples: Path | None = None
    chat_field: str = "--apply-chat-template"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that are not the defaults, by their names in a manifest."""
        settings = {"limit": self.limit, "fewshot": self.fewshot, "chat_template": self.chat_template or None}
        return {name: value for name, value in settings.items() if value is not None}

    def check_template(self, tokenizer: Any, model: str) -> None:
        """Raise InputError if the chat template is asked for, and the tokenizer of this model has none."""
        if self.chat_template:
            check_chat_template(tokenizer, self.chat_field, model)


def asked_by(evaluation: Evaluation) -> AskedTasks:
    """Return the tasks of a manifest."""
    return AskedTasks(
        evaluation.tasks,
        TASKS_FIELD,
        evaluation.limit,
        evaluation.fewshot,
        evaluation.chat_template,
        chat_field=CHAT_FIELD,
    )


def tasks_digest(asked: AskedTasks) -> str:
    """Return a digest of the tasks' names, of the content of YAML files, and of settings that are not the defaults."""
    parts = [Path(task).read_bytes() if task.endswith(YAML_SUFFIXES) else task.encode() for task in asked.tasks]
    parts += [json.dumps(given).encode()] if (given := asked.settings) else []  # else as before there were any
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@dataclass(frozen=True)
class _LoadedTasks:
    """Stands in for lm-eval's task manager, with tasks that are loaded already."""

    manager: Any
    loaded: Any

    def load(self, _: Any) -> Any:
        return self.loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


def load_tasks(asked: AskedTasks, generates: bool) -> Any:
    """Load tasks and their documents. `generates`: tasks that generate text are allowed.

    Raises InputError: lm-eval is missing, does not know a task, or cannot read its documents; a task generates.
    """
    names, manager = find_tasks(asked.tasks, asked.field)
    try:
        loaded = manager.load(names)
    except Exception as error:  # lm-eval and datasets raise all kinds for damaged or missing documents
        raise InputError(
            f"{asked.field}: {', '.join(asked.tasks)}: cannot be loaded: {type(error).__name__}: {error}; check the "
            "task's dataset_path and its files, or the connection to the hub"
        ) from error
    if not generates:
        refuse_generating(asked.field, [name for name, task in loaded["tasks"].items() if task.OUTPUT_TYPE == GENERATE])
    return _LoadedTasks(manager, loaded)


def run_tasks(lm: Any, model: str, asked: AskedTasks, loaded: Any) -> Scores:
    """Score a model. `lm`: lm-eval's interface to it; `model`: its name, for samples; `loaded`: of `load_tasks`."""
    from lm_eval import evaluator  # slow imports, only where tasks are scored

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork beside Ray's threads
    evaluator.get_git_commit_hash = lambda: None  # outside of repositories, git prints an error
    results = evaluator.simple_evaluate(
        model=lm,
        tasks=list(loaded.loaded["tasks"]),
        task_manager=loaded,
        limit=asked.limit,
        num_fewshot=asked.fewshot,
        apply_chat_template=asked.chat_template,
        log_samples=asked.samples is not None,
        bootstrap_iters=BOOTSTRAPS,
    )
    if asked.samples is not None:
        _append_samples(asked.samples, model, results["samples"])
    counts = results.get("n-samples", {})
    return {task: _scores(figures, counts.get(task)) for task, figures in results["results"].items()}


def score_whole(model: str, asked: AskedTasks, dtype: str, batch: int, trust_remote_code: bool = False) -> Scores:
    """Score a checkpoint that transformers loads whole into this process, over its GPUs, memory and disk.

    Args:
        model: a directory or a hub id, as for `from_pretrained`.
        dtype: the name of the forward pass's dtype; auto: as stored.
        batch: sequences in a batch.
        trust_remote_code: run Python of the checkpoint as its tokenizer; never as the model's class.

    Raises InputError: the errors of `load_tasks`, the tokenizer lacks the chat template that is asked for, or the model
    cannot be loaded.
    """
    loaded = load_tasks(asked, generates=True)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    import lamina  # noqa: F401 - registers its classes, so that no code of the checkpoint runs
    from stores.corpus import open_tokenizer

    tokenizer = open_tokenizer(model, model, trust_remote_code)
    asked.check_template(tokenizer, model)
    with tempfile.TemporaryDirectory(prefix="lamina-offload-") as offload:
        try:
            whole: Any = AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, trust_remote_code=False, device_map="auto", offload_folder=offload
            )
        except ImportError as error:  # rounded weights need a package that is missing or too old
            raise InputError(f"{asked.field}: {model}: {error}") from error
        lm = HFLM(pretrained=whole.eval(), tokenizer=tokenizer, batch_size=batch)
        return run_tasks(lm, model, asked, loaded)


def score_endpoint(url: str, model: str, asked: AskedTasks, batch: int, trust_remote_code: bool = False) -> Scores:
    """Score the model that a running server of OpenAI's completions answers with.

    Args:
        url: such as http://host:8000/v1.
        model: a directory or hub id with the tokenizer of the served model.
        batch: requests at once.

    Raises InputError: the errors of `load_tasks`, the tokenizer lacks the chat template that is asked for, or the
    server does not answer.
    """
    name, length = served_model(url)
    loaded = load_tasks(asked, generates=True)
    from pipeline.evaluation.served_lm import ServedLM  # imports lm-eval

    try:
        lm = ServedLM(
            model=name,
            max_length=length,
            base_url=f"{url.rstrip('/')}/completions",
            tokenizer=model,
            tokenizer_backend="huggingface",
            trust_remote_code=trust_remote_code,
            num_concurrent=batch,
        )
    except ModuleNotFoundError as error:
        raise InputError(
            f"--endpoint: a package of the extra `tasks` is missing ({error}); {install_advice('tasks')}"
        ) from error
    asked.check_template(lm.tokenizer, model)
    return run_tasks(lm, model, asked, loaded)


def served_model(url: str) -> tuple[str, int]:
    """Return the first model of a server of OpenAI's API: its name, and the tokens of its context.

    vLLM says its context in `max_model_len`; of other servers, SERVED_TOKENS are expected.

    Raises InputError if it does not answer.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/models", timeout=ENDPOINT_TIMEOUT_S) as answer:
            first = json.load(answer)["data"][0]
            return str(first["id"]), int(first.get("max_model_len") or SERVED_TOKENS)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"--endpoint: {url}/models: no list of models ({reason(error)}); give the address of a running server of "
            "OpenAI's API, such as http://localhost:8000/v1"
        ) from error


def _append_samples(file: Path, model: str, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    lines = ({"model": model, "task": task, **sample} for task, each in samples.items() for sample in each)
    with file.open("a", encoding="utf-8") as stream:
        for line in lines:
            stream.write(json.dumps(line, default=str, ensure_ascii=False) + "\n")


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


def shown_settings(settings: Mapping[str, Any]) -> str:
    """Return what settings of `AskedTasks` mean, in words; empty for the defaults."""
    words = []
    if "limit" in settings:
        words.append(f"the first {settings['limit']:,} documents of each task")
    if "fewshot" in settings:
        words.append(f"{settings['fewshot']}-shot")
    if settings.get("chat_template"):
        words.append("chat template")
    return ", ".join(words)


def task_rows(columns: Mapping[str, Scores]) -> list[list[str]]:
    """Return the cells of a table: headings, then a row for each task and metric, with a column for each model."""
    rows = [["task", "metric", *columns]]
    for task, first in next(iter(columns.values()), {}).items():
        rows += [[task, name, *(_cell(scores, task, name) for scores in columns.values())] for name in first.metrics]
    return rows


def task_lines(columns: Mapping[str, Scores]) -> list[str]:
    """Return the table of `task_rows` as lines of text."""
    rows = task_rows(columns)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(scores: Scores, task: str, name: str) -> str:
    figure = scores[task].metrics.get(name) if task in scores else None
    if figure is None:
        return "-"
    return f"{figure.value:.4f}" + ("" if figure.stderr is None else f" ± {figure.stderr:.4f}")
