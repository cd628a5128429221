"""Measure whether the memory of any process grows with the number of layers.

    python -m tools.benchmarks.memory_over_layers [--layers 6 12 24] [--propagate compressed dense] [--json]

`python -m pipeline.run` compresses models that differ only in the number of equal random layers (19.9 M parameters,
38 MiB in bfloat16 each), with FLAT-LLM's defaults and one worker. All its processes are watched from outside. Exits 1
if a peak grows by more than `--tolerance` from the smallest model to the largest. RSS is the kernel's high-water mark;
it counts library files, and in each process the pages of Ray's object store that it touched. Heap is the memory that a
process allocated for itself (RssAnon, sampled every 0.2 s). USS and PSS would depend on the other programs that use the
same libraries.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from transformers import LlamaConfig

from deploy.quickstart.text import story_text
from tools.benchmarks.jobs import end_on_sigterm, manifest_of, print_table, run_manifest
from tools.benchmarks.random_models import Shapes, numbers_of, write_random_model

# More attention than MLP: a wide MLP would spend the time of this benchmark in decompositions (N³), not on layers.
CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 2048,
    "intermediate_size": 1536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SAMPLES, SEQUENCE, SHARDS = 16, 128, 2
SAMPLING_SECONDS = 0.2
MIB = 2**20
KINDS = (  # part of a command line -> kind of process; the raylet's holds those of its children
    ("gcs/gcs_server", "gcs"),
    ("raylet/raylet", "raylet"),
    ("ray::WorkerActor", "worker"),
    ("ray::DashboardAgent", "dashboard agent"),
    ("ray::RuntimeEnvAgent", "runtime env agent"),
    ("ray::", "idle worker"),
    ("default_worker.py", "idle worker"),
    ("log_monitor", "log monitor"),
    ("monitor.py", "autoscaler"),
    ("dashboard/dashboard.py", "dashboard"),
    ("dashboard/agent.py", "dashboard agent"),
    ("runtime_env/agent", "runtime env agent"),
    ("pipeline.run", "driver"),
)


@dataclass
class Peaks:
    """Peaks of one process, and its processor time."""

    kind: str
    rss_bytes: int = 0
    heap_bytes: int = 0
    cpu_seconds: float = 0.0


@dataclass
class Watch:
    """The processes of a job, watched from outside: the command and its descendants."""

    processes: dict[int, Peaks] = field(default_factory=dict)
    together_bytes: int = 0

    def __call__(self, pid: int) -> None:
        """Watch until the command has ended."""
        command = psutil.Process(pid)
        while command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
            self._sample(command)
            time.sleep(SAMPLING_SECONDS)

    def _sample(self, command: psutil.Process) -> None:
        together_bytes = 0
        for process in family_of(command):
            try:
                peaks = self.processes.setdefault(process.pid, Peaks(""))
                if peaks.kind in ("", "idle worker", "other"):  # an idle one may become a worker
                    peaks.kind = "supervisor" if process.pid == command.pid else _kind(process)
                memory_bytes, cpu = _memory_bytes(process.pid), process.cpu_times()
            except (psutil.Error, OSError):
                continue  # it has ended
            peaks.rss_bytes = max(peaks.rss_bytes, memory_bytes.get("VmHWM", 0))
            peaks.heap_bytes = max(peaks.heap_bytes, memory_bytes.get("RssAnon", 0))
            peaks.cpu_seconds = cpu.user + cpu.system
            together_bytes += memory_bytes.get("RssAnon", 0)
        self.together_bytes = max(self.together_bytes, together_bytes)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Return the largest process of every kind, and the heaps of all together."""
        kinds: dict[str, dict[str, float]] = {}
        for peaks in self.processes.values():
            entry = kinds.setdefault(peaks.kind, {"rss_bytes": 0, "heap_bytes": 0, "cpu_seconds": 0.0})
            entry["rss_bytes"] = max(entry["rss_bytes"], peaks.rss_bytes)
            entry["heap_bytes"] = max(entry["heap_bytes"], peaks.heap_bytes)
            entry["cpu_seconds"] += peaks.cpu_seconds
        return {**kinds, "all together": {"heap_bytes": self.together_bytes}}


def family_of(command: psutil.Process) -> Iterator[psutil.Process]:
    """Yield a process and its descendants."""
    yield command
    try:
        yield from command.children(recursive=True)
    except psutil.Error:
        return  # ended


def _kind(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((kind for part, kind in KINDS if part in line), "other")


def _memory_bytes(pid: int) -> dict[str, int]:
    """Return VmHWM, RssAnon and the like; nothing of a process that has ended and waits to be reaped."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].removesuffix(":"): int(words[1]) * 1024 for words in fields if words[-1] == "kB"}


def write_model(directory: Path, num_layers: int, sizes: Mapping[str, int] = MappingProxyType({})) -> int:
    """Write a random Llama, a shard for every layer, with one layer in memory. Return the parameters of a layer.

    `sizes`: fields of its config that differ from CONFIG.
    """
    fields = {**CONFIG, **sizes}
    config = LlamaConfig(**fields, num_hidden_layers=num_layers, dtype="bfloat16")
    write_random_model(directory, config, "LlamaForCausalLM", lambda layer: _layer_shapes(layer, fields))
    return sum(numbers_of(_layer_shapes(0, fields)))


def _layer_shapes(layer: int, fields: Mapping[str, Any]) -> Shapes:
    hidden, wide = fields["hidden_size"], fields["intermediate_size"]
    queries, keys = (fields[f"num_{name}_heads"] * fields["head_dim"] for name in ("attention", "key_value"))
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def measure(num_layers: int, propagate: str, directory: Path) -> dict[str, Any]:
    """Run one job. Return peaks by kind of process, and seconds by phase."""
    layer_numbers = write_model(directory / "model", num_layers)
    return {"layers": num_layers, "layer_bytes": 2 * layer_numbers, **watched_job(propagate, directory)}


def watched_job(propagate: str, directory: Path, **blocks: Any) -> dict[str, Any]:
    """Compress `directory/model`, and return peaks by kind of process, seconds by phase and the plan's peak.

    `blocks`: blocks of the manifest in place of the usual ones.
    """
    text = directory / "text.txt"
    text.write_text(story_text(200_000, seed=1), encoding="utf-8")
    calibration = {
        "samples": SAMPLES,
        "sequence_length": SEQUENCE,
        "shards": SHARDS,
        "micro_batch": 4,
        "propagate": propagate,
    }
    watch = Watch()
    summary = run_manifest(manifest_of(directory, directory / "model", [text], calibration, **blocks), directory, watch)
    return {
        "propagate": propagate,
        "processes": watch.by_kind(),
        "seconds": summary["seconds"],
        "planned_worker_bytes": summary["plan"]["worker_peak_bytes"],
    }


def growth(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by kind of process and quantity, values, ratios to the smallest model, and bytes per layer."""
    least, most = runs[0], runs[-1]
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for kind in most["processes"]:
        for quantity in most["processes"][kind]:
            if not quantity.endswith("_bytes") or any(kind not in run["processes"] for run in runs):
                continue
            values = [run["processes"][kind][quantity] for run in runs]
            table[kind][quantity] = {
                "values": values,
                "ratios": [value / values[0] for value in values],
                "bytes_per_layer": (values[-1] - values[0]) / max(1, most["layers"] - least["layers"]),
            }
    return dict(table)


def print_growth(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of memory, and one of time per layer."""
    layers = [run["layers"] for run in runs]
    print(f"\npropagate: {runs[0]['propagate']}; one layer {runs[0]['layer_bytes'] / MIB:.0f} MiB; peaks in MiB\n")
    rows = []
    for kind, quantities in growth(runs).items():
        for quantity, series in quantities.items():
            values = [f"{value / MIB:,.0f}" for value in series["values"]]
            ratios = [f"{ratio:.3f}" for ratio in series["ratios"][1:]]
            row = [kind, quantity.removesuffix("_bytes"), *values, *ratios]
            rows.append([*row, f"{series['bytes_per_layer'] / MIB:+.2f}"])
    titles = [*(f"{count} layers" for count in layers), *(f"{count}/{layers[0]}" for count in layers[1:])]
    print_table(["process", "", *titles, "a layer"], rows)
    print("\nseconds per layer (all phases by the clock; worker and driver by their processor time)\n")
    print_table(["", *(f"{count} layers" for count in layers), *titles[len(layers) :]], _time_rows(runs))


def _time_rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = list(runs[0]["seconds"]["phases"])
    series = {name: [run["seconds"]["phases"][name] / run["layers"] for run in runs] for name in names}
    series["total"] = [run["seconds"]["total"] / run["layers"] for run in runs]
    for kind in ("worker", "driver"):
        series[f"{kind}, processor"] = [run["processes"][kind]["cpu_seconds"] / run["layers"] for run in runs]
    return [
        [name, *(f"{value:.3f}" for value in values), *(f"{value / values[0]:.3f}" for value in values[1:])]
        for name, values in series.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24], help="ascending")
    options.add_argument("--propagate", nargs="+", choices=("compressed", "dense"), default=["compressed"])
    options.add_argument("--tolerance", type=float, default=0.05, help="growth of a peak that is allowed")
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = options.parse_args(argv)
    end_on_sigterm()
    results: list[list[dict[str, Any]]] = []
    for propagate in arguments.propagate:
        runs = []
        for num_layers in arguments.layers:
            with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as directory:
                runs.append(measure(num_layers, propagate, Path(directory)))
            spent = runs[-1]["seconds"]["total"]
            print(f"{propagate}, {num_layers} layers: {spent:.0f} s", file=sys.stderr, flush=True)
        results.append(runs)
    grown = [
        f"{runs[0]['propagate']}: {kind} {quantity} grows {series['ratios'][-1]:.3f} times"
        for runs in results
        for kind, quantities in growth(runs).items()
        for quantity, series in quantities.items()
        if series["ratios"][-1] > 1 + arguments.tolerance
    ]
    if arguments.json:
        print(json.dumps({"runs": results, "growth": [growth(runs) for runs in results], "grown": grown}))
    else:
        for runs in results:
            print_growth(runs)
        print("\n" + ("\n".join(grown) or f"no peak grows by more than {arguments.tolerance:.0%}"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
