"""Compress a trained model at several sizes in several ways, and print the divergence from it on other text.

    python -m tools.benchmarks.divergences MODEL --text TEXT --rows corrected refined --keep 0.6 0.5
    python -m tools.benchmarks.divergences MODEL --text TEXT --bfloat16 --rows uniform learned --bytes 0.285 0.22

`--text`: a text, or a JSON list of texts, of which the first `--texts` are joined by newlines. Calibration samples are
`--samples` of 256 tokens, drawn from the whole text. As many windows of the remaining text are scored; a job scores a
tenth of that. `--rows`: ways to compress. `--keep`: shares of the decoder's numbers, `--bytes`: of its bytes. One sweep
computes all points. With the same `--directory` it resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline import sweep
from pipeline.units import sharding
from tools.benchmarks.jobs import end_on_sigterm, print_table
from tools.benchmarks.mixture_quality import write_bfloat16

WINDOW = 256


def _loss_aware(bits: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    rounding = {} if bits is None else {"quantize": [{"bits": "auto", **bits}]}
    return {"methods": [{"method": "loss_aware", **fields}], **rounding}


def _all(bits: int, levels: str) -> dict[str, Any]:
    return {"methods": [], "quantize": [{"bits": bits, "levels": levels}]}


REFINED: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "corrected": {"correct": "output"},
    "refined": {"refine": True},
    "refined-dense": {"refine": {"inputs": "dense"}},
    "refined-mixed": {"refine": {"inputs": "mixed"}},
    "corrected-refined": {"correct": "output", "refine": True},
}
ROWS: Mapping[str, dict[str, Any]] = {
    **{name: _loss_aware(**fields) for name, fields in REFINED.items()},
    **{kind: _loss_aware({"levels": kind}) for kind in ("uniform", "normal", "learned", "auto")},
    **{f"{kind}-refined": _loss_aware({"levels": kind}, refine=True) for kind in ("uniform", "learned")},
    **{f"{kind}-corrected": _loss_aware({"levels": kind}, correct="output") for kind in ("uniform", "learned")},
    **{f"{bits}-{kind}": _all(bits, kind) for bits in (2, 3, 4) for kind in ("uniform", "normal", "learned")},
    "4-iq4_nl": _all(4, "iq4_nl"),
}


def write_qwen2(model: Path, directory: Path) -> Path:
    """Write a Llama model as a Qwen2, whose query, key and value have biases of zero. Return its directory."""
    copy = directory / "qwen2"
    copy.mkdir(exist_ok=True)
    tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for role in ("q_proj", "k_proj", "v_proj"):
        for name in [name for name in tensors if name.endswith(f"{role}.weight")]:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros_like(tensors[name][:, 0])
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    (copy / "config.json").write_text(json.dumps(config))
    for path in model.glob("tokenizer*"):
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def run_sweep(model: Path, text: Path, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the rows as one sweep in a directory. Return its results."""
    sizes = {"bytes": options.bytes} if options.bytes else {"keep": options.keep}
    rows = [{"name": row, **ROWS[row]} for row in options.rows]
    points = [{**row, **(sizes if row["methods"] else {"keep": []})} for row in rows]
    manifest = {
        "version": 1,
        "model": {"source": str(model)},
        "output": str(directory / "output"),
        "run_dir": str(directory / "run"),
        "calibration": {
            "text": {"files": [str(text)]},
            "samples": options.samples,
            "sequence_length": WINDOW,
            "shards": 8,
            "micro_batch": 8,
        },
        "points": points,
        "workers": {"max": 1, "cpus": 1},
    }
    path = directory / "sweep.json"  # JSON is YAML
    path.write_text(json.dumps(manifest))
    sharding.HELD_OUT = 1  # samples for each scored window: a job's tenth is too few to compare what differs by 3 %
    code = sweep.main([str(path), "--in-process"])
    if code:
        sys.exit(code)
    results: dict[str, Any] = json.loads((directory / "run" / "sweep.json").read_text())
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("model", type=Path)
    options.add_argument("--text", type=Path, required=True)
    options.add_argument("--texts", type=int, default=850, help="of a JSON list; default: 850")
    options.add_argument("--rows", nargs="+", choices=tuple(ROWS), required=True)
    options.add_argument("--keep", nargs="+", type=float, default=[0.6, 0.5])
    options.add_argument("--bytes", nargs="+", type=float)
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--bfloat16", action="store_true", help="compress a copy of the model in bfloat16")
    options.add_argument("--qwen2", action="store_true", help="compress a Llama model as a Qwen2 with biases of zero")
    options.add_argument("--directory", type=Path, help="where the sweep is kept; default: a temporary directory")
    arguments = options.parse_args(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as temporary:
        directory = (arguments.directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        text = arguments.text.read_text()
        if arguments.text.suffix == ".json":
            text = "\n".join(json.loads(text)[: arguments.texts])
        (directory / "text.txt").write_text(text)
        model = write_qwen2(arguments.model, directory) if arguments.qwen2 else arguments.model.resolve()
        source = write_bfloat16(model, directory) if arguments.bfloat16 else model
        results = run_sweep(source, directory / "text.txt", arguments, directory)
    header = ["point", "numbers", "bytes", "divergence", "predicted", "perplexity", "seconds"]
    fields = ["numbers_kept", "bytes_kept", "divergence", "predicted_loss", "held_out_perplexity", "seconds"]
    cells = [[point["point"], *(_cell(point[field]) for field in fields)] for point in results["points"]]
    print_table(header, cells)
    return 0


def _cell(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.4g}"


if __name__ == "__main__":
    sys.exit(main())
