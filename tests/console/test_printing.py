"""Commands in output are spelled as the process was called; lines break between words, and a path stays one word."""

from __future__ import annotations

import io
import sys

import pytest

from pipeline.console.arguments import parser
from pipeline.console.printing import as_called, say, wrapped
from pipeline.console.progress import JobObserver

LINE = "  2026-11-22 19:30:40,392 INFO compress layer 5 committed (mlp: 32), 6/8, 28,273 tokens/s, 1 s left"
PATH = "/a/very/long/path/" + "x" * 90


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_word_is_broken(width: int) -> None:
    lines = wrapped(f"{LINE}\nlog: {PATH}", width).splitlines()
    assert " ".join(" ".join(lines).split()) == " ".join(f"{LINE} log: {PATH}".split())
    assert all(len(line) <= width or line.strip() == PATH for line in lines)
    assert all(line.startswith("    ") for line in lines[1:] if "tokens/s" in line)


@pytest.mark.parametrize("width", ["40", "80"])
def test_a_terminal_gets_lines_that_fit(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    terminal = Terminal()
    say(LINE, terminal)
    assert max(map(len, terminal.getvalue().splitlines())) <= int(width)


def test_a_pipe_breaks_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    say(LINE)
    assert capsys.readouterr().out == f"{LINE}\n"
    say(LINE, sys.stderr)
    assert capsys.readouterr().err == f"{LINE}\n"


TEXT = "run it with: python -m pipeline.run job.yaml, `python -m pipeline.verify` after it"
CALLS = {
    "/env/pipeline/init.py": TEXT,
    "python -m pipeline.init": TEXT,
    "/env/bin/pytest": TEXT,
    "lamina init": "run it with: lamina run job.yaml, `lamina verify` after it",
}


@pytest.mark.parametrize("call", CALLS)
def test_output_spells_commands_as_the_call_did(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [call, "job.yaml"])
    assert as_called(TEXT) == CALLS[call]
    printed = io.StringIO()
    say(TEXT, printed)
    JobObserver(printed).say(TEXT)
    assert printed.getvalue().splitlines() == [CALLS[call]] * 2
    assert parser("plan", "…").prog == ("lamina plan" if call == "lamina init" else "python -m pipeline.plan")
