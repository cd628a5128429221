"""Every run ends with a record of its outcome, in RUN_DIR, in the log and in `status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stores.ledger import Ledger
from tests.end_to_end.children import Child, Hook, wait_for
from tests.end_to_end.jobs import Job, MakeJob, command
from workers.worker import Worker

LAYERS = 3  # of the fixture `llama`
pytestmark = pytest.mark.usefixtures("inline")


def ended(job: Job) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((job.run_dir / "ended.json").read_text())
    assert record["version"] == 1
    return record


def status(job: Job) -> dict[str, Any]:
    state: dict[str, Any] = command("status", str(job.run_dir), "--json").json
    return state


def test_done(job: MakeJob) -> None:
    made = job()
    assert made.run().code == 0
    record = ended(made)
    assert (record["outcome"], record["exit_code"], record["error"]) == ("done", 0, None)
    assert Path(record["log"]).read_text().rstrip().endswith("done")
    assert status(made)["state"] == "finished"
    assert status(made)["last_run"] == record


def test_failed(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` shows a failure, and not an interruption."""
    from manifests.errors import NumericsError

    def fail(*_: Any) -> None:
        raise NumericsError("layer 1: tensor x.weight holds NaN")

    made = job()
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_solve", fail)
        assert made.run().code == 2
    record = ended(made)
    assert (record["outcome"], record["exit_code"]) == ("failed", 2)
    assert record["error"] == "layer 1: tensor x.weight holds NaN"
    assert record["where"].startswith("phase ")
    assert "wrong input: layer 1" in Path(record["log"]).read_text()
    lines = [json.loads(line) for line in Path(record["log"]).with_suffix(".jsonl").read_text().splitlines()]
    assert len(lines) == len(Path(record["log"]).read_text().splitlines())
    assert (lines[-1]["level"], lines[-1]["run"], lines[-1]["phase"]) == ("ERROR", "run", "walk")
    assert lines[-1]["message"].endswith("layer 1: tensor x.weight holds NaN")
    assert {line["layer"] for line in lines if line["phase"] == "importance"} == {None, 0, 1, 2}
    state = status(made)
    assert (state["state"], state["last_run"]["exit_code"]) == ("failed", 2)
    shown = command("status", str(made.run_dir)).out
    assert "failed; run the same command again when the cause is fixed" in shown
    assert "exit code 2, phase " in shown
    assert made.run().code == 0
    assert status(made)["state"] == "finished"


def test_an_error_that_nobody_foresaw_says_where(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(Worker, "_solve", fail)
    made = job()
    assert made.run().code == 1
    record = ended(made)
    assert (record["outcome"], record["exit_code"]) == ("failed", 1)
    assert record["error"] == "ZeroDivisionError: float division by zero"
    assert Path(__file__).name in record["where"]


def test_interrupted_and_killed(job: MakeJob, tmp_path: Path) -> None:
    made, pause = job(), tmp_path / "pause"
    hook = Hook("commit", match="layer/00001", pause=str(pause))
    child = Child("run", [str(made.manifest)], made.root / "log", hook)
    wait_for(pause, child)
    child.process.terminate()
    pause.unlink()
    assert child.end() == 75, child.said
    assert "SIGTERM: stopping" in child.said
    record = ended(made)
    assert (record["outcome"], record["exit_code"]) == ("interrupted", 75)
    assert status(made)["state"] == "interrupted"
    assert "run the same command again to resume" in command("status", str(made.run_dir)).out

    hook = Hook("commit", match="layer/00002", pause=str(pause))
    child = Child("run", [str(made.manifest)], made.root / "log", hook)
    wait_for(pause, child)
    assert status(made)["last_run"] is None
    child.kill()
    assert status(made)["state"] == "killed"
    pause.unlink()
    assert made.run().code == 0
    assert status(made)["state"] == "finished"
    assert Ledger(made.run_dir / "ledger").get("hardware")
