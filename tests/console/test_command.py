"""The commands under one name: their list, their versions, and one spelling in help and messages."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from manifests import VERSION
from pipeline.console import command
from tests.end_to_end.jobs import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("manifests", "pipeline", "stores", "workers")
NAMES = "|".join(COMMANDS)
OTHER_SPELLINGS = re.compile(rf"\blamina ({NAMES})\b|(?<!python -m )\bpipeline\.({NAMES})\b")


def lamina(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lamina", *arguments])
    try:
        command.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_help_has_a_line_for_each_command(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert lamina(monkeypatch, "--help") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert set(command.commands()) == set(COMMANDS)
    lines = shown.out.splitlines()
    for name, description in command.commands().items():
        assert description
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
        assert description in " ".join(shown.out.split())
    assert max(len(line) for line in lines if line.startswith("  ")) <= columns


def test_an_unknown_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert lamina(monkeypatch) == 2
    assert lamina(monkeypatch, "walk") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(f"wrong input: 'walk' is not a command; commands are {', '.join(sorted(COMMANDS))}\n")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_command_says_its_version(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name:
        with pytest.raises(SystemExit) as ended:
            COMMANDS[name](["--version"])
        assert not ended.value.code
    else:
        assert lamina(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"Lamina {VERSION}\n"


def test_a_command_runs_under_the_name_it_was_called_by(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(command.runpy, "run_module", lambda module, **_: run.append((module, sys.argv)))
    assert lamina(monkeypatch, "plan", "job.yaml", "--json") == 0
    assert run == [("pipeline.plan", ["lamina plan", "job.yaml", "--json"])]


def messages(tree: ast.AST) -> list[str]:
    """Every string of a module that is no docstring and no name of a module to import."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and node.body
                  and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str) and " " in node.value]


@pytest.mark.slow
def test_help_and_messages_spell_commands_in_one_way() -> None:
    """`python -m pipeline.run`, which `pipeline.console.printing` replaces by `lamina run` where that was called."""
    wrong = {
        f"{path}: {text}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for text in messages(ast.parse(path.read_text(encoding="utf-8")))
        if OTHER_SPELLINGS.search(text)
    }
    assert not wrong
