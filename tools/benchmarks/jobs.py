"""Run the real command in a process of its own, watch its processes, and print Markdown tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from manifests.packages import prepare_process

ROOT = Path(__file__).resolve().parents[2]
SAMPLING_SECONDS = 0.2
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


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    for cells in (titles, ["---"] * len(titles), *rows):
        print(f"| {' | '.join(str(cell) for cell in cells)} |")
