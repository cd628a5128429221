"""A command ends quietly when the reader of its output, such as `head`, has left."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline.console.arguments import parser, run_command
from pipeline.console.pipes import READER_LEFT

LAMINA = "from pipeline.console.command import main; main()"


@pytest.fixture
def unread() -> Iterator[int]:
    """Yield the end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-c", LAMINA, "--help"], ["-m", "pipeline.run", "--help"]])
def test_help_ends_as_other_programs_do(command: list[str], unread: int) -> None:
    """`lamina` itself, and a command with a supervisor, whose exit code is that of its child."""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run([sys.executable, *command], stdout=unread, stderr=subprocess.PIPE, env=buffered, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


def says(lines: int, result: int = 0) -> int:
    """Run a command that prints."""

    def body(_: argparse.Namespace) -> int:
        for _ in range(lines):
            print("a line")
        return result

    return run_command(body, argparse.Namespace(debug=True))


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_body_ends_with_the_code_of_a_broken_pipe(lines: int, unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the pipe is found to be broken while it prints, or when it has printed."""
    with os.fdopen(os.dup(unread), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert says(lines) == READER_LEFT
        monkeypatch.undo()


def test_messages_end_too(unread: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The line of an error has no reader either; standard output has one, and gets what was printed."""
    with os.fdopen(os.dup(unread), "w", buffering=1) as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        assert run_command(lambda _: print("output") or 1 // 0, argparse.Namespace(debug=False)) == READER_LEFT
        os.dup2(os.open(os.devnull, os.O_WRONLY), stderr.fileno())
    assert capsys.readouterr().out == "output\n"


def test_a_body_that_has_nothing_to_print_ends_with_its_code(unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(unread), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert says(0, result=3) == 3
        monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as with `>&-`
        assert says(2, result=3) == 3


def test_wrong_arguments_end_with_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser("plan", "Says what would be done.").parse_args(["--unknown"])
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
