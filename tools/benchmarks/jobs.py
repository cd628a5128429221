"""Run the real command in a process of its own, and print Markdown tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manifests.packages import prepare_process

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

prepare_process()


class JobFailed(RuntimeError):
    """The command did not exit with 0; the message holds its last lines."""


def end_on_sigterm() -> None:
    """Make SIGTERM end a benchmark as an exit does: its job stops and its temporary directories are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def environment() -> dict[str, str]:
    """Return the environment of a command of this checkout: its packages come first, and it needs no network."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "deploy/serving"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **QUIET, "PYTHONPATH": path.rstrip(os.pathsep)}


def manifest_of(
    folder: Path, model: str | Path, texts: Iterable[str | Path], calibration: Mapping[str, Any], **blocks: Any
) -> dict[str, Any]:
    """Return a job of FLAT-LLM's defaults at keep 0.8 in a folder; `blocks` replace blocks of the manifest."""
    return {
        "version": 1,
        "model": {"source": str(model), "accept_loss": True},  # some are of random weights
        "output": str(folder / "output"),
        "run_dir": str(folder / "run"),
        "budget": {"keep": 0.8},
        "calibration": {"text": {"files": [str(text) for text in texts]}, **calibration},
        "methods": [{"method": "flat_llm"}],
        "workers": {"max": 1},
        **blocks,
    }


def run_manifest(
    manifest: Mapping[str, Any],
    directory: Path,
    watch: Callable[[int], None] | None = None,
    fresh: bool = True,
) -> dict[str, Any]:
    """Run `python -m pipeline.run` on a manifest, which is written to `directory`. Return its summary.

    Args:
        watch: called with the pid of the command as soon as it runs; must return when the command has ended.
        fresh: start over; otherwise resume a stopped job.

    Raises JobFailed.
    """
    path = directory / "manifest.json"  # JSON is YAML
    path.write_text(json.dumps(manifest))
    command = [sys.executable, "-m", "pipeline.run", str(path), "--json", *(["--fresh"] if fresh else [])]
    log, printed = directory / "log.txt", directory / "printed.json"
    with log.open("w") as errors, printed.open("w") as output:  # a pipe without a reader could fill up
        job = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=errors)
        try:
            if watch is not None:
                watch(job.pid)
            job.wait()
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
    if job.returncode:
        raise JobFailed(f"{' '.join(command)} ended with {job.returncode}:\n{log.read_text()[-2000:]}")
    summary: dict[str, Any] = json.loads(printed.read_text())
    return summary


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    for cells in (titles, ["---"] * len(titles), *rows):
        print(f"| {' | '.join(str(cell) for cell in cells)} |")
