"""Run a job on a mixture of Qwen3-30B-A3B's layer geometry, kill it twice, and compare it with its plan.

    python -m tools.benchmarks.mixture_job [--layers 6] [--samples 8] [--method flat_llm] [--kill-after 60 90] [--json]

A random model in bfloat16: hidden 2048, 32 heads and 4 of keys and values of 128, 128 experts of width 768 of which a
token passes 8. Six layers take 7.6 GB of disk, and RUN_DIR and OUTPUT about as much again. The command is killed
(SIGKILL, with its workers) so many seconds after each start, and run again. Memory is the peak of all lives. Reads are
those of all lives, of any file or socket: the source, moments and hidden states in RUN_DIR, and Ray's own messages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from deploy.quickstart.text import story_text
from tests.factories import make_tokenizer
from tools.benchmarks.jobs import ROOT, JobFailed, end_on_sigterm, environment, manifest_of, print_table
from tools.benchmarks.memory_over_experts import layer_shapes
from tools.benchmarks.memory_over_layers import SAMPLING_SECONDS, Watch, random_weight

GIB = 2**30
CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SEQUENCE, SHARDS = 128, 2
METHODS: Mapping[str, dict[str, Any]] = {
    "loss_aware": {"method": "loss_aware"},
    "flat_llm": {"method": "flat_llm", "attention": False, "allocation": "uniform"},
    "heapr": {"method": "heapr"},
}


@dataclass
class KillingWatch(Watch):
    """Watches the processes of a job and what they read, and kills them all when `due` returns True."""

    due_seconds: float | None = None
    read_bytes: dict[int, int] = field(default_factory=dict)

    def __call__(self, pid: int) -> None:
        """Watch until the command has ended or is killed."""
        command, started = psutil.Process(pid), time.monotonic()
        while command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
            self._sample(command)
            self._sample_reads()
            if self.due_seconds is not None and time.monotonic() - started > self.due_seconds:
                os.killpg(pid, signal.SIGKILL)
                return
            time.sleep(SAMPLING_SECONDS)

    def _sample_reads(self) -> None:
        for pid, peaks in self.processes.items():
            if peaks.kind == "worker":
                try:
                    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                except OSError:
                    continue  # it has ended
                self.read_bytes[pid] = int(fields["rchar"])


def write_model(directory: Path, layers: int) -> int:
    """Write the model, half a gigabyte in memory at a time. Return its bytes."""
    directory.mkdir(parents=True)
    config = Qwen3MoeConfig(**CONFIG, num_hidden_layers=layers, dtype="bfloat16")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(directory)
    make_tokenizer(CONFIG["vocab_size"]).save_pretrained(directory)
    hidden, vocabulary = CONFIG["hidden_size"], CONFIG["vocab_size"]
    outer = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate([outer, *(layer_shapes(layer, CONFIG) for layer in range(layers))]):
        names = sorted(shapes)
        for start in range(0, len(names), 128):
            part = {name: shapes[name] for name in names[start : start + 128]}
            file = f"model-{number:05d}-{start:05d}.safetensors"
            generator = torch.Generator().manual_seed(number * 1000 + start)
            tensors = {name: random_weight(shape, generator) for name, shape in part.items()}
            save_file(tensors, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def run_life(manifest: Path, watch: KillingWatch, log: Path) -> str | None:
    """Run the command to its end or until it is killed. Return what it printed, or None if it was killed."""
    command = [sys.executable, "-m", "pipeline.run", str(manifest), "--json"]
    with log.open("a") as errors:
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            watch(job.pid)
            printed, _ = job.communicate()
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    if job.returncode == -signal.SIGKILL and watch.due_seconds is not None:
        return None
    if job.returncode:
        raise JobFailed(f"{' '.join(command)} ended with {job.returncode}:\n{log.read_text()[-20000:]}")
    return printed


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the job with its kills. Return memory by kind of process, bytes read, and the summary's figures."""
    source_bytes = write_model(directory / "model", arguments.layers)
    text = directory / "text.txt"
    text.write_text(story_text(200_000, seed=1), encoding="utf-8")
    calibration = {"samples": arguments.samples, "sequence_length": SEQUENCE, "shards": SHARDS, "micro_batch": 2}
    blocks = {"methods": [METHODS[arguments.method]], "budget": {"keep": 0.8, "scope": "experts"}}
    job = manifest_of(
        directory, directory / "model", [text], {**calibration, "propagate": "dense"}, **blocks, resume={"every": 1}
    )
    manifest = directory / "manifest.json"  # JSON is YAML
    manifest.write_text(json.dumps(job))
    watch, lives, started = KillingWatch(), [], time.monotonic()
    for due in [*arguments.kill_after, None]:
        watch.due_seconds, begun = due, time.monotonic()
        printed = run_life(manifest, watch, directory / "log.txt")
        lives.append(time.monotonic() - begun)
        print(f"life {len(lives)}: {lives[-1]:.0f} s", file=sys.stderr, flush=True)
        if printed is not None:
            break
    assert printed is not None
    summary = json.loads(printed)
    return {
        "source_bytes": source_bytes,
        "processes": watch.by_kind(),
        "worker_read_bytes": sum(watch.read_bytes.values()),
        "kills": len(lives) - 1,
        "lives_s": lives,
        "total_s": time.monotonic() - started,
        "last_life_seconds": summary["seconds"],
        "plan": summary["plan"],
    }


def print_figures(run: Mapping[str, Any]) -> None:
    """Print a table of what was planned and what was measured."""
    plan, processes = run["plan"], run["processes"]
    worker, driver = processes["worker"], processes["driver"]
    print_table(
        ["", "planned", "measured"],
        [
            ["worker's heap, GiB", f"{plan['worker_peak_bytes'] / GIB:.2f}", f"{worker['heap_bytes'] / GIB:.2f}"],
            ["worker's RSS, GiB", "", f"{worker['rss_bytes'] / GIB:.2f}"],
            ["driver's heap, GiB", "", f"{driver['heap_bytes'] / GIB:.2f}"],
            [
                "read, over the source (planned: of the source alone, without kills)",
                f"{plan['read_bytes'] / run['source_bytes']:.2f}",
                f"{run['worker_read_bytes'] / run['source_bytes']:.2f}",
            ],
            ["kills", "", run["kills"]],
            ["seconds", "", f"{run['total_s']:.0f}"],
        ],
    )
    print("\nseconds of the last life: " + json.dumps(run["last_life_seconds"]))
    print("lives: " + ", ".join(f"{seconds:.0f} s" for seconds in run["lives_s"]))


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--samples", type=int, default=8, help="of 128 tokens")
    options.add_argument("--method", choices=tuple(METHODS), default="flat_llm")
    options.add_argument("--kill-after", type=float, nargs="*", default=[60, 90], help="seconds of each life")
    options.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = options.parse_args(argv)
    end_on_sigterm()
    needed = 3 * (arguments.layers * 1.3e9 + 1e9)
    if shutil.disk_usage(arguments.directory).free < needed:
        raise SystemExit(f"{arguments.directory}: {needed / 1e9:.0f} GB are needed free; give another --directory")
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-", dir=arguments.directory) as directory:
        run = measure(arguments, Path(directory))
    if arguments.json:
        print(json.dumps(run))
    else:
        print_figures(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
