"""A job against a plain script that compresses the whole model in memory, as published codes do: CPU-seconds, memory.

    python -m tools.benchmarks.whole_model [--layers 6] [--wide] [--keep 0.8] [--json]

Both do the same work, in the paper's settings: FLAT-LLM with head-wise PCA of the values, leverage scores, uniform
ranks, statistics behind compressed layers; 16 x 256 tokens; one thread; then the factors are saved. The model is
random, of layers of Qwen2.5-0.5B's sizes (6 of them: 91 M parameters; 33: 500 M), or with `--wide` of 19.9 M with more
attention than MLP: the cost does not depend on what the weights are. Processes are watched from outside, Ray's daemons
and all. The text has no tokens beyond the samples: the script scores nothing, and so does the job, but for the record
of what its layers do on 128 tokens.

The script computes as the authors of FLAT-LLM do (TTTTTTris/FLAT-LLM e7fc300, lib/prune.py and lib/layerwrapper.py),
step by step: model and hidden states in memory, one sample at a time through a layer, for its statistics and again for
its outputs; each sample's products in float64, added to sums in float32; inverses, and the whole of C (C + I)^-1 for
its diagonal. It computes in the checkpoint's bfloat16, where theirs runs in float16, slow on a CPU. Theirs also takes
moments of queries and keys, scores the dense and the compressed model, and prints; the script does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.quickstart.text import story_text
from tools.benchmarks.jobs import end_on_sigterm, environment, print_table, run_manifest
from tools.benchmarks.memory_over_layers import Watch, write_model

SAMPLES, LENGTH = 16, 256
SIZES = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
PAPER = {"method": "flat_llm", "basis": "value", "weighting": "none", "selection": "leverage", "allocation": "uniform"}


@torch.no_grad()
def compress_in_memory(source: Path, text: Path, output: Path, keep: float) -> None:
    """The plain script: layer after layer, statistics, factors, and the compressed layer's outputs."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = AutoTokenizer.from_pretrained(source)(text.read_text(encoding="utf-8")).input_ids[: SAMPLES * LENGTH]
    decoder, config = model.model, model.config
    hidden = [decoder.embed_tokens(sample[None]) for sample in torch.tensor(ids).view(SAMPLES, LENGTH)]
    angles = decoder.rotary_emb(hidden[0], torch.arange(LENGTH)[None])
    factors: dict[str, Tensor] = {}
    for number, layer in enumerate(decoder.layers):
        values, channels = _moments(layer, hidden, angles, config)
        ratio = _ratio(layer, keep)
        factored = _compress_attention(layer, values, round(ratio * config.head_dim))
        factors |= {f"model.layers.{number}.{name}": value for name, value in factored.items()}
        _compress_mlp(layer.mlp, channels, round(ratio * config.intermediate_size))
        hidden = [layer(sample, position_embeddings=angles) for sample in hidden]
    output.mkdir()
    tensors = model.state_dict() | factors
    save_file({name: value.contiguous() for name, value in tensors.items()}, output / "model.safetensors")


def _moments(layer: nn.Module, hidden: list[Tensor], angles: Any, config: Any) -> tuple[Tensor, Tensor]:
    heads, width, size = config.num_key_value_heads, config.head_dim, config.intermediate_size
    values, channels = torch.zeros(heads, width, width), torch.zeros(size, size)

    def add_values(_: nn.Module, __: Any, output: Tensor) -> None:
        rows = output.flatten(0, -2).unflatten(-1, (heads, width)).transpose(0, 1).double()
        values.add_(rows.mT @ rows)

    def add_channels(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        channels.add_(rows.T @ rows)

    parts: Any = layer
    hooks = (
        parts.self_attn.v_proj.register_forward_hook(add_values),
        parts.mlp.down_proj.register_forward_pre_hook(add_channels),
    )
    for sample in hidden:
        layer(sample, position_embeddings=angles)
    for hook in hooks:
        hook.remove()
    return values.double(), channels.double()


def _ratio(layer: Any, keep: float) -> float:
    """Of v, o and the MLP, so that the layer keeps `keep` of its numbers, queries and keys whole."""
    total = sum(part.numel() for part in layer.parameters())
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    touched = sum(linear.weight.numel() for linear in linears)
    return (keep * total - (total - touched)) / touched


def _compress_attention(layer: Any, moment: Tensor, rank: int) -> dict[str, Tensor]:
    """Q̃ᵀ W_v and W_o Q̃; the dense weights in place become their product, for the forward pass."""
    value, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
    groups, width, _ = moment.shape
    basis = torch.linalg.eigh(moment).eigenvectors[:, :, -rank:]
    encoded = basis.mT @ value.double().view(groups, width, -1)
    every = basis.repeat_interleave(output.shape[1] // width // groups, dim=0)
    decoded = output.double().view(output.shape[0], -1, width).transpose(0, 1) @ every
    value.copy_((basis @ encoded).flatten(0, 1))
    output.copy_((decoded @ every.mT).transpose(0, 1).flatten(1))
    factors = {"v_proj": encoded.flatten(0, 1), "o_proj": decoded.transpose(0, 1).flatten(1)}
    return {f"self_attn.{name}.weight": factor.to(value.dtype) for name, factor in factors.items()}


def _compress_mlp(mlp: Any, moment: Tensor, count: int) -> None:
    """The highest ridge leverage scores stay, and down is fitted to them."""
    ridge = moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    scores = (moment @ torch.linalg.inv(moment + ridge)).diagonal()
    kept = scores.topk(count).indices.sort().values
    down = (torch.linalg.inv(moment[kept][:, kept]) @ moment[kept] @ mlp.down_proj.weight.double().T).T
    weights = {"gate_proj": mlp.gate_proj.weight[kept], "up_proj": mlp.up_proj.weight[kept], "down_proj": down}
    for name, weight in weights.items():
        getattr(mlp, name).weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)


def watch_script(source: Path, text: Path, output: Path, keep: float) -> Watch:
    """The script in a process of its own. Raises CalledProcessError when it fails."""
    watch = Watch()
    command = [
        sys.executable,
        "-m",
        "tools.benchmarks.whole_model",
        "--script",
        *map(str, (source, text, output, keep)),
    ]
    with subprocess.Popen(command, env={**environment(), "OMP_NUM_THREADS": "1"}) as script:
        watch(script.pid)
    if script.returncode:
        raise subprocess.CalledProcessError(script.returncode, command)
    return watch


def compare(layers: int, keep: float, folder: Path, sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """CPU-seconds of all processes, and their anonymous memory together, of both."""
    source, text = folder / "model", folder / "text.txt"
    write_model(source, layers, sizes)
    text.write_text(_cut_text(source), encoding="utf-8")
    calibration = {"text": {"files": [str(text)]}, "samples": SAMPLES, "sequence_length": LENGTH, "shards": 1}
    manifest: Mapping[str, Any] = {
        "version": 1, "model": {"source": str(source)}, "output": str(folder / "job"), "run_dir": str(folder / "run"),
        "budget": {"keep": keep}, "calibration": {**calibration, "propagate": "compressed"}, "methods": [PAPER],
    }  # fmt: skip
    ours = Watch()
    run_manifest(manifest, folder, ours)
    return {"job": _figures(ours), "script": _figures(watch_script(source, text, folder / "script", keep))}


def _cut_text(source: Path) -> str:
    """Half a sample longer than all samples."""
    text = story_text(40_000, seed=0)
    spans = AutoTokenizer.from_pretrained(source)(text, return_offsets_mapping=True).offset_mapping
    return text[: spans[SAMPLES * LENGTH + LENGTH // 2][1]]


def _figures(watch: Watch) -> dict[str, Any]:
    seconds = sum(peaks.cpu_seconds for peaks in watch.processes.values())
    kinds = {kind: found for kind, found in watch.by_kind().items() if "cpu_seconds" in found}
    return {"cpu_seconds": seconds, "bytes": float(watch.together_bytes), "kinds": kinds}


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--wide", action="store_true", help="layers with more attention than MLP")
    options.add_argument("--keep", type=float, default=0.8)
    options.add_argument("--json", action="store_true")
    options.add_argument(
        "--script", nargs=4, metavar=("MODEL", "TEXT", "OUTPUT", "KEEP"), help="the plain script alone"
    )
    arguments = options.parse_args(argv)
    if arguments.script:
        torch.set_num_threads(1)
        source, text, output, keep = arguments.script
        compress_in_memory(Path(source), Path(text), Path(output), float(keep))
        return 0
    end_on_sigterm()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = compare(arguments.layers, arguments.keep, Path(folder), {} if arguments.wide else SIZES)
    if arguments.json:
        print(json.dumps(found))
        return 0
    ratios = {name: found["job"][name] / found["script"][name] for name in ("cpu_seconds", "bytes")}
    print_table(
        ["", "CPU-seconds", "memory, MiB"],
        [[name, f"{figures['cpu_seconds']:.1f}", f"{figures['bytes'] / 2**20:.0f}"] for name, figures in found.items()]
        + [["job ÷ script", f"{ratios['cpu_seconds']:.2f}", f"{ratios['bytes']:.2f}"]]
        + [
            [f"of the job: {kind}", f"{peaks['cpu_seconds']:.1f}", f"{peaks['heap_bytes'] / 2**20:.0f}"]
            for kind, peaks in found["job"]["kinds"].items()
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
