"""Every command that the README and the pages name exists, takes the options they show, and is run by a test."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
ALL = "\n".join(PAGES.values())
COMMANDS = ("init", "run", "plan", "status", "report", "scale", "sweep", "evaluate", "export", "push", "verify", "heal")
MODULES = [f"pipeline.{name}" for name in COMMANDS]
TARGETS = sorted(set(re.findall(r"^make (\w+)$|`make (\w+)`", ALL, flags=re.MULTILINE)))


def test_the_pages_name_the_commands() -> None:
    assert set(re.findall(r"python -m (pipeline\.\w+)", PAGES["running-jobs.md"])) == {*MODULES}
    assert set(re.findall(r"python -m (pipeline\.\w+)", ALL)) == {*MODULES}
    assert re.findall(r"^make (\w+)$", README, flags=re.MULTILINE) == ["quickstart", "test"]


def test_the_readme_is_short() -> None:
    assert len(README) < 8500


@pytest.mark.parametrize("module", MODULES)
def test_command_answers(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT.joinpath(*module.split("."))
    main = importlib.import_module(f"{module}.__main__" if path.is_dir() else module).main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    shown = [line for line in ALL.splitlines() if f"python -m {module} " in line]
    assert shown
    for line in shown:
        if line.startswith(("|", "python", "`python")):  # a row of a table, or a command by itself
            for option in re.findall(r"--[a-z-]+", line.partition(f"python -m {module} ")[2]):
                assert option in printed, line


@pytest.mark.parametrize("target", sorted({name for pair in TARGETS for name in pair if name}))
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tools_that_the_pages_name_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    listed = sorted(set(re.findall(r"`python -m (tools\.[\w.]+)", (ROOT / "tools" / "README.md").read_text())))
    assert len(listed) > 4
    assert set(re.findall(r"python -m (tools\.[\w.]*\w)", ALL)) <= {*listed}
    for module in listed:
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main()
        assert ended.value.code == 0
        assert "usage" in capsys.readouterr().out


def test_each_command_of_the_pages_is_run_by_a_test() -> None:
    tables = "tests/end_to_end/test_readme_commands.py"
    run_by = {
        "make setup": ".github/workflows/test.yml",  # which `make test` comes after
        "make test": ".github/workflows/test.yml",
        "make quickstart": "tests/test_quickstart_model.py",
        "make real": tables,
        "make docs": "tests/docs/test_site.py",
        "make dist": "tests/test_wheels.py",
        "ray job submit": "tests/end_to_end/test_submitted.py",
        "pip install": "Makefile",  # by `make setup`, which comes before every test
        "lamina run": "tests/test_installation.py",
        "lamina plan": "tests/test_installation.py",
        "python -m vllm.entrypoints.openai.api_server": "tests/vllm/test_first_hour.py",
        **{f"python -m {module}": tables for module in MODULES},
    }
    words = r"(?:^|`)((?:make|ray job|pip|lamina|python -m) [\w.]*\w)"
    shown = {command for command in re.findall(words, ALL, flags=re.MULTILINE) if "tools." not in command}
    assert shown - {"lamina --help"} == set(run_by)
    assert [where for where in run_by.values() if not (ROOT / where).is_file()] == []
