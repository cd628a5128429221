"""`make quickstart`: train a small model, compress it at three sizes with the real commands, compare the results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.quickstart.model import ModelRecipe, make_model

MANIFEST = Path("manifests/quickstart.yaml")
FOLDER = Path("runs/quickstart")
KEEPS = (0.9, 0.8, 0.6)
PROMPT = "Anna had four cups. She gave"


@dataclass(frozen=True)
class ModelRow:
    """A model in the table."""

    name: str
    perplexity: float
    num_bytes: int
    text: str


def main() -> int:
    """Train a small model, compress it at three sizes, print the cost of each. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.quickstart", description=__doc__)
    parser.add_argument("--model-only", action="store_true", help="train the model and write its texts; run no job")
    model_only = parser.parse_args().model_only
    transformers.utils.logging.disable_progress_bar()
    if not MANIFEST.is_file():
        print(f"quickstart: {MANIFEST} does not exist here; run this in the root of the repository", file=sys.stderr)
        return 2
    model = FOLDER / "model"
    recipe = ModelRecipe()
    if not model.is_dir():
        print(f"Training a small model into {model}: {recipe.num_steps} steps, about a minute on two cores", flush=True)
        started = time.monotonic()
        make_model(FOLDER, recipe, lambda line: print(line, flush=True))
        print(f"Trained in {time.monotonic() - started:.0f} s", flush=True)
    if model_only:
        return 0
    try:
        rows: list[ModelRow] = []
        for keep in KEEPS:
            output = FOLDER / f"keep{round(100 * keep)}"
            perplexities = _compress(keep, output, with_dense=not rows)
            if not rows:
                rows.append(_row("dense", model, perplexities["dense"]))
            rows.append(_row(f"keep {keep}", output, perplexities["perplexity"]))
    except subprocess.CalledProcessError as error:
        print(f"quickstart: exit code {error.returncode} from: {' '.join(error.cmd)}", file=sys.stderr)
        return int(error.returncode) if error.returncode > 0 else 1
    Console(markup=False, highlight=False).print(table_of(rows))
    return 0


def _compress(keep: float, output: Path, with_dense: bool) -> dict[str, float]:
    """Runs a job in one process: Ray and two workers would take longer to start than the job. Returns the perplexities
    of its output and, `with_dense`, of the source."""
    settings = {"budget.keep": keep, "output": output, "run_dir": output.with_suffix(".run"), "workers.max": 1}
    if with_dense:
        settings["evaluation.perplexity.dense"] = "true"
    options = [part for field, value in settings.items() for part in ("--set", f"{field}={value}")]
    command = [sys.executable, "-m", "pipeline.run", str(MANIFEST), *options, "--in-process", "--json"]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    summary = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {name: float(score["perplexity"]) for name, score in summary["evaluation"].items()}


def _row(name: str, model: Path, perplexity: float) -> ModelRow:
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return ModelRow(name, perplexity, num_bytes, continue_prompt(model))


def continue_prompt(directory: Path) -> str:
    """Complete PROMPT greedily, to the end of the line."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        tokens_BS = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(tokens_BS[0], skip_special_tokens=True)).splitlines()[0]


def table_of(rows: list[ModelRow]) -> Table:
    """Return the table; ratios are to the bytes of the first row."""
    table = Table(title="The same model at four sizes", show_lines=True)
    for heading in ("", "perplexity", "stored bytes", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("text, greedy")
    for row in rows:
        ratio = row.num_bytes / rows[0].num_bytes
        table.add_row(row.name, f"{row.perplexity:.3f}", f"{row.num_bytes:,}", f"{ratio:.3f}", row.text)
    return table


if __name__ == "__main__":
    sys.exit(main())
