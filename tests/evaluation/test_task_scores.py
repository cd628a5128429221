"""lm-eval's tasks: which are known, what is read of its results, one table; with lm-eval installed, the real thing."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.evaluation import Evaluation
from pipeline.evaluation import task_scores as tasks
from pipeline.evaluation.task_scores import AskedTasks, asked_by, read_scores, task_lines, tasks_digest
from pipeline.inputs.task_names import check_reader_of_rounded, check_tasks
from tests.evaluation.tasks import needs_lm_eval

YAML = """\
task: which_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task of 12 documents in a YAML file."""
    lines = [
        {"query": f"Anna saw {number}", "choices": [" birds.", " a bird"], "gold": number % 2} for number in range(12)
    ]
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "which_word.yaml"
    file.write_text(YAML.format(data=data))
    return file


def test_without_the_reader_of_rounded_weights_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job would otherwise find out when it has compressed the model."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else object())
    with pytest.raises(InputError, match=r"evaluation\.tasks: .*`pip install compressed-tensors`"):
        check_reader_of_rounded("evaluation.tasks")


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape("lm-eval is not installed; `pip install 'CHECKOUT[tasks]'")):
        check_tasks(["hellaswag"], "evaluation.tasks")
    check_tasks([], "evaluation.tasks")
    with pytest.raises(InputError, match="from a directory or the hub, not from s3://bucket/out"):
        check_tasks(["hellaswag"], "evaluation.tasks", whole=["/models/dense", "s3://bucket/out"])
    check_tasks([], "evaluation.tasks", whole=["s3://bucket/out"])


@pytest.mark.parametrize(("content", "said"), [("group: x\n", "has no line `task: NAME`"), (None, "No such file")])
def test_a_file_without_a_task(content: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = type("Module", (), {"TaskManager": object})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "lm_eval", type("Module", (), {}))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", known)
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=re.escape(said)):
        check_tasks([str(file)], "--tasks")


@pytest.mark.slow
@needs_lm_eval
def test_a_file_that_lm_eval_does_not_read(task: Path) -> None:
    """It looks for names in whole folders: of two files with one name it would score the first, whichever is given."""
    check_tasks([str(task), str(task)], "--tasks")
    copy = task.with_name("with_another_prompt.yaml")
    copy.write_text(task.read_text().replace("{{query}}", "So: {{query}}"))
    with pytest.raises(InputError, match=r"with_another_prompt.yaml: lm-eval reads which_word from .*which_word.yaml"):
        check_tasks([str(copy)], "--tasks")
    for name, content in ("short.yml", task.read_text()), ("broken.yaml", "include: missing.yaml\n" + task.read_text()):
        file = task.with_name(name)
        file.write_text(content.replace("which_word", "other_word"))
        with pytest.raises(InputError, match=f"{name}: lm-eval does not read it as other_word: the file must be"):
            check_tasks([str(file)], "--tasks")


def test_the_digest_is_of_what_a_file_says(task: Path) -> None:
    one, other = (AskedTasks(tasks, "--tasks") for tasks in (("hellaswag", str(task)), (str(task), "hellaswag")))
    before = tasks_digest(one)
    assert before == tasks_digest(one) != tasks_digest(other)
    task.write_text(task.read_text() + "# changed\n")
    assert before != tasks_digest(one)


def test_the_digest_is_of_settings_that_are_not_the_defaults() -> None:
    """Run directories have scores from before there were settings."""
    plain = Evaluation(tasks=("arc_easy", "piqa"))
    assert tasks_digest(asked_by(plain)) == "349ffa2e1b78592287336efcbc59a140b58aa0621e80dca3e079a86afda1f31c"
    settings: list[dict[str, Any]] = [{}, {"limit": 5}, {"fewshot": 0}, {"fewshot": 5}, {"chat_template": True}]
    digests = {tasks_digest(asked_by(Evaluation(tasks=plain.tasks, **fields))) for fields in settings}
    assert len(digests) == len(settings)


def test_figures_of_lm_eval_s_results() -> None:
    results: dict[str, Any] = {
        "name": "gsm", "alias": "gsm", "sample_len": 4, "acc,none": 0.25, "acc_stderr,none": 0.05,
        "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A", "bleu,none": 3, "bleu_stderr,none": math.nan,
    }  # fmt: skip
    assert tasks._scores(results, {"original": 9, "effective": 4}).as_json() == {
        "documents": 4,
        "metrics": {
            "acc": {"value": 0.25, "stderr": 0.05},
            "exact_match (strict)": {"value": 0.5, "stderr": None},
            "bleu": {"value": 3.0, "stderr": None},
        },
    }


def test_one_table_of_both_models() -> None:
    compressed = read_scores({"arc": {"documents": 4, "metrics": {"acc": {"value": 0.25, "stderr": 0.05}}}})
    dense = read_scores({"arc": {"documents": 4, "metrics": {"acc": {"value": 0.5, "stderr": None}}}})
    assert task_lines({"compressed": compressed, "dense": dense, "other": {}}) == [
        "task  metric  compressed       dense   other",
        "arc   acc     0.2500 ± 0.0500  0.5000  -",
    ]


@pytest.mark.slow
@needs_lm_eval
def test_a_task_that_lm_eval_does_not_know(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own tasks those of one folder are looked through: all take ten seconds."""
    from lm_eval.tasks import manager

    shutil.copytree(Path(manager.__file__).with_name("arc"), tmp_path / "tasks" / "arc")
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "tasks" / "manager.py"))
    with pytest.raises(InputError, match=r"--tasks: lm-eval knows no arc_hardest; `lm-eval ls tasks` lists"):
        check_tasks(["arc_easy", "arc_hardest", str(task)], "--tasks")  # the other two it knows
