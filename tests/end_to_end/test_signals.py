"""Starts of the command: below `uv run`, and cut off by signals while modules are imported and Ray starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.children import end_group
from tests.end_to_end.clusters import head_node
from tests.end_to_end.jobs import Job, MakeJob, command, file_digests

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


@pytest.mark.ray
def test_the_driver_is_killed(job: MakeJob) -> None:
    """As by the system for lack of memory: its parent says so, and enters it; all that Ray started ends, too."""
    made = job()
    with started(made) as process:
        supervisor = psutil.Process(process.pid)
        wait_until(lambda: "raylet" in {child.name() for child in supervisor.children(recursive=True)}, process)
        (driver,) = supervisor.children()
        family = driver.children(recursive=True)
        driver.kill()
        assert process.wait(WAIT_S) == 1
        _, alive = psutil.wait_procs(family, timeout=WAIT_S)
        assert not alive
    said = (made.root / "log").read_text()
    assert "\nfailed: the command's process was killed (SIGKILL)" in said
    assert "Traceback" not in said
    shown = command("status", str(made.run_dir)).out
    assert "failed; run the same command again when the cause is fixed" in shown
    assert re.search(r"exit code 1, (phase start|before any phase): the command's process was killed", shown), shown


UV_WAIT_S = 240.0
UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
PRETENDS = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # or Ray looks for the cluster at this machine's outer address
HOOK = "def hook(environment): return {'env_vars': {'BY_THE_HOOK': 'yes'}}\n"
WITH_HOOK = """if True:
    import os, ray, sys
    from manifests.schema import Workers
    from workers.cluster import connect
    connect(None, Workers())
    print(ray.get(ray.remote(num_cpus=0)(lambda: (os.environ.get("BY_THE_HOOK"), sys.executable)).remote()))
"""


def below_uv(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command below a process that Ray takes for `uv run`."""
    (folder / "run").write_text(PRETENDS)
    return subprocess.run(
        ["uv", "run", *command],
        executable=sys.executable,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=UV_WAIT_S,
        check=False,
    )


def run_command(made: Job, *options: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.run", str(made.manifest), *options]


@pytest.mark.ray
@pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
@pytest.mark.nightly
def test_a_job_below_uv_run(job: MakeJob, tmp_path: Path) -> None:
    """A shell is between them, as in `uv run bash -c …`. Ray would look for an agent that our local Ray lacks."""
    made = job()
    uv = [str(UV), "run", "--no-project", "--offline", "--python", sys.executable]
    command = [*uv, "sh", "-c", '"$@"; exit $?', "sh", "python", *run_command(made)[1:]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=UV_WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert made.output.is_dir()


@pytest.mark.ray
@pytest.mark.nightly
def test_on_a_cluster_below_uv_run(job: MakeJob, tmp_path: Path) -> None:
    """Workers start on the nodes' Python: nothing is uploaded, and no node needs uv. The user's hook is called."""
    made, alone = job(), job()
    (tmp_path / "hooks_of_a_user.py").write_text(HOOK)
    environment = {"RAY_RUNTIME_ENV_HOOK": "hooks_of_a_user.hook", **LOOPBACK}
    environment["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    with head_node(1) as address:
        ended = below_uv(tmp_path, *run_command(made, "--address", address), **LOOPBACK)
        assert ended.returncode == 0, ended.stderr
        hooked = below_uv(tmp_path, *run_command(alone, "--address", address), **environment)
        assert hooked.returncode == 0, hooked.stderr
    assert file_digests(made.output) == file_digests(alone.output)


def with_hook(folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])
    return subprocess.run(
        [sys.executable, "-c", WITH_HOOK],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=UV_WAIT_S,
        check=False,
    )


@pytest.mark.ray
@pytest.mark.nightly
def test_a_hook_s_environment_reaches_the_workers_of_a_local_ray(tmp_path: Path) -> None:
    (tmp_path / "hooks_of_a_user.py").write_text(HOOK)
    ended = with_hook(tmp_path, {"RAY_RUNTIME_ENV_HOOK": "hooks_of_a_user.hook"})
    assert ended.stdout.strip() == str(("yes", sys.executable)), ended.stderr
