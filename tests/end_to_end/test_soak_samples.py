"""Some of the soaks' random cases. All of them: `python -m tools.soak.fuzz`, `python -m tools.soak.pairs`."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.children import CONTEXT, WAIT_S


def play(soak: str, arguments: list[str], log: str) -> None:
    """Run a soak in a process forked from the warm one of the end-to-end tests. It has no threads, so it may fork."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    raise SystemExit(importlib.import_module(f"tools.soak.{soak}").main(arguments))


def played(soak: str, folder: Path, **options: object) -> str:
    """Return the output of a soak that has found nothing."""
    log, words = folder / "log", {**options, "directory": folder}
    arguments = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    process = CONTEXT.Process(target=play, args=(soak, arguments, str(log)))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("cases", [11, pytest.param(30, marks=pytest.mark.nightly)])
def test_hostile_input_ends_in_a_clear_error(cases: int, tmp_path: Path) -> None:
    from tools.soak.fuzz import KINDS  # which imports more than other tests need

    log = played("fuzz", tmp_path, cases=cases, seed=7)
    assert all(kind in log for kind in KINDS)


@pytest.mark.parametrize(
    ("seed", "first", "count"),
    [
        (44, 47, 4),
        (7, 194, 1),
        pytest.param(44, 51, 16, marks=pytest.mark.nightly),
        pytest.param(7, 24, 24, marks=pytest.mark.nightly),
    ],
)
def test_each_pair_is_refused_by_name_or_clean(seed: int, first: int, count: int, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    played("pairs", tmp_path, seed=seed, first=first, pairs=count, results=results)
    outcomes = [json.loads(line)["outcome"] for line in results.read_text().splitlines()]
    assert len(outcomes) == count
    assert outcomes.count("clean") >= count // 3
