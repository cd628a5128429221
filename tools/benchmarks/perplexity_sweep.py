"""Measure perplexity against kept share, for settings of FLAT-LLM or of other methods.

    python -m tools.benchmarks.perplexity_sweep MODEL --calibration FILE… --evaluation FILE… [--grid GRID]

One Ray instance serves all jobs. Every result is appended to `--results`, so that an interrupted sweep goes on. Prints
a Markdown table, row by row. Evaluation is in float32 on windows that do not overlap.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from manifests.loading import parse_manifest
from manifests.schema import Text, Workers
from pipeline.console.progress import JobObserver
from pipeline.evaluation.perplexity import Scoring, measure_perplexity
from pipeline.run import run_job
from tools.benchmarks.jobs import end_on_sigterm, manifest_of, markdown_row
from workers.cluster import connect

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5)
PAPER = {"basis": "value", "weighting": "none", "selection": "leverage"}
SETTINGS = ("model", "calibration", "evaluation", "samples", "window", "windows")  # a result depends on these
Point = tuple[str, float | None, list[dict[str, Any]], str]  # name, budget, methods, propagate


def flat_grid() -> Iterator[Point]:
    """FLAT-LLM: importance or uniform, the paper's choices or ours, behind compressed or dense layers."""
    choices = {"paper": PAPER, "ours": {}}
    for name, allocation, propagate in itertools.product(choices, ("importance", "uniform"), ("compressed", "dense")):
        for keep in KEEPS:
            yield (
                f"{name}, {allocation}, {propagate}",
                keep,
                [{"method": "flat_llm", "allocation": allocation, **choices[name]}],
                propagate,
            )


def data_free_grid() -> Iterator[Point]:
    """LeSTD, LoRC and Joint rank-k, each with and without input weighting."""
    for weighting, keep in itertools.product(("none", "input"), (0.8, 0.6, 0.4, 0.2)):
        common = {"method": "lestd", "keep": keep, "weighting": weighting}
        yield f"lestd sparse, {weighting}, attention {keep}", None, [common], "dense"
        yield f"lestd dense core, {weighting}, attention {keep}", None, [{**common, "prune": False}], "dense"
        if weighting == "none":
            yield f"lestd threshold model, attention {keep}", None, [{**common, "threshold": "model"}], "dense"
    for weighting, allocation, share in itertools.product(
        ("none", "input"), ("progressive", "uniform"), (0.8, 0.6, 0.4)
    ):
        entry = {"method": "lorc", "cache_keep": share, "allocation": allocation, "weighting": weighting}
        yield f"lorc {allocation}, {weighting}, cache {share}", None, [entry], "dense"
    for weighting, form, keep in itertools.product(("none", "input"), ("joint", "separate"), (0.9, 0.8, 0.7)):
        entry = {"method": "joint_rank_k", "query_key": form, "mlp": form, "keep": keep, "weighting": weighting}
        yield f"joint_rank_k {form}, {weighting}, claimed {keep}", None, [entry], "dense"


def together_grid() -> Iterator[Point]:
    """Combinations at one common ratio of 0.6 of the decoder."""
    joint = {"method": "joint_rank_k", "query_key": "joint", "mlp": False, "weighting": "input"}
    lorc = {"method": "lorc", "value": False, "cache_keep": 0.6, "weighting": "input"}
    for propagate in ("compressed", "dense"):
        yield f"flat_llm, {propagate}", 0.6, [{"method": "flat_llm"}], propagate
        yield f"flat_llm + joint_rank_k, {propagate}", 0.6, [{"method": "flat_llm"}, joint], propagate
        yield f"flat_llm + lorc key, {propagate}", 0.6, [{"method": "flat_llm"}, lorc], propagate
        yield (
            f"flat_llm with query/key PCA, {propagate}",
            0.6,
            [{"method": "flat_llm", "query_key": "head_pca"}],
            propagate,
        )


GRIDS = {"flat": flat_grid, "data_free": data_free_grid, "together": together_grid}


class Sweep:
    """Runs points of a grid and stores their results."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.workers = Workers(min=1, max=arguments.workers, cpus=1)
        self.evaluation = Text(files=tuple(arguments.evaluation))
        self.stop = threading.Event()
        results = Path(arguments.results)
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        same = {name: getattr(arguments, name) for name in SETTINGS}
        entries = (entry for entry in map(json.loads, lines) if entry.get("settings") == same)
        self.settings = same
        self.results: dict[str, dict[str, Any]] = {entry["key"]: entry for entry in entries}

    def dense(self) -> dict[str, Any]:
        """Score the source."""
        return self._once("dense", lambda: self._score(self.arguments.model))

    def point(self, point: Point) -> dict[str, Any]:
        """Run one job and score its output."""
        name, keep, _, _ = point
        return self._once(f"{name} @ {keep}", lambda: self._job(point))

    def _once(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in self.results:
            started = time.monotonic()
            result = measure()
            seconds = time.monotonic() - started
            self.results[key] = {"key": key, "settings": self.settings, "seconds": seconds, **result}
            with open(self.arguments.results, "a", encoding="utf-8") as results:
                results.write(json.dumps(self.results[key]) + "\n")
            print(f"{key}: {float(result['perplexity']):.4f} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        return self.results[key]

    def _job(self, point: Point) -> dict[str, Any]:
        _, keep, methods, propagate = point
        with tempfile.TemporaryDirectory() as scratch:
            calibration = {
                "samples": self.arguments.samples,
                "sequence_length": self.arguments.window,
                "shards": 2,
                "micro_batch": 16,
                "propagate": propagate,
            }
            document = manifest_of(
                Path(scratch), self.arguments.model, self.arguments.calibration, calibration, methods=methods,
                budget=None if keep is None else {"keep": keep}, workers={"max": self.arguments.workers},
            )  # fmt: skip
            summary = run_job(parse_manifest(document), fresh=False, address=None, stop=self.stop, quiet=True)
            score = self._score(f"{scratch}/output")
            shutil.rmtree(f"{scratch}/run")
        counts = {name: pair["compressed"] / pair["dense"] for name, pair in summary["counts"].items()}
        return score | {"kept": counts, "cache": summary["counts"]["cache_bytes_per_token"]}

    def _score(self, model: str) -> dict[str, Any]:
        with JobObserver(quiet=True) as observer:
            scoring = Scoring(self.workers, torch.float32, self.stop, observer)
            arguments = self.arguments
            return measure_perplexity(model, self.evaluation, arguments.window, scoring, limit=arguments.windows)


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--calibration", nargs="+", required=True)
    options.add_argument("--evaluation", nargs="+", required=True)
    options.add_argument("--grid", choices=sorted(GRIDS), default="flat")
    options.add_argument("--samples", type=int, default=128)
    options.add_argument("--window", type=int, default=256)
    options.add_argument("--windows", type=int, default=240, help="how many windows are scored")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--results", default="sweep.jsonl")
    sweep = Sweep(options.parse_args())
    end_on_sigterm()
    connect(None, sweep.workers)
    dense = sweep.dense()
    print(f"dense: {float(dense['perplexity']):.3f} over {dense['tokens']:,} tokens\n")
    rows: dict[str, list[Point]] = {}
    for point in GRIDS[sweep.arguments.grid]():
        rows.setdefault(point[0], []).append(point)
    keeps = [keep for _, keep, _, _ in next(iter(rows.values()))]
    headings = ["perplexity" if keep is None else f"keep {keep}" for keep in keeps]
    print(markdown_row(["", *headings, "parameters kept (first)"]))
    print(markdown_row(["---"] * (len(keeps) + 2)))
    for name, points in rows.items():
        results = [sweep.point(point) for point in points]
        scores = [f"{float(result['perplexity']):.3f}" for result in results]
        print(markdown_row([name, *scores, f"{results[0]['kept']['parameters']:.3f}"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
