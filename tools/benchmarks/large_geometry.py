"""LoRC and Joint rank-k on layers of Llama-2-70B's shape: peak memory of every process.

    python -m tools.benchmarks.large_geometry [--layers 2] [--methods lorc joint_rank_k] [--directory DIR]

Random bfloat16 weights, a small vocabulary; about 1.7 GB a layer. The jobs are data-free: no walk, one unit per group.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from pipeline.families.registry import geometry_of, standard_config
from stores.checkpoint import write_index, write_shard
from tools.benchmarks.jobs import print_table, run_manifest

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
METHODS: dict[str, dict[str, Any]] = {
    "lorc": {"method": "lorc", "cache_keep": 0.6},
    "joint_rank_k": {"method": "joint_rank_k", "keep": 0.8},
}
GIB = 2**30


def write_model(directory: Path, num_layers: int) -> Path:
    """A sharded checkpoint, one shard per layer; at most one tensor in memory besides the shard being written."""
    directory.mkdir(parents=True)
    config = CONFIG | {"num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config))
    geometry = geometry_of(standard_config(config))
    parts = [dict(geometry.outer), *(dict(layer.tensors().values()) for layer in geometry.layers)]
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(parts):
        generator = torch.Generator().manual_seed(number)
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        write_shard(directory, file, {name: _random(shape, generator) for name, shape in shapes.items()})
        weight_map |= dict.fromkeys(shapes, file)
    write_index(directory, weight_map, 2 * geometry.model_numbers(), geometry.model_numbers())
    return directory


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    for rows in tensor.split(1024):
        rows.copy_(torch.randn(rows.shape, generator=generator) * shape[1] ** -0.5)
    return tensor


def main() -> int:
    """The benchmark. Exit code 1 when a process needs more than 6 GiB."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=sorted(METHODS))
    options.add_argument("--directory", type=Path, help="where the weights and the jobs go; default: a temporary one")
    arguments = options.parse_args()
    rows, worst = [], 0.0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        model = write_model(Path(scratch) / "model", arguments.layers)
        for name in arguments.methods:
            folder = Path(scratch) / name
            folder.mkdir()
            manifest = {
                "version": 1,
                "model": {"source": str(model)},
                "output": str(folder / "output"),
                "run_dir": str(folder / "run"),
                "methods": [METHODS[name]],
                "workers": {"max": 1, "cpus": 2},
            }
            summary = run_manifest(manifest, folder)
            peaks = {
                "driver": summary["peak_bytes"]["driver"],
                "worker": max(summary["peak_bytes"]["workers"].values()),
            }
            worst = max(worst, *peaks.values())
            memory = [f"{peaks[kind] / GIB:.2f} GiB" for kind in ("driver", "worker")]
            rows.append([name, *memory, f"{summary['seconds']['total']:.0f} s"])
    print_table(["method", "driver peak", "worker peak", "wall"], rows)
    return 0 if worst <= 6 * GIB else 1


if __name__ == "__main__":
    sys.exit(main())
