"""Jobs whose command runs below `uv run`, or whose environment names a hook for Ray's runtime environments.

Ray finds `uv run` among the ancestors of a process by their arguments, so that a Python script named `run`, started by
the name `uv`, is enough for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.clusters import head_node
from tests.end_to_end.jobs import Job, file_digests

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.ray
WAIT_S = 240.0
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
        timeout=WAIT_S,
        check=False,
    )


def run_command(made: Job, *options: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.run", str(made.manifest), *options]


@pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
def test_a_job_below_uv_run(job: MakeJob, tmp_path: Path) -> None:
    """A shell is between them, as in `uv run bash -c …`. Ray would look for an agent that our local Ray lacks."""
    made = job()
    uv = [str(UV), "run", "--no-project", "--offline", "--python", sys.executable]
    command = [*uv, "sh", "-c", '"$@"; exit $?', "sh", "python", *run_command(made)[1:]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert made.output.is_dir()


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
        timeout=WAIT_S,
        check=False,
    )


def test_a_hook_s_environment_reaches_the_workers_of_a_local_ray(tmp_path: Path) -> None:
    (tmp_path / "hooks_of_a_user.py").write_text(HOOK)
    ended = with_hook(tmp_path, {"RAY_RUNTIME_ENV_HOOK": "hooks_of_a_user.hook"})
    assert ended.stdout.strip() == str(("yes", sys.executable)), ended.stderr
