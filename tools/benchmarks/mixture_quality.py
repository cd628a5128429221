"""Compress trained mixtures by every method for experts, and print perplexity and divergence.

    python -m tools.benchmarks.mixture_quality MODEL... --stories stories.json [--rows free layer ...] [--drawn]

`--stories`: a JSON list of texts, joined by newlines. Calibration samples are 64 of 256 tokens of the first 400 texts,
gradients those of the first 32 samples, and 40 windows of 256 tokens of the texts from number 850 on are scored. Sizes
are shares of the routed experts' numbers, or, of rows that round, of their bytes. One sweep a model does all rows; run
again with the same `--directory`, it resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.benchmarks.jobs import ROOT, JobFailed, end_on_sigterm, environment, print_table

CALIBRATION_STORIES, FIRST_SCORED = 400, 850
WINDOW, WINDOWS, SAMPLES = 256, 40, 64
KEEP, REMOVED, STOCK = [0.8, 0.6, 0.5], [0.75, 0.625, 0.5], [0.77, 0.75, 0.59, 0.55, 0.5, 0.49]
BITS = {"quantize": [{"bits": "auto"}], "bytes": [0.28, 0.22, 0.16]}


def _loss_aware(**fields: Any) -> list[dict[str, Any]]:
    return [{"method": "loss_aware", **fields}]


ROWS: Mapping[str, dict[str, Any]] = {
    "reap": {"methods": [{"method": "reap"}], "keep": REMOVED},
    "reap-refit": {"methods": [{"method": "reap", "refit": True}], "keep": REMOVED},
    "heapr": {"methods": [{"method": "heapr"}], "keep": KEEP},
    "stock": {"methods": _loss_aware(shapes="stock"), "keep": STOCK},
    "stock-2": {"methods": _loss_aware(shapes="stock", rank_multiple=2), "keep": STOCK},
    "layer": {"methods": _loss_aware(shapes="layer"), "keep": KEEP},
    "free": {"methods": _loss_aware(), "keep": KEEP},
    "free-corrected": {"methods": _loss_aware(correct="output"), "keep": KEEP},
    "free-bits": {"methods": _loss_aware(), **BITS},
    "stock-bits": {"methods": _loss_aware(shapes="stock"), **BITS, "quantize": [{"bits": 4}, {"bits": 3}]},
}


def write_texts(stories: Path, model: Path, drawn: bool, directory: Path) -> tuple[Path, Path]:
    """Write a calibration text and an evaluation text. Return their paths.

    `drawn`: the calibration text is longer than its samples; otherwise it holds just these.
    """
    texts: list[str] = json.loads(stories.read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def first_windows(text: str, count: int) -> str:
        """Return the first `count` and a half windows of a text: readers drop the half one, with its cut end."""
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return text[: tokens.offsets[WINDOW * count + WINDOW // 2][0]]

    calibration, evaluation = directory / "calibration.txt", directory / "evaluation.txt"
    seen, scored = "\n".join(texts[:CALIBRATION_STORIES]), "\n".join(texts[FIRST_SCORED:])
    calibration.write_text(seen if drawn else first_windows(seen, SAMPLES))
    evaluation.write_text(first_windows(scored, WINDOWS))
    return calibration, evaluation


def write_bfloat16(model: Path, directory: Path) -> Path:
    """Write a copy of a model in bfloat16, of which shares of bytes are usually quoted. Return its directory."""
    copy = directory / "bfloat16"
    shutil.copytree(model, copy, dirs_exist_ok=True, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    for path in copy.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    config = copy / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    return copy


def run_sweep(model: Path, texts: tuple[Path, Path], rows: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run the rows as one sweep in a directory. Return its results. Raises JobFailed."""
    calibration, evaluation = texts
    sweep = {
        "version": 1,
        "model": {"source": str(model)},
        "output": str(directory / "output"),
        "run_dir": str(directory / "run"),
        "scope": "experts",
        "calibration": {
            "text": {"files": [str(calibration)]},
            "samples": SAMPLES,
            "sequence_length": WINDOW,
            "shards": 8,
            "micro_batch": 8,
            "gradient": {"samples": 32},
        },
        "points": [{"name": row, **ROWS[row]} for row in rows],
        "evaluation": {"perplexity": {"text": {"files": [str(evaluation)]}, "window": WINDOW}},
    }
    path = directory / "sweep.json"  # JSON is YAML
    path.write_text(json.dumps(sweep))
    command = [sys.executable, "-m", "pipeline.sweep", str(path), "--in-process", "--json"]
    with (directory / "log.txt").open("w") as log, (directory / "printed.json").open("w") as printed:
        code = subprocess.run(command, cwd=ROOT, env=environment(), stdout=printed, stderr=log, check=False).returncode
    if code:
        raise JobFailed(f"{' '.join(command)} ended with {code}:\n{(directory / 'log.txt').read_text()[-2000:]}")
    results: dict[str, Any] = json.loads((directory / "printed.json").read_text())
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("models", nargs="+", type=Path)
    options.add_argument("--stories", type=Path, required=True, help="a JSON list of at least 950 texts")
    options.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    options.add_argument(
        "--drawn",
        action="store_true",
        help="draw the samples from the 400 texts, which leaves others to measure divergence on; default: the first",
    )
    options.add_argument("--bfloat16", action="store_true", help="compress copies of the models in bfloat16")
    options.add_argument("--directory", type=Path, help="where the sweeps are kept; default: a temporary directory")
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = options.parse_args(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as temporary:
        directory = arguments.directory or Path(temporary)
        results = []
        for model in arguments.models:
            folder = (directory / model.name).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            texts = write_texts(arguments.stories, model, arguments.drawn, folder)
            source = write_bfloat16(model, folder) if arguments.bfloat16 else model
            results.append(run_sweep(source, texts, arguments.rows, folder))
    if arguments.json:
        print(json.dumps(results))
        return 0
    print("perplexity (numbers of the decoder, bytes of the checkpoint, divergence)\n")
    points = [[_cell(point) for point in each["points"]] for each in results]
    labels = [point["point"] for point in results[0]["points"]]
    dense = ["dense", *(f"{each['dense']['perplexity']:.3f}" for each in results)]
    rows = [dense, *([label, *cells] for label, *cells in zip(labels, *points, strict=True))]
    print_table(["point", *(model.name for model in arguments.models)], rows)
    return 0


def _cell(point: Mapping[str, Any]) -> str:
    figures = [point["numbers_kept"], point["bytes_kept"], point["divergence"]]
    return f"{point['perplexity']:.3f} ({', '.join('–' if each is None else f'{each:.4f}' for each in figures)})"


if __name__ == "__main__":
    sys.exit(main())
