"""Every command that the README names exists and takes the options it shows."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(set(re.findall(r"python -m (pipeline\.\w+)", README)))
TARGETS = sorted(set(re.findall(r"^make (\w+)$", README, flags=re.MULTILINE)))


def test_readme_names_the_commands() -> None:
    assert set(MODULES) == {f"pipeline.{name}" for name in ("run", "plan", "status", "scale", "evaluate", "verify")}
    assert TARGETS == ["quickstart", "test"]


@pytest.mark.parametrize("module", MODULES)
def test_command_answers(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT.joinpath(*module.split("."))
    main = importlib.import_module(f"{module}.__main__" if path.is_dir() else module).main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    line = next(line for line in README.splitlines() if f"python -m {module} " in line)
    for option in re.findall(r"--[a-z]+", line):
        assert option in printed


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_benchmarks_are_there() -> None:
    assert all(
        list((ROOT / "tools" / "benchmarks").glob(f"{name}.py")) for name in ("memory_over_layers", "perplexity_sweep")
    )
