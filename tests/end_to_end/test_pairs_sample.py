"""Some of the soak's random pairs of a model and a manifest; all of them: `python -m tools.soak.pairs`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.children import CONTEXT, WAIT_S


def play(arguments: list[str], log: str) -> None:
    """In a process forked from the warm one of the end-to-end tests, which may fork in its turn: it has no threads."""
    from tools.soak import pairs

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    raise SystemExit(pairs.main(arguments))


@pytest.mark.parametrize(
    ("seed", "first", "count"), [(44, 47, 20), (7, 194, 1), pytest.param(7, 24, 24, marks=pytest.mark.nightly)]
)
def test_each_pair_is_refused_by_name_or_clean(seed: int, first: int, count: int, tmp_path: Path) -> None:
    log, results = tmp_path / "log", tmp_path / "results.jsonl"
    arguments = ["--seed", f"{seed}", "--first", f"{first}", "--pairs", f"{count}", "--results", str(results)]
    process = CONTEXT.Process(target=play, args=([*arguments, "--directory", str(tmp_path)], str(log)))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0, log.read_text()
    outcomes = [json.loads(line)["outcome"] for line in results.read_text().splitlines()]
    assert len(outcomes) == count
    assert outcomes.count("clean") >= count // 3
