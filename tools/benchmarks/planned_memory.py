"""Measure whether the plan bounds the memory of a job's processes: peak <= plan <= 1.25 peak.

    python -m tools.benchmarks.planned_memory MODEL --text FILE [FILE ...] [--jobs loss_aware rounding flat_llm]
        [--layers 2] [--samples 4] [--sequence 512] [--workers 1] [--cpus 1]

`python -m pipeline.run` compresses MODEL, a directory of safetensors. With `--layers` it is cut to its first layers:
peaks do not grow with them, seconds do. Peaks are those of the summary, the kernel's high-water marks. Exits 1 if one
lies outside of these bounds.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.jobs import end_on_sigterm, manifest_of, print_table, run_manifest

MIB, MOST = 2**20, 1.25
JOBS: dict[str, dict[str, Any]] = {
    "loss_aware": {"methods": [{"method": "loss_aware"}]},
    "flat_llm": {"methods": [{"method": "flat_llm"}]},
    "rounding": {"methods": [], "budget": None, "quantize": {"bits": 3, "group": 32}},
    "rounding of all": {"methods": [], "budget": None, "quantize": {"bits": 8, "group": 32, "what": "all"}},
}


def cut_model(model: Path, layers: int, directory: Path) -> Path:
    """Write a model of the first `layers` layers of another; return its directory."""
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    numbered = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found = numbered.search(f".{name}")
            if found is None or int(found[1]) < layers:
                tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, directory / file.name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def measure(model: Path, job: str, options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Run a job; return planned and measured bytes of the driver, and of the worker with the highest peak."""
    calibration = {"samples": options.samples, "sequence_length": options.sequence, "shards": options.workers}
    workers = {"min": options.workers, "max": options.workers, "cpus": options.cpus}
    blocks = JOBS[job] | {"workers": workers}
    summary = run_manifest(manifest_of(directory, model, options.text, calibration, **blocks), directory)
    plan, peaks = summary["plan"], summary["peak_bytes"]
    pairs: Mapping[str, tuple[int, int]] = {
        "worker": (plan["worker_peak_bytes"], max(peaks["workers"].values())),
        "driver": (plan["driver_peak_bytes"], peaks["driver"]),
    }
    return [
        {"job": job, "process": process, "planned": planned, "peak": peak, "ratio": planned / peak}
        for process, (planned, peak) in pairs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", nargs="+", required=True, help="files of calibration text")
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=["loss_aware", "rounding", "flat_llm"])
    parser.add_argument("--layers", type=int, help="cut the model to so many; without it, all")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=1)
    options = parser.parse_args(argv)
    end_on_sigterm()
    rows: list[dict[str, Any]] = []
    for job in options.jobs:
        with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as directory:
            place = Path(directory)
            model = cut_model(options.model, options.layers, place / "model") if options.layers else options.model
            rows += measure(model, job, options, place)
    cells = [
        [
            row["job"],
            row["process"],
            *(f"{row[name] / MIB:,.0f}" for name in ("planned", "peak")),
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    print_table(["job", "process", "planned, MiB", "peak, MiB", "planned / peak"], cells)
    return 0 if all(1.0 <= row["ratio"] <= MOST for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
