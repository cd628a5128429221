"""Small tasks for lm-eval in files of their own, and a model to score on them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import pipeline.evaluate
from tests.end_to_end.sources import make_source

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval, the extra `tasks`, is not installed"
)
METRICS = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("acc",),
    "loglikelihood_rolling": ("word_perplexity",),
    "generate_until": ("exact_match",),
}
FIELDS = {
    "multiple_choice": 'doc_to_text: "{{query}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"',
    "loglikelihood": 'doc_to_text: "{{query}}"\ndoc_to_target: "{{choices[gold]}}"',
    "loglikelihood_rolling": 'doc_to_text: ""\ndoc_to_target: "{{query}}"',
    "generate_until": 'doc_to_text: "{{query}}"\ndoc_to_target: "{{choices[gold]}}"\n'
    "generation_kwargs: {max_gen_toks: 4, do_sample: false}",
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
AGGREGATIONS = {"word_perplexity": "weighted_perplexity"}


def write_task(folder: Path, name: str, kind: str = "multiple_choice", documents: int = 12) -> Path:
    """Write a task of some documents, and return its YAML file."""
    lines = [
        {
            "query": f"Anna saw {number} birds. " * (1 + number % 3) + "Bob saw",
            "choices": [" birds.", " a bird", f" {number} houses in the town."],
            "gold": number % 3,
        }
        for number in range(documents)
    ]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = "\n".join(
        f"  - {{metric: {metric}, aggregation: {AGGREGATIONS.get(metric, 'mean')}, higher_is_better: true}}"
        for metric in METRICS[kind]
    )
    file = folder / f"{name}.yaml"
    file.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        f"fewshot_split: test\noutput_type: {kind}\n{FIELDS[kind]}\nmetric_list:\n{metrics}\n"
        "metadata: {version: 1.0}\n"
    )
    return file


def write_group(folder: Path, name: str, tasks: list[str]) -> Path:
    """Write a group of tasks, weighted by their documents, and return its YAML file."""
    members = "\n".join(f"  - {task}" for task in tasks)
    file = folder / f"{name}.yaml"
    file.write_text(
        f"group: {name}\ntask:\n{members}\naggregate_metric_list:\n  - {{metric: acc, weight_by_size: true}}\n"
        "metadata: {version: 1.0}\n"
    )
    return file


def chat_model(folder: Path, context: int) -> Path:
    """Write a model of at most `context` tokens, whose tokenizer has a chat template, and return its folder."""
    model = make_source(folder, "llama", max_position_embeddings=context)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return model


def evaluate(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run the command in this process, and return its scores by model."""
    code = pipeline.evaluate.main([*arguments, "--in-process", "--dtype", "float32", "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    scores: dict[str, Any] = json.loads(printed.out)["tasks"]
    return scores


def answers_of(file: Path, model: str | None = None) -> dict[tuple[str, int], list[Any]]:
    """Return task and document -> answers to its questions, from a file of samples. `model`: only of this one."""
    samples = [sample for sample in map(json.loads, file.read_text().splitlines()) if model in (None, sample["model"])]
    return {(sample["task"], sample["doc_id"]): sample["resps"] for sample in samples}
