"""Some of the fuzzer's cases; all of them: `python -m tools.soak.fuzz`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.children import CONTEXT, WAIT_S


def play(arguments: list[str], log: str) -> None:
    """In a process forked from the warm one of the end-to-end tests, which may fork in its turn: it has no threads."""
    from tools.soak import fuzz

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    raise SystemExit(fuzz.main(arguments))


@pytest.mark.parametrize("cases", [11, pytest.param(30, marks=pytest.mark.nightly)])
def test_hostile_input_ends_in_a_clear_error(cases: int, tmp_path: Path) -> None:
    from tools.soak.fuzz import KINDS  # which imports more than other tests need

    log, arguments = tmp_path / "log", ["--cases", f"{cases}", "--seed", "7", "--directory", str(tmp_path)]
    process = CONTEXT.Process(target=play, args=(arguments, str(log)))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0, log.read_text()
    assert all(kind in log.read_text() for kind in KINDS)
