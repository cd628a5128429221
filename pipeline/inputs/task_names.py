"""Checks names of lm-eval tasks before a job starts. lm-eval is an extra: `pip install 'CHECKOUT[tasks]'`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manifests.errors import InputError, reason
from manifests.packages import install_advice

TASK_NAME = re.compile(r"^task:[ \t]*[\"']?([\w.-]+)", re.MULTILINE | re.ASCII)
GROUP_NAME = re.compile(r"^group:[ \t]*[\"']?([\w.-]+)", re.MULTILINE | re.ASCII)
GROUP_TASKS = re.compile(r"^task:[ \t]*(#.*)?\n[ \t]*-|^task:[ \t]*\[", re.MULTILINE)
YAML_SUFFIXES = (".yaml", ".yml")
GENERATE = "generate_until"  # lm-eval's output type of tasks that generate text


def check_tasks(tasks: Sequence[str], field: str, models: Sequence[str] = ()) -> None:
    """Raise InputError, naming the field, if lm-eval is not installed, does not know the tasks, or could not load one
    of the models. Check nothing if there are no tasks."""
    if not tasks:
        return
    if remote := [model for model in models if "://" in model]:
        raise InputError(f"{field}: lm-eval loads whole models from a directory or the hub, not from {remote[0]}")
    find_tasks(tasks, field)


def refuse_generating(field: str, tasks: Sequence[str]) -> None:
    """Raise InputError if there are tasks that generate text, which need the whole model."""
    if tasks:
        raise InputError(
            f"{field}: {', '.join(tasks)}: {'generate' if len(tasks) > 1 else 'generates'} text, token by token, which "
            "layers that are read one at a time cannot do: `python -m pipeline.evaluate --whole-model` loads the model "
            "into this node's GPUs, memory and disk; `--endpoint URL` asks a running server, such as vLLM's"
        )


def check_reader_of_rounded(field: str) -> None:
    """Raise InputError, naming the field, if transformers could not load a checkpoint with rounded weights."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise InputError(
            f"{field}: transformers loads rounded weights (quantize) with compressed-tensors, which is not installed: "
            "`pip install compressed-tensors`"
        )


def find_tasks(tasks: Sequence[str], field: str) -> tuple[list[str], Any]:
    """Return the names of the tasks, and an lm-eval task manager that knows them all. Raises InputError."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"{field}: lm-eval is not installed; {install_advice('tasks')}")
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in tasks if task.endswith(YAML_SUFFIXES)]
    names = [_name_in(Path(task), field) if task.endswith(YAML_SUFFIXES) else task for task in tasks]
    folders = [str(folder) for folder in dict.fromkeys(file.resolve().parent for file in files)]
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
    if unknown := sorted({*names} - {*manager.all_tasks}):
        raise InputError(
            f"{field}: lm-eval knows no {', '.join(unknown)}; `lm-eval ls tasks` lists its own, and a YAML file of "
            "yours is given by its path"
        )
    return names, manager


def _name_in(file: Path, field: str) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{field}: {file}: cannot be read ({reason(error)}); give the name of a task of lm-eval, or the path of a "
            "YAML file"
        ) from error
    match = GROUP_NAME.search(text) if GROUP_TASKS.search(text) else TASK_NAME.search(text)
    if match is None:
        raise InputError(f"{field}: {file}: has no line `task: NAME`, or `group: NAME` and a list `task:`")
    return match[1]
