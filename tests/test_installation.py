"""`pip install .` gives everything that a job needs, on workers too; and only ours is taken for ours."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from manifests import VERSION, packages

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("manifests", "pipeline", "stores", "workers", "deploy/serving/lamina")
DISTRIBUTIONS = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}  # where they are named otherwise
THROUGH_OTHERS = {"pyarrow": "datasets", "packaging": "transformers"}
PLUGINS = {"engine_vllm": "vllm"}  # a folder that only this distribution loads


def python(*arguments: str, path: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with this PYTHONPATH."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `pip install .` has put the project, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    copy = tmp_path_factory.mktemp("checkout")
    files = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    names = [os.fsdecode(name) for name in files.split(b"\0") if name and (ROOT / os.fsdecode(name)).is_file()]
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(target), "."]
    done = python(*command, path="", folder=copy)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_a_worker_finds_all_it_needs(installed: Path, tmp_path: Path) -> None:
    """`lamina` too, which was named by no dependency."""
    code = "import lamina, workers.actor, pipeline.job.stages; print(lamina.__file__, workers.actor.__file__)"
    done = python("-c", code, path=str(installed), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [Path(found).parents[1] for found in done.stdout.split()] == [installed, installed]


@pytest.mark.slow
def test_the_console_command(installed: Path, tmp_path: Path) -> None:
    script = str(installed / "bin" / "lamina")
    shown = python(script, "--help", path=str(installed), folder=tmp_path)
    assert shown.returncode == 0
    assert "  run       Compresses a model by a manifest" in shown.stdout
    assert "  plan      Estimates memory, disk and time" in shown.stdout
    for arguments, code, message in (
        (["run", "--help"], 0, "--connect-timeout"),
        (["run", "nowhere.yaml"], 2, "manifest nowhere.yaml: cannot be read"),
        (["init", "--list"], 0, str(installed / "manifests" / "sweeps" / "compare.yaml")),
        (["init", "--list"], 0, str(installed / "manifests" / "llama3-70b.yaml")),
        (["status", "nowhere"], 2, "no run directory"),
        (["walk"], 2, "'walk' is not a command"),
        (["status", "--version"], 0, f"Lamina {VERSION}"),
        (["--version"], 0, f"Lamina {VERSION}"),
    ):
        done = python(script, *arguments, path=str(installed), folder=tmp_path)
        assert (done.returncode, message in done.stdout + done.stderr) == (code, True), done


@pytest.mark.slow
def test_what_is_imported_is_named_as_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["tasks"], *extras["gguf"]]
    distributions = {re.split(r"[\[=~<>]", name)[0].replace("_", "-") for name in named}
    own = {*packages.PACKAGES, *packages.SERVED}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules = [node.module]
                host = {PLUGINS.get(path.parent.name, "")}
                for name in {module.split(".")[0] for module in modules} - own - sys.stdlib_module_names - host:
                    distribution = DISTRIBUTIONS.get(name, THROUGH_OTHERS.get(name, name)).replace("_", "-")
                    assert distribution in distributions, f"{path} imports {name}"


@pytest.mark.parametrize("name", ["stores", "workers", "lamina"])
def test_a_package_of_another_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text('"""Somebody else\'s."""\n')
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-m", "pipeline.status", "nowhere", path=path, folder=tmp_path / name)
    assert done.returncode == 2, done.stderr
    assert f"package {name}: Python finds {tmp_path / name / '__init__.py'}, which is not Lamina's" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """As on a node to which `ray job submit --working-dir .` has brought it; no finder of an installed one helps."""
    code = (
        "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder)];"
        "from manifests.packages import prepare_process; prepare_process();"
        "import importlib.util; print(importlib.util.find_spec('lamina').origin)"
    )
    done = python("-c", code, path=str(ROOT), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "deploy" / "serving" / "lamina" / "__init__.py"


@pytest.mark.parametrize("name", packages.PACKAGES)
def test_an_import_changes_nothing_else(name: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; before = [*sys.path], dict(os.environ);"
        f"import {name}; assert ([*sys.path], dict(os.environ)) == before"
    )
    done = python("-c", code, path=str(ROOT), folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_actor_is_imported_before_the_serving_package_can_be(tmp_path: Path) -> None:
    """Ray imports the actor's module before the constructor, which makes `lamina` importable, runs."""
    code = "import sys; sys.modules['lamina'] = None; import workers.actor"
    done = python("-c", code, path=str(ROOT), folder=tmp_path)
    assert done.returncode == 0, done.stderr


COMMANDS = ("init", "run", "plan", "status", "report", "scale", "verify", "evaluate", "export", "push", "sweep", "heal")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "arguments",
    [
        *([name, "--help"] for name in COMMANDS),
        ["init", "--list"],
        ["init", "m"],
        ["status", "nowhere"],
        ["run", "nowhere.yaml"],
    ],
)
def test_answers_that_need_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """They take a second, not the many that its import takes."""
    done = python("-X", "importtime", "-m", f"pipeline.{arguments[0]}", *arguments[1:], path=str(ROOT), folder=tmp_path)
    assert done.returncode == (0 if {"--help", "--list"} & {*arguments} else 2)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "manifests" in imported
    assert not imported & {"torch", "ray", "transformers", "zarr", "rich"}, done.stderr[-2000:]
