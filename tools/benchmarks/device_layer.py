"""Measure a layer of a large model on a device, and compare with the seconds that `plan` predicts.

    python -m tools.benchmarks.device_layer [--model 70B] [--propagate dense compressed] [--device cuda]
        [--memory GIB] [--samples 16] [--narrower 1] [--gpu H200]

A job of FLAT-LLM compresses a random Llama of two layers of these sizes in this process, with a sample of 4096 tokens
a shard. Seconds that grow with the shards are scaled to 256 of them, those of importance to its 64. Units run one after
another, and each waits for the device before and after: nothing overlaps. `--memory` caps the allocator, as a share of
the GPU (`workers.gpus`) does. Prints the seconds of a layer and the most memory. On a CPU, `--device cpu --narrower 32`
tries the tool.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

import pipeline.job.stages
import pipeline.job.worker_session
import pipeline.run
import workers.pools
from deploy.quickstart.text import story_text
from manifests.loading import parse_manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import Prices, prices_of
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.cost_model.solve_work import solve_seconds
from pipeline.families.registry import geometry_of, standard_config
from pipeline.units.sharding import importance_shards
from pipeline.units.sums import ChooseGrids, Collect
from pipeline.units.units import Forward, Solve, Unit, Write
from tools.benchmarks.jobs import end_on_sigterm, manifest_of, print_table
from tools.benchmarks.random_models import write_llama
from tools.simulate import LENGTH, LLAMA, SHARDS
from workers.device_settings import configure_device
from workers.in_process_pool import InProcessPool

LAYERS, KEEP = 2, 0.8
HEAD_DIM = 128
TOKEN_CHARACTERS = 6  # more than a token of the text has


class DevicePool(InProcessPool):
    """A pool that waits for the device around each unit, and counts its seconds by kind."""

    spent: ClassVar[defaultdict[str, float]] = defaultdict(float)

    def wait(self) -> tuple[Unit, Any]:
        self._settled()
        started = time.perf_counter()
        unit, result = super().wait()
        self._settled()
        if kind := kind_of(unit):
            self.spent[kind] += time.perf_counter() - started
        return unit, result

    def _settled(self) -> None:
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize(self.worker.device)


def kind_of(unit: Unit) -> str | None:
    """Return the row of the table that a unit's seconds belong to; None if there is none."""
    if isinstance(unit, Forward):
        return "statistics" if unit.moments else "propagate" if unit.staged else "importance"
    kinds = {ChooseGrids: "grids", Collect: "sums leave the device", Solve: "solve", Write: "write"}
    return kinds.get(type(unit))


def sizes_of(model: str, narrower: int) -> dict[str, int]:
    """Return the fields of a config, with widths and heads divided."""
    fields = {name: size for name, size in LLAMA[model].items() if name != "num_hidden_layers"}
    narrow = {name: max(1, size // narrower) for name, size in fields.items()}
    return {**narrow, "head_dim": HEAD_DIM, "max_position_embeddings": LENGTH}


def planned(prices: Prices) -> dict[str, float]:
    """Return the plan's seconds of a layer by kind, for all samples on one worker."""
    work, compressed = prices.work, prices.passes.compressed
    seconds = {"importance": prices.importance_seconds()} if compressed else {}
    seconds |= {
        "grids": prices.grid_seconds(),
        "statistics": prices.statistics_seconds(),
        "sums leave the device": prices.collect_seconds(work.moment_bytes),
        "solve": sum(solve_seconds(solve, prices.rates) for solve in work.solves),
    }
    return seconds | ({"propagate": prices.forward_seconds(packed=True)} if compressed else {})


def run_here(manifest: Mapping[str, Any]) -> None:
    """Run the job in this process, without Ray, on a `DevicePool`."""
    with (
        mock.patch.object(workers.pools, "InProcessPool", DevicePool),
        mock.patch.object(pipeline.job.worker_session, "catch_signals"),
        mock.patch.object(pipeline.job.stages, "interrupt_on_signals"),
    ):
        pipeline.run.run_job(
            parse_manifest(manifest), fresh=True, address=None, stop=threading.Event(), quiet=True, in_process=True
        )


def measure(manifest: Mapping[str, Any], samples: int) -> dict[str, float]:
    """Run the job. Return seconds of a layer by kind, for 256 samples."""
    DevicePool.spent.clear()
    run_here(manifest)
    shards = {"importance": len(importance_shards(SHARDS, SHARDS, LENGTH)), "statistics": SHARDS, "propagate": SHARDS}
    by_kind = {}
    for kind, seconds in DevicePool.spent.items():
        layers = 1 if kind == "propagate" else LAYERS  # the outputs of the last layer have no reader
        scale = shards[kind] / samples if kind in shards else 1.0
        by_kind[kind] = seconds / layers * scale
    return by_kind


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--model", choices=tuple(LLAMA), default="70B")
    options.add_argument("--propagate", nargs="+", choices=("dense", "compressed"), default=["dense", "compressed"])
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--memory", type=float, help="GiB of the GPU's memory that may be used")
    options.add_argument("--samples", type=int, default=16, help="of 4096 tokens, a shard each")
    options.add_argument("--narrower", type=int, default=1, help="divides widths and heads")
    options.add_argument("--gpu", default="H200", help="the GPU whose rates the plan uses")
    arguments = options.parse_args(argv)
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        options.error("this machine has no CUDA device; --device cpu --narrower 32 tries the tool")
    gpus, rates = float(on_gpu), rates_of(arguments.gpu)
    if on_gpu and arguments.memory:
        gpus = min(1.0, arguments.memory * 2**30 / torch.cuda.mem_get_info()[1])
    configure_device(gpus)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as scratch:
        base, sizes = Path(scratch), sizes_of(arguments.model, arguments.narrower)
        write_llama(base / "model", LAYERS, sizes)
        characters = TOKEN_CHARACTERS * LENGTH * (arguments.samples + 8)  # some are held out
        (base / "text.txt").write_text(story_text(characters, seed=1), encoding="utf-8")
        for propagate in arguments.propagate:
            samples = {"samples": arguments.samples, "shards": arguments.samples, "micro_batch": 1}
            calibration = {**samples, "sequence_length": LENGTH, "propagate": propagate}
            workers = {"max": 1, "gpus": gpus}
            manifest = manifest_of(base / propagate, base / "model", [base / "text.txt"], calibration, workers=workers)
            measured = measure(manifest, arguments.samples)
            plan = planned(_prices(manifest, base, rates))
            rows = [[kind, f"{measured.get(kind, 0.0):.2f}", f"{seconds:.2f}"] for kind, seconds in plan.items()]
            total = [sum(each.get(kind, 0.0) for kind in plan) for each in (measured, plan)]
            rows += [["a layer", *(f"{seconds:.2f}" for seconds in total)], ["write", f"{measured['write']:.2f}", ""]]
            print(f"\n{arguments.model}, {propagate}, seconds of a layer of {SHARDS} x {LENGTH} tokens")
            print_table(["", "measured", f"plan, {arguments.gpu}"], rows)
            if on_gpu:
                peak_gib, name = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.get_device_name()
                print(f"at most {peak_gib:.1f} GiB of {name}")
                torch.cuda.reset_peak_memory_stats()
    return 0


def _prices(manifest: Mapping[str, Any], base: Path, rates: Rates) -> Prices:
    """Return the prices of the job with 256 samples, which commits no hidden states."""
    short = parse_manifest(dict(manifest))
    assert short.calibration is not None
    calibration = short.calibration.model_copy(update={"samples": SHARDS, "shards": SHARDS})
    whole = short.model_copy(update={"calibration": calibration})
    geometry = geometry_of(standard_config(json.loads((base / "model/config.json").read_text())))
    prices = prices_of(PlannedJob.of(whole, geometry), rates, KEEP)
    return replace(prices, passes=replace(prices.passes, every=0))


if __name__ == "__main__":
    sys.exit(main())
