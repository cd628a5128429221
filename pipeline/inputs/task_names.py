"""Checks lm-eval tasks before a job starts. lm-eval is an extra: `pip install 'CHECKOUT[tasks]'`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manifests.errors import InputError, reason
from manifests.packages import install_advice

TASK_NAME = re.compile(r"^task:[ \t]*[\"']?([\w.-]+)", re.MULTILINE | re.ASCII)
GROUP_NAME = re.compile(r"^group:[ \t]*[\"']?([\w.-]+)", re.MULTILINE | re.ASCII)
GROUP_TASKS = re.compile(r"^task:[ \t]*(#.*)?\n[ \t]*-|^task:[ \t]*\[", re.MULTILINE)
YAML_SUFFIXES = (".yaml", ".yml")
TASKS_FIELD, CHAT_FIELD = "evaluation.tasks", "evaluation.chat_template"  # of a manifest
GENERATE = "generate_until"  # lm-eval's output type of tasks that generate text


def check_tasks(tasks: Sequence[str], field: str, whole: Sequence[str] | None = None) -> None:
    """Raise InputError, naming the field, if lm-eval is not installed, does not know the tasks, or they generate text.
    Check nothing if there are no tasks.

    `whole`: the models are loaded whole, so that tasks may generate; they must be on a disk or the hub.
    """
    if not tasks:
        return
    if remote := [model for model in whole or () if "://" in model]:
        raise InputError(f"{field}: lm-eval loads whole models from a directory or the hub, not from {remote[0]}")
    names, manager = find_tasks(tasks, field)
    if whole is None:
        refuse_generating(field, sorted({task for name in names for task in _generating(name, manager)}))


def _generating(name: str, manager: Any) -> Iterator[str]:
    """Yield the tasks of a name that generate text, by their files alone. Tasks that are Python are not known."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name not in ("TASK", "GROUP", "TAG"):
        return
    if entry.kind.name == "TAG":
        members: Any = entry.tags
    else:
        described = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else entry.cfg or {}
        if entry.kind.name == "TASK" and described.get("output_type", GENERATE) == GENERATE:
            yield name
        members = described.get("task", ()) if entry.kind.name == "GROUP" else ()
    for member in members if not isinstance(members, str) else ():
        if isinstance(member, str) and member != name:
            yield from _generating(member, manager)


def refuse_generating(field: str, tasks: Sequence[str]) -> None:
    """Raise InputError if there are tasks that generate text, which need the whole model."""
    if tasks:
        raise InputError(
            f"{field}: {', '.join(tasks)}: {'generate' if len(tasks) > 1 else 'generates'} text, which "
            "needs the whole model in memory: `python -m pipeline.evaluate --whole-model` loads the model "
            "into this node's GPUs, memory and disk; `--endpoint URL` asks a running server, such as vLLM's"
        )


def check_chat_template(tokenizer: Any, field: str, model: str) -> None:
    """Raise InputError if the tokenizer of a model has no chat template. `field`: the option that asks for it."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{field}: the tokenizer of {model} has no chat template; leave it out")


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

    files = {task: Path(task) for task in tasks if task.endswith(YAML_SUFFIXES)}
    named = {task: _name_in(files[task], field) if task in files else task for task in tasks}
    names = list(named.values())
    folders = [str(folder) for folder in dict.fromkeys(file.resolve().parent for file in files.values())]
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(named))
    for task, file in files.items():
        _check_read(file, named[task], manager, field)
    if unknown := sorted({*names} - {*manager.all_tasks}):
        raise InputError(
            f"{field}: lm-eval knows no {', '.join(unknown)}; `lm-eval ls tasks` lists its own, and a YAML file of "
            "yours is given by its path"
        )
    return names, manager


def _check_read(file: Path, name: str, manager: Any, field: str) -> None:
    """Raise InputError if lm-eval, which looks for a name in whole folders, does not read this file by it."""
    entry = manager.task_index.get(name)
    if entry is None or entry.yaml_path is None:
        raise InputError(
            f"{field}: {file}: lm-eval does not read it as {name}: the file must be valid YAML, with a name that ends "
            "in .yaml, and the files that it includes must be there"
        )
    if entry.yaml_path.resolve() != file.resolve():
        raise InputError(
            f"{field}: {file}: lm-eval reads {name} from {entry.yaml_path} instead; give it a name of its own"
        )


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
