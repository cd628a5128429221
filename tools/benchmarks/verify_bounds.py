"""What `verify` measures of healthy and of damaged checkpoints: models × methods × keeps, every tensor damaged in turn.

    python -m tools.benchmarks.verify_bounds MODEL… [--text FILE] [--keeps 0.9 0.6 0.4] [--results FILE]

For each job: how far the figures on the stored sample are from the job's, of the OUTPUT as it is (with one thread and
with two), and of copies in each of which one tensor is zeroed, or swapped with
the one of that name in the next layer. Beside it the relative errors that a bound without stored figures would have
to tell apart, on the sample and on random tokens. Prints a Markdown table and the two extremes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifests.errors import InputError
from manifests.loading import parse_manifest
from manifests.schema import Workers
from pipeline.checkpoint.compression_record import read_record
from pipeline.inputs.calibration import sample_tokens
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.inputs.sources import open_dense
from pipeline.run import run_job
from stores.source import SourceCheckpoint
from tools.benchmarks.jobs import end_on_sigterm, markdown_row
from workers.cluster import connect
from workers.comparing import compare_models, deviation
from workers.layers import cpu_reader

METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"methods": [{"method": "flat_llm"}]},
    "lorc": {"methods": [{"method": "lorc", "allocation": "uniform", "cache_keep": 1.0}]},  # its keep is of the cache
    "lestd": {"methods": [{"method": "lestd", "target": "attention", "sweeps": 2, "refine_sweeps": 1}]},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k"}]},
    "loss_aware": {"methods": [{"method": "loss_aware"}]},
    "rounded": {"methods": [{"method": "joint_rank_k"}], "quantize": {"bits": 4}},
}


class Tampered(SourceCheckpoint):
    """A checkpoint that reads some tensors otherwise than they are stored."""

    def read(self, names: Any) -> dict[str, Tensor]:
        """As `SourceCheckpoint.read`, with the replacements."""
        found = super().read(names)
        return {name: REPLACED.get(name, tensor) for name, tensor in found.items()}


REPLACED: dict[str, Tensor] = {}


def damages(checkpoint: SourceCheckpoint, config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What is damaged, and the tensors in place of those that are stored.

    Nothing that changes no number; no shape of rounded weights, which their codes say, too; and no bias of keys without
    rotary embeddings, which adds the same to all scores of a query and so has no effect at all.
    """
    block = config["block"]
    prefix, key_bias = f"{block['layers']}.", f"{block['modules']['k']}.bias"
    for name, record in sorted(checkpoint.tensors.items()):
        if name.endswith("_shape") or (name.endswith(key_bias) and block["rotary"] is None):
            continue
        tensor = checkpoint.read([name])[name]
        if tensor.any():
            yield f"zeroed {name}", {name: torch.zeros_like(tensor)}
        layer, _, rest = name.removeprefix(prefix).partition(".")
        other = f"{prefix}{int(layer) + 1}.{rest}" if name.startswith(prefix) and layer.isdecimal() else ""
        if other in checkpoint.tensors and checkpoint.tensors[other].shape == record.shape:
            theirs = checkpoint.read([other])[other]
            if not torch.equal(tensor, theirs):
                yield f"swapped {name}", {name: theirs, other: tensor}


def measure(model: str, output: Path) -> dict[str, Any]:
    """Largest and smallest figures of one OUTPUT."""
    original, standard = open_dense(model)
    checkpoint, config = read_checkpoint(str(output))
    recorded = read_record(output)["compared"]
    ids_BS, layers = torch.tensor(recorded["tokens"]), standard["num_hidden_layers"]
    tampered = Tampered(**vars(checkpoint))

    def compared(source: SourceCheckpoint, ids: Tensor) -> Mapping[str, Any]:
        dense = cpu_reader(original, standard, torch.float32)
        packed = cpu_reader(source, config, torch.float32)
        return compare_models(dense, packed, (None,) * layers, ids).report()

    healthy = 0.0
    for threads in (2, 1):
        torch.set_num_threads(threads)
        healthy = max(healthy, *deviation(compared(checkpoint, ids_BS), recorded))
    random = compared(checkpoint, sample_tokens(None, config)[1])
    least, weakest = float("inf"), ""
    error = float("inf")
    for what, replaced in damages(checkpoint, config):
        REPLACED.clear()
        REPLACED.update(replaced)
        try:
            found = compared(tampered, ids_BS)
        except ValueError:  # indices and bitmaps that make no sense
            continue
        finally:
            REPLACED.clear()
        apart = max(deviation(found, recorded))
        error = min(error, max(*found["layer_errors"], found["error"]))
        if apart < least:
            least, weakest = apart, what
    return {
        "healthy": healthy,
        "damaged": least,
        "weakest": weakest,
        "healthy_error": max(*recorded["layer_errors"], recorded["error"]),
        "healthy_error_random": max(*random["layer_errors"], random["error"]),
        "damaged_error": error,
    }


def job(model: str, text: str, blocks: dict[str, Any], keep: float, folder: Path) -> Path:
    """One OUTPUT; `blocks` of its manifest say by which methods."""
    (method,) = blocks["methods"]
    methods = [{**method, "cache_keep": keep}] if "cache_keep" in method else [method]
    document: dict[str, Any] = {
        "version": 1,
        "model": {"source": model},
        "output": str(folder / "output"),
        "run_dir": str(folder / "run"),
        "budget": None if "cache_keep" in method else {"keep": keep},
        **blocks,
        "methods": methods,
        "calibration": {
            "text": {"files": [text]}, "samples": 16, "sequence_length": 128, "shards": 2, "micro_batch": 8,
        },
    }  # fmt: skip
    run_job(parse_manifest(document), fresh=False, address=None, stop=threading.Event(), quiet=True)
    return folder / "output"


def main() -> int:
    """The benchmark; exit 1 when a bound could not tell the two apart."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("models", nargs="+")
    options.add_argument("--text", default="../shared/text/tinyshakespeare.txt")
    options.add_argument("--keeps", nargs="+", type=float, default=[0.9, 0.8, 0.6, 0.4])
    options.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=sorted(METHODS))
    options.add_argument("--results", default="verify_bounds.jsonl")
    arguments = options.parse_args()
    end_on_sigterm()
    connect(None, Workers())
    columns = ("healthy", "damaged", "healthy_error", "healthy_error_random", "damaged_error", "weakest")
    print(markdown_row(["model", "method", "keep", *columns]))
    print(markdown_row(["---"] * (len(columns) + 3)))
    found: list[dict[str, Any]] = []
    for model in arguments.models:
        for name in arguments.methods:
            for keep in arguments.keeps:
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        figures = measure(model, job(model, arguments.text, METHODS[name], keep, Path(folder)))
                except InputError as error:
                    print(f"{Path(model).name}, {name}, {keep}: {error}", file=sys.stderr, flush=True)
                    continue
                found.append({"model": Path(model).name, "method": name, "keep": keep, **figures})
                with open(arguments.results, "a", encoding="utf-8") as results:
                    results.write(json.dumps(found[-1]) + "\n")
                shown = [f"{value:.2e}" if isinstance(value, float) else str(value) for value in figures.values()]
                by_name = dict(zip(figures, shown, strict=True))
                row = [Path(model).name, name, f"{keep:g}", *(by_name[column] for column in columns)]
                print(markdown_row(row), flush=True)
    worst, weakest = max(one["healthy"] for one in found), min(one["damaged"] for one in found)
    print(f"\n{len(found)} jobs: healthy at most {worst:.2e}, damaged at least {weakest:.2e}")
    return 0 if worst < weakest else 1


if __name__ == "__main__":
    sys.exit(main())
