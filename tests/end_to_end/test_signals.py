"""SIGTERM and SIGINT before there is anything to stop: while modules are imported, and while Ray starts."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.children import end_group
from tests.end_to_end.jobs import Job

MakeJob = Callable[..., Job]
WAIT_S = 120.0  # of a machine that runs other tests, too


@contextmanager
def started(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m pipeline.run`, as a user starts it; what it says goes to the job's log."""
    with open(job.root / "log", "w") as log:
        command = [sys.executable, "-m", "pipeline.run", str(job.manifest)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        end_group(process.pid)
        process.wait()


def wait_until(what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def catches_sigterm(pid: int) -> bool:
    found = re.search(r"SigCgt:\s+([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return bool(int(found.group(1), 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_modules_are_imported(number: signal.Signals, job: MakeJob) -> None:
    made = job()
    with started(made) as process:
        wait_until(lambda: catches_sigterm(process.pid), process)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 75
    assert "run the same command again to resume" in (made.root / "log").read_text()
    assert not made.run_dir.exists()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "number"),
    [("gcs_server", signal.SIGINT), pytest.param("raylet", signal.SIGTERM, marks=pytest.mark.nightly)],
)
def test_while_ray_starts(number: signal.Signals, name: str, job: MakeJob) -> None:
    """Cut off there, Ray's core would crash the process, or abort it seconds later."""
    made = job()
    with started(made) as process:
        family = psutil.Process(process.pid)
        wait_until(lambda: name in {child.name() for child in family.children(recursive=True)}, process)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 75
    said = (made.root / "log").read_text()
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
