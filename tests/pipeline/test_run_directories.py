"""Commands on a run directory that is not theirs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from pipeline import evaluate, report
from pipeline.checkpoint import publishing
from pipeline.heal import healing_manifest

OF_A_JOB: dict[str, Callable[[str], Any]] = {
    "report": lambda run_dir: report._body(Namespace(run_dir=run_dir, output=None)),
    "heal": lambda run_dir: healing_manifest(Namespace(run_dir=run_dir, set=[], base=None)),
    "push": lambda run_dir: publishing._scores(run_dir, ""),
}


@pytest.mark.parametrize("command", OF_A_JOB)
def test_the_run_directory_of_a_sweep_is_refused(command: str, tmp_path: Path) -> None:
    for name in ("fingerprint.json", "sweep.yaml"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError) as caught:
        OF_A_JOB[command](str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: the run directory of a sweep; give that of a job. `python -m pipeline.sweep` writes the results "
        f"of all points to {tmp_path}/sweep.html, and heals the points in `save` if the sweep has `heal: {{}}`; "
        "`python -m pipeline.push` takes their checkpoints without --run-dir"
    )


@pytest.mark.parametrize("file", ["fingerprint.json", "ended.json"])
def test_evaluate_leaves_the_run_directory_of_a_job_alone(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text("{}")
    assert evaluate.main([str(tmp_path), "--tasks", "any", "--run-dir", str(tmp_path)]) == 2
    assert f"--run-dir {tmp_path}: the run directory of a job or sweep; give a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [file]
