"""The modules that a command imports before it computes. Modules, because seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

HEAVY = ("torch", "transformers", "ray", "datasets", "zarr", "pyarrow", "pandas", "matplotlib", "numpy")
PROGRAM = """
import importlib, io, json, sys
from contextlib import redirect_stderr, redirect_stdout

ended = {}
for words in json.loads(sys.argv[1]):
    command, *options = words
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = importlib.import_module(f"pipeline.{command}").main(options)
        except SystemExit as left:
            code = left.code
    heavy = sorted(set(json.loads(sys.argv[2])) & set(sys.modules))
    ended[" ".join(words[:2])] = [code, heavy, out.getvalue() + err.getvalue()]
print(json.dumps(ended))
"""
# What only a rare path needs: texts of a hub, tables, plots, scoring on tasks, other stores, other commands.
RARE = (
    "datasets", "pyarrow", "pandas", "matplotlib", "lm_eval", "obstore", "gguf", "sklearn", "zarr.testing", "ray.data",
    "ray.train", "ray.serve", "ray.dashboard", "pipeline.verification", "pipeline.sweeping",
    "pipeline.reporting.drawing", "pipeline.checkpoint.exporting", "lamina.engine_vllm", "tests",
)  # fmt: skip
# transformers' modelling code and what comes with it. The driver, which reads configs, imports it; a worker does not.
MODELS = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "lamina.modeling_lamina",
    "torch._dynamo",
    "sympy",
)
OF_THE_DRIVER = (
    "rich",
    "pipeline.driver.driver",
    "pipeline.job",
    "pipeline.console",
    "pipeline.checkpoint",
    "pipeline.cost_model",
)
COMMANDS = ("run", "plan", "status", "scale", "verify", "evaluate", "report", "export", "heal")


def test_signals_are_known_before_the_slow_imports() -> None:
    """In each command, so that Ctrl-C in its first second has the exit code of the table, too."""
    begin = 'if __name__ == "__main__":\n    exit_on_signals()  # the imports below take seconds\n    supervise()\n'
    sources = {path.stem: path.read_text(encoding="utf-8") for path in Path(pipeline.__file__).parent.glob("*.py")}
    commands = {name: source for name, source in sources.items() if "run_command(" in source}
    assert {*COMMANDS} <= {*commands}
    assert [name for name, source in commands.items() if begin not in source] == []


@pytest.mark.slow
def test_help_and_wrong_paths_import_nothing_heavy(tmp_path: Path) -> None:
    """Each within a second, with neither torch nor Ray."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("version: 1\nbudget: {keep: 7}\n", encoding="utf-8")
    words = [[command, "--help"] for command in COMMANDS]
    words += [[command, str(tmp_path)] for command in ("status", "report", "verify", "heal")]
    words += [["run", str(wrong)], ["plan", str(wrong)]]
    command = [sys.executable, "-c", PROGRAM, json.dumps(words), json.dumps(HEAVY)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(ended.stdout)
    assert len(found) == len(words)
    for said, (code, heavy, shown) in found.items():
        assert heavy == [], said
        assert code == (0 if said.endswith("--help") else 2), (said, shown)
    assert "budget.keep" in found[f"run {wrong}"][2]


@pytest.mark.slow
def test_workers_and_the_driver_import_nothing_that_only_rare_paths_need() -> None:
    """Each does so once a job; a worker besides nothing that is the driver's alone."""
    program = "import sys, json, torch, workers.actor, workers.worker\n"
    program += "from lamina.embedding_lamina import LayersConfig, make_embedding\n"
    program += "with torch.device('meta'): make_embedding(LayersConfig())\n"
    program += "there = list(sys.modules); import pipeline.job.stages\n"
    program += "from pipeline.families.registry import FAMILIES, standard_config\n"
    program += "from contextlib import suppress; from manifests.errors import InputError\n"
    program += "for family in FAMILIES:\n"
    program += "    with suppress(InputError): standard_config({'model_type': family})\n"
    program += "print(json.dumps([there, list(sys.modules)]))\n"
    program += "from transformers import AutoConfig; assert AutoConfig.for_model('lamina').model_type == 'lamina'"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    worker, driver = map(set, json.loads(ended.stdout))
    assert {"workers.worker", "pipeline.methods.registry"} <= worker
    assert set(OF_THE_DRIVER) <= driver
    assert driver.isdisjoint(RARE)
    assert worker.isdisjoint((*OF_THE_DRIVER, *MODELS, "transformers.models"))
