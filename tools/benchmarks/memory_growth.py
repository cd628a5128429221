"""Measure whether the memory of any process grows with the number of layers, or of experts.

    python -m tools.benchmarks.memory_growth layers [--counts 6 12 24] [--propagate compressed dense] [--json]
    python -m tools.benchmarks.memory_growth experts [--counts 8 64] [--method loss_aware] [--propagate dense] [--json]

`python -m pipeline.run` compresses random models that differ only in that number, with one worker: layers of Llama
(19.9 M parameters, 38 MiB in bfloat16 each), or experts of the Qwen3-MoE kind, of which a token passes two. All its
processes are watched from outside. Exits 1 if a peak grows by more than `--tolerance` from the smallest model to the
largest; with the number of experts, only the heaps of worker and driver count. RSS is the kernel's high-water mark; it
counts library files, and in each process the pages of Ray's object store that it touched. Heap is the memory that a
process allocated for itself (RssAnon, sampled every 0.2 s). USS and PSS would depend on the other programs that use the
same libraries.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen3MoeConfig

from deploy.quickstart.text import story_text
from tools.benchmarks.jobs import Watch, end_on_sigterm, manifest_of, print_table, run_manifest
from tools.benchmarks.random_models import MIXTURE, mixture_shapes, write_llama, write_random_model

MIB = 2**20
CALIBRATION = {"samples": 16, "sequence_length": 128, "shards": 2, "micro_batch": 4}
COUNTS = {"layers": [6, 12, 24], "experts": [8, 64]}
METHODS: Mapping[str, dict[str, Any]] = {
    "defaults": {"method": "flat_llm"},
    "flat_llm": {"method": "flat_llm", "attention": False, "allocation": "uniform"},
    "loss_aware": {"method": "loss_aware", "query_key": False, "attention": False},
    "stock": {"method": "loss_aware", "shapes": "stock"},
    "layer": {"method": "loss_aware", "shapes": "layer", "attention": False},
    "reap": {"method": "reap", "refit": True},
    "merge_experts": {"method": "merge_experts"},
}


def write_model(directory: Path, what: str, count: int) -> int:
    """Write a random model with so many layers or experts. Return the bytes of one of them."""
    if what == "layers":
        return 2 * write_llama(directory, count)
    sizes = {**MIXTURE, "num_experts": count}
    config = Qwen3MoeConfig(**sizes, dtype="bfloat16")
    write_random_model(directory, config, "Qwen3MoeForCausalLM", lambda layer: mixture_shapes(layer, sizes))
    return int(2 * 3 * MIXTURE["hidden_size"] * MIXTURE["moe_intermediate_size"])


def measure(what: str, count: int, method: str, propagate: str, directory: Path) -> dict[str, Any]:
    """Run one job. Return peaks by kind of process, and seconds by phase."""
    each_bytes = write_model(directory / "model", what, count)
    text = directory / "text.txt"
    text.write_text(story_text(200_000, seed=1), encoding="utf-8")
    blocks = {"methods": [METHODS[method]], "budget": {"keep": 0.8} | ({"multiple": 16} if what == "experts" else {})}
    watch, calibration = Watch(), {**CALIBRATION, "propagate": propagate}
    summary = run_manifest(manifest_of(directory, directory / "model", [text], calibration, **blocks), directory, watch)
    return {
        "what": what,
        "count": count,
        "method": method,
        "propagate": propagate,
        "each_bytes": each_bytes,
        "processes": watch.by_kind(),
        "seconds": summary["seconds"],
        "planned_worker_bytes": summary["plan"]["worker_peak_bytes"],
    }


def growth(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by kind of process and quantity, values, ratios to the smallest model, and bytes per layer or expert."""
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
                "bytes_each": (values[-1] - values[0]) / max(1, most["count"] - least["count"]),
            }
    return dict(table)


def grown_peaks(runs: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """Return a line for each peak that grows by more than the tolerance."""
    return [
        f"{runs[0]['propagate']}: {kind} {quantity} grows {series['ratios'][-1]:.3f} times"
        for kind, quantities in growth(runs).items()
        for quantity, series in quantities.items()
        if series["ratios"][-1] > 1 + tolerance
        if runs[0]["what"] == "layers" or (quantity == "heap_bytes" and kind in ("worker", "driver"))
    ]


def print_growth(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of memory, and one of time per layer or expert."""
    what, counts = runs[0]["what"], [run["count"] for run in runs]
    each = what.removesuffix("s")
    print(f"\npropagate: {runs[0]['propagate']}; one {each} {runs[0]['each_bytes'] / MIB:.1f} MiB; peaks in MiB\n")
    rows = []
    for kind, quantities in growth(runs).items():
        for quantity, series in quantities.items():
            values = [f"{value / MIB:,.0f}" for value in series["values"]]
            ratios = [f"{ratio:.3f}" for ratio in series["ratios"][1:]]
            row = [kind, quantity.removesuffix("_bytes"), *values, *ratios]
            rows.append([*row, f"{series['bytes_each'] / MIB:+.2f}"])
    planned = [f"{run['planned_worker_bytes'] / MIB:,.0f}" for run in runs]
    rows.append(["planned worker", "", *planned, *([""] * len(counts))])
    titles = [*(f"{count} {what}" for count in counts), *(f"{count}/{counts[0]}" for count in counts[1:])]
    print_table(["process", "", *titles, f"one {each}"], rows)
    print(f"\nseconds per {each} (all phases by the clock; worker and driver by their processor time)\n")
    print_table(["", *titles], _time_rows(runs))


def _time_rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = list(runs[0]["seconds"]["phases"])
    series = {name: [run["seconds"]["phases"][name] / run["count"] for run in runs] for name in names}
    series["total"] = [run["seconds"]["total"] / run["count"] for run in runs]
    for kind in ("worker", "driver"):
        series[f"{kind}, processor"] = [run["processes"][kind]["cpu_seconds"] / run["count"] for run in runs]
    return [
        [name, *(f"{value:.3f}" for value in values), *(f"{value / values[0]:.3f}" for value in values[1:])]
        for name, values in series.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("what", choices=tuple(COUNTS))
    options.add_argument("--counts", type=int, nargs="+", help="ascending; default: 6 12 24 layers, 8 64 experts")
    options.add_argument(
        "--method", choices=tuple(METHODS), help="default: flat_llm for layers, loss_aware for experts"
    )
    options.add_argument("--propagate", nargs="+", choices=("compressed", "dense"))
    options.add_argument("--tolerance", type=float, default=0.05, help="growth of a peak that is allowed")
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = options.parse_args(argv)
    what = arguments.what
    method = arguments.method or {"layers": "defaults", "experts": "loss_aware"}[what]
    end_on_sigterm()
    results: list[list[dict[str, Any]]] = []
    for propagate in arguments.propagate or [{"layers": "compressed", "experts": "dense"}[what]]:
        runs = []
        for count in arguments.counts or COUNTS[what]:
            with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as directory:
                runs.append(measure(what, count, method, propagate, Path(directory)))
            spent = runs[-1]["seconds"]["total"]
            print(f"{propagate}, {count} {what}: {spent:.0f} s", file=sys.stderr, flush=True)
        results.append(runs)
    grown = [line for runs in results for line in grown_peaks(runs, arguments.tolerance)]
    if arguments.json:
        print(json.dumps({"runs": results, "growth": [growth(runs) for runs in results], "grown": grown}))
    else:
        for runs in results:
            print_growth(runs)
        print("\n" + ("\n".join(grown) or f"no peak grows by more than {arguments.tolerance:.0%}"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
