"""Every command that the README names exists and takes the options it shows."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(set(re.findall(r"python -m (pipeline\.\w+)", README)))
TARGETS = sorted(set(re.findall(r"^make (\w+)$", README, flags=re.MULTILINE)))


def test_readme_names_the_commands() -> None:
    assert set(MODULES) == {
        f"pipeline.{name}"
        for name in ("run", "plan", "status", "report", "scale", "sweep", "evaluate", "export", "push", "verify")
    }
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


def test_tools_that_the_pages_name_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    named = sorted(set(re.findall(r"`python -m (tools\.[\w.]+)", (ROOT / "tools" / "README.md").read_text())))
    assert len(named) > 8
    for module in named:
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main()
        assert ended.value.code == 0
        assert "usage" in capsys.readouterr().out


def test_each_command_of_the_readme_is_run_by_a_test() -> None:
    tables = "tests/end_to_end/test_readme_commands.py"
    run_by = {
        "make test": ".github/workflows/test.yml",
        "make quickstart": "tests/test_quickstart_model.py",
        "ray job submit": "tests/end_to_end/test_submitted.py",
        "pip install": "Makefile",  # by `make setup`, which comes before every test
        **{f"python -m {module}": tables for module in MODULES},
    }
    shown = set(re.findall(r"(?:^|`)((?:make|ray job|pip|python -m) [\w.]+)", README, flags=re.MULTILINE))
    assert shown == set(run_by)
    assert [where for where in run_by.values() if not (ROOT / where).is_file()] == []
