"""Measure where the time of a job goes, once by the real command and once in this process with a clock.

    python -m tools.benchmarks.where_time_goes [MODEL --calibration FILE…] [--propagate dense] [--workers 2] [--json]

The summary of the command gives the seconds of the start, of units, of products and decompositions in them, and of Ray
and the driver. The second run does the same units in this process, one after another, without Ray. Each second counts
once, for the innermost kind of work; the work of other threads is listed apart. The method is FLAT-LLM with its
defaults; without a model, a random one of four layers of 19.9 M parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pipeline.job.context
import pipeline.job.stages
import pipeline.job.worker_session
import pipeline.run
import stores.checkpoint
import workers.layers
import workers.pools
import workers.worker
from deploy.quickstart.text import story_text
from manifests.loading import parse_manifest
from pipeline.checkpoint.assembling import Assembler
from pipeline.kernels.exact_sums import MomentSum
from pipeline.reporting.summary import compute_share
from stores.activations import ActivationStore
from stores.arrays import ArrayReader, ArrayStore, ArrayWriter
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.source import SourceCheckpoint
from stores.statistics import StatisticsStore
from tools.benchmarks.jobs import end_on_sigterm, manifest_of, print_table, run_manifest
from tools.benchmarks.memory_over_layers import write_model
from workers.in_process_pool import InProcessPool
from workers.memory import map_large_tensors
from workers.tapped_layer import TappedLayer
from workers.tensor_transfer import LocalTransfer
from workers.worker import Worker

PARTS: tuple[tuple[object, str, str], ...] = (  # owner, attribute, kind of work
    (pipeline.job.context, "read_inputs", "opening model and manifest"),
    (pipeline.job.context, "calibration_tokens", "tokenising"),
    (SourceCheckpoint, "read", "reading weights"),
    (workers.layers, "read_staged", "reading staged layers"),
    (workers.layers, "_require_finite", "looking for NaN"),
    (stores.checkpoint, "_check_finite", "looking for NaN"),
    (TappedLayer, "__init__", "building layers"),
    (MomentSum, "add_", "moments"),
    (workers.worker, "cosine_sums", "cosines"),
    (StatisticsStore, "write", "storing statistics"),
    (StatisticsStore, "read", "reading statistics"),
    (ArrayWriter, "append", "storing hidden states"),
    (ArrayWriter, "commit", "making arrays durable"),
    (ActivationStore, "writer", "storing hidden states"),
    (ArrayReader, "read", "reading hidden states, tokens"),
    (workers.worker, "solve_group", "decompositions"),
    (workers.worker, "write_staged", "writing layers"),
    (Worker, "_reduce", "reducing"),
    (LocalTransfer, "put", "exchanging"),
    (Ledger, "commit", "ledger"),
    (Ledger, "get", "ledger"),
    (Ledger, "keys", "ledger"),
    (Ledger, "sweep", "ledger"),
    (ArrayStore, "sweep", "dropping old data"),
    (RunLock, "beat", "heartbeat"),
    (Assembler, "run", "assembling"),
    (os, "fsync", "fsync"),
)
RANDOM_LAYERS = 4
PRODUCTS = ("forward products", "moments", "cosines", "decompositions")


class Clock:
    """Counts seconds by thread and kind of work, each second for the innermost kind."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.local = threading.local()

    @contextlib.contextmanager
    def at(self, kind: str) -> Iterator[None]:
        """Count the block as work of this kind."""
        outer, self.local.kind = self._switch(), kind
        try:
            yield
        finally:
            self._switch()
            self.local.kind = outer

    def _switch(self) -> str:
        """Add the seconds since the last switch to the current kind, and return it."""
        now, kind = time.perf_counter(), getattr(self.local, "kind", "everything else")
        thread = "main" if threading.current_thread() is threading.main_thread() else "beside"
        self.seconds[thread, kind] += now - getattr(self.local, "since", now)
        self.local.since = now
        return kind

    def timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return the function with its time counted."""

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            with self.at(kind):
                return function(*arguments, **named)

        return run

    def of(self, thread: str) -> dict[str, float]:
        """Return the seconds of one thread by kind, most first."""
        idle = "everything else" if thread == "beside" else None
        kinds = {kind: spent for (name, kind), spent in self.seconds.items() if name == thread and kind != idle}
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))


class TimedHash:
    """`hashlib.sha256` with a clock."""

    def __init__(self, clock: Clock, make: Callable[..., Any], data: Any = b"") -> None:
        self.clock = clock
        with clock.at("hashing"):
            self.digester = make(data)

    def update(self, data: Any) -> None:
        """Hash more data."""
        with self.clock.at("hashing"):
            self.digester.update(data)

    def hexdigest(self) -> str:
        """Return the digest."""
        return str(self.digester.hexdigest())


def clocked_run(manifest: Mapping[str, Any]) -> tuple[Clock, float]:
    """Run the job in this process. Return its clock, and its seconds."""
    clock = Clock()

    @contextlib.contextmanager
    def computing(worker: Worker) -> Iterator[None]:
        with clock.at("forward products"):
            yield

    with contextlib.ExitStack() as patches:
        for owner, name, kind in PARTS:
            timed = clock.timed(getattr(owner, name), kind)
            patches.enter_context(mock.patch.object(owner, name, timed))
        sha256 = functools.partial(TimedHash, clock, hashlib.sha256)
        patches.enter_context(mock.patch.object(hashlib, "sha256", sha256))
        patches.enter_context(mock.patch.object(Worker, "_computing", computing))
        started = time.perf_counter()
        with clock.at("everything else"):
            run_here(manifest, InProcessPool)
        return clock, time.perf_counter() - started


def run_here(manifest: Mapping[str, Any], pool: Callable[..., InProcessPool]) -> None:
    """Run the job in this process, without Ray."""
    with (
        mock.patch.object(workers.pools, "InProcessPool", pool),
        mock.patch.object(pipeline.job.worker_session, "catch_signals"),
        mock.patch.object(pipeline.job.worker_session, "interrupt_on_signals"),
    ):
        pipeline.run.run_job(
            parse_manifest(manifest), fresh=True, address=None, stop=threading.Event(), quiet=True, in_process=True
        )


def command_shares(seconds: Mapping[str, Any], wall: float, workers: int) -> dict[str, float]:
    """Cut the wall seconds of the real command into parts that add up to `wall`."""
    stages = ("checks", "start", "assemble", "evaluate")
    phases = {name: spent for name, spent in seconds["phases"].items() if name not in stages}
    busy = sum(spent for _, spent, _ in seconds["units"].values())
    computing = sum(spent for _, _, spent in seconds["units"].values())
    return {
        "start of Python, checks, hashing the source; exit": wall - seconds["total"] + seconds["phases"]["checks"],
        "start of Ray and of the workers": seconds["phases"]["start"],
        "products and decompositions": computing / workers,
        "the rest of the units": (busy - computing) / workers,
        "Ray, driver, ledger; workers idle": sum(phases.values()) - busy / workers,
        "assembling": seconds["phases"]["assemble"],
    }


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?")
    options.add_argument("--calibration", nargs="+", default=[])
    options.add_argument("--propagate", choices=("compressed", "dense"), default="compressed")
    options.add_argument("--samples", type=int, default=128)
    options.add_argument("--sequence", type=int, default=256)
    options.add_argument("--micro-batch", type=int, default=8)
    options.add_argument("--shards", type=int, default=4)
    options.add_argument("--workers", type=int, default=1, help="of the real command")
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = options.parse_args()
    if bool(arguments.model) != bool(arguments.calibration):
        options.error("MODEL and --calibration go together")
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as scratch:
        if not arguments.model:
            arguments.model, text = Path(scratch, "model"), Path(scratch, "text.txt")
            write_model(arguments.model, RANDOM_LAYERS)
            text.write_text(story_text(2_000_000, seed=1), encoding="utf-8")
            arguments.calibration = [text]
        manifest = _manifest(arguments, scratch)
        started = time.perf_counter()
        summary = run_manifest(manifest, Path(scratch))
        wall = time.perf_counter() - started
        map_large_tensors()
        clock, clocked_seconds = clocked_run(manifest)
    command = command_shares(summary["seconds"], wall, arguments.workers)
    parts = {"main": clock.of("main"), "beside": clock.of("beside")}
    if arguments.json:
        print(json.dumps({"wall": wall, "command": command, "clocked": clocked_seconds, **parts}))
        return 0
    share = compute_share(summary["seconds"])
    print(f"\nthe command, {arguments.workers} worker(s): {wall:.1f} s; {share:.0%} of the units in products\n")
    print_table(["", "s", "share"], _rows(command, wall))
    products = sum(parts["main"].get(kind, 0.0) for kind in PRODUCTS)
    print(f"\nin this process: {clocked_seconds:.1f} s, {products / clocked_seconds:.0%} in {', '.join(PRODUCTS)}\n")
    print_table(["", "s", "share"], _rows(parts["main"], clocked_seconds))
    print("\nmeanwhile, in other threads\n")
    print_table(["", "s", "of the time"], _rows(parts["beside"], clocked_seconds))
    return 0


def _manifest(arguments: argparse.Namespace, scratch: str) -> dict[str, Any]:
    calibration = {
        "samples": arguments.samples,
        "sequence_length": arguments.sequence,
        "shards": arguments.shards,
        "micro_batch": arguments.micro_batch,
        "propagate": arguments.propagate,
    }
    texts = [Path(file).resolve() for file in arguments.calibration]
    model, workers = Path(arguments.model).resolve(), {"max": arguments.workers}
    return manifest_of(Path(scratch), model, texts, calibration, workers=workers)


def _rows(parts: Mapping[str, float], whole: float) -> list[list[str]]:
    return [[name, f"{spent:.2f}", f"{spent / whole:.1%}"] for name, spent in parts.items()]


if __name__ == "__main__":
    sys.exit(main())
