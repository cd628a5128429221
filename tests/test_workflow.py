"""The workflow of the public CI: right by its schema, and it runs what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
NIGHTLY = WORKFLOW.with_name("nightly.yml")


def _job(workflow: Path = WORKFLOW) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    (job,) = jobs.values()
    return dict(job)


def _check(path: Path) -> subprocess.CompletedProcess[str]:
    """Against the schema that comes with the checker; no network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("workflow", [WORKFLOW, NIGHTLY], ids=lambda path: path.stem)
def test_it_fits_the_schema(workflow: Path) -> None:
    done = _check(workflow)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("old", "new"), [("runs-on:", "run-on:"), ("contents: read", "contents: reed"), ("- run:", "- runs:")]
)
def test_the_check_finds_a_fault(tmp_path: Path, old: str, new: str) -> None:
    text = WORKFLOW.read_text()
    assert old in text
    (tmp_path / "test.yml").write_text(text.replace(old, new))
    done = _check(tmp_path / "test.yml")
    assert done.returncode == 1
    assert "test.yml" in done.stdout


def test_it_runs_the_readme_s_command_with_the_oldest_python() -> None:
    steps = _job()["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make test"]
    assert re.search(r"^make test$", (ROOT / "README.md").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (python,) = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert project["requires-python"] == f">={python}"


def test_each_night_runs_targets_of_the_makefile() -> None:
    targets = _job(NIGHTLY)["strategy"]["matrix"]["target"]
    assert "nightly" in targets
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
