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
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from transformers import Qwen3MoeConfig

from deploy.quickstart.text import story_text
from tools.benchmarks.jobs import (
    SAMPLING_SECONDS,
    JobFailed,
    Watch,
    end_on_sigterm,
    family_of,
    manifest_of,
    print_table,
    run_manifest,
)
from tools.benchmarks.random_models import mixture_shapes, write_random_model

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
TENSORS_PER_FILE = 128
METHODS: Mapping[str, dict[str, Any]] = {
    "loss_aware": {"method": "loss_aware"},
    "flat_llm": {"method": "flat_llm", "attention": False, "allocation": "uniform"},
    "heapr": {"method": "heapr"},
}


@dataclass
class KillingWatch(Watch):
    """Watches the processes of a job and their reads, and kills them all after `due_seconds`."""

    due_seconds: float | None = None
    killed: bool = False
    read_bytes: dict[int, int] = field(default_factory=dict)

    def __call__(self, pid: int) -> None:
        """Watch until the command has ended, or kill it when it is due."""
        command, started = psutil.Process(pid), time.monotonic()
        self.killed = False
        while command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
            self._sample(command)
            if self.due_seconds is not None and time.monotonic() - started > self.due_seconds:
                self.killed = True
                for process in [*family_of(command)]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                return
            time.sleep(SAMPLING_SECONDS)

    def _sample(self, command: psutil.Process) -> None:
        super()._sample(command)
        self._sample_reads()

    def _sample_reads(self) -> None:
        for pid, peaks in self.processes.items():
            if peaks.kind == "worker":
                try:
                    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                except OSError:
                    continue  # it has ended
                self.read_bytes[pid] = int(fields["rchar"])


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the job with its kills. Return memory by kind of process, bytes read, and the summary's figures."""
    config = Qwen3MoeConfig(**CONFIG, num_hidden_layers=arguments.layers, dtype="bfloat16")
    source_bytes = write_random_model(
        directory / "model",
        config,
        "Qwen3MoeForCausalLM",
        lambda layer: mixture_shapes(layer, CONFIG),
        TENSORS_PER_FILE,
    )
    text = directory / "text.txt"
    text.write_text(story_text(200_000, seed=1), encoding="utf-8")
    calibration = {"samples": arguments.samples, "sequence_length": SEQUENCE, "shards": SHARDS, "micro_batch": 2}
    blocks = {"methods": [METHODS[arguments.method]], "budget": {"keep": 0.8, "scope": "experts"}}
    job = manifest_of(
        directory, directory / "model", [text], {**calibration, "propagate": "dense"}, **blocks, resume={"every": 1}
    )
    watch, lives, summary = KillingWatch(), [], None
    for due in [*arguments.kill_after, None]:
        watch.due_seconds, begun = due, time.monotonic()
        try:
            summary = run_manifest(job, directory, watch, fresh=False)
        except JobFailed:
            if not watch.killed:
                raise
        lives.append(time.monotonic() - begun)
        print(f"life {len(lives)}: {lives[-1]:.0f} s", file=sys.stderr, flush=True)
        if summary is not None:
            break
    assert summary is not None, "the last life is not killed"
    return {
        "source_bytes": source_bytes,
        "processes": watch.by_kind(),
        "worker_read_bytes": sum(watch.read_bytes.values()),
        "kills": len(lives) - 1,
        "lives_s": lives,
        "total_s": sum(lives),
        "last_life_seconds": summary["seconds"],
        "plan": summary["plan"],
    }


def print_figures(run: Mapping[str, Any]) -> None:
    """Print a table of planned and measured figures."""
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
