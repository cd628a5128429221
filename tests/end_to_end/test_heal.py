"""Healing of small random models, in this process: the layers, the records, resumption, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import manifests.heal
import pipeline.healing.checkpoints
import pipeline.healing.student
import pipeline.healing.training
import pipeline.job.healing
import pipeline.job.student_training
from manifests.errors import NumericsError
from pipeline.healing.training import Trainer
from tests.end_to_end.jobs import Job, command, file_digests, load, read_tensors, without_ray
from tests.failing_disk import flip

pytestmark = pytest.mark.usefixtures("small_steps")

MakeJob = Callable[..., Job]
SETTINGS = ("--set", "heal.epochs=8", "--set", "heal.learning_rate=0.003")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> Job:
    """Return a job, run and healed once, with copies of both states: `put_back` restores that before healing."""
    root = tmp_path_factory.mktemp("healed")
    made = Job(root / "job", llama, text).write()
    with without_ray(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests.heal, "STEPS", 1)
        patch.setattr(manifests.heal, "STEP_TOKENS", 96)
        assert made.run().json
        made.keep()
        assert command("heal", str(made.run_dir), "--json", *SETTINGS).json["healed"]
    shutil.copytree(made.root, root / "after")
    return made


@pytest.fixture
def healed(finished: Job) -> Job:
    """Return the healed job."""
    shutil.rmtree(finished.root)
    shutil.copytree(finished.root.with_name("after"), finished.root)
    return finished


def test_a_finished_job_is_healed_and_stays_what_it_is(healed: Job) -> None:
    record, kept = healed.compression(), healed.root.with_name("kept")
    before = json.loads((kept / "output/compression.json").read_text())
    figures = record["healed"]
    assert figures["after"] < figures["before"]
    assert [step for step, _ in figures["curve"]] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    changed = {name for name, each in record["tensors"].items() if each["sha256"] != before["tensors"][name]["sha256"]}
    assert changed
    assert all(".layers." in name for name in changed)
    assert any(name.endswith("norm.weight") for name in changed)
    assert record["layers"] == before["layers"]
    assert record["compared"] != before["compared"]
    assert "8 times on 192 tokens of" in (healed.output / "README.md").read_text()
    load(healed.output)
    assert command("report", str(healed.run_dir)).code == 0
    assert "by step of the healing" in (healed.run_dir / "report.html").read_text()
    verified = command("verify", str(healed.output), "--source", str(healed.source))
    assert verified.code == 0, verified.out
    digests = file_digests(healed.output)
    assert command("run", str(healed.manifest), "--json").json["already_finished"]
    assert command("heal", str(healed.run_dir), "--json", *SETTINGS).json["already_finished"]
    assert file_digests(healed.output) == digests


def test_in_the_manifest_it_gives_the_same_bytes_as_behind_a_finished_job(healed: Job, job: MakeJob) -> None:
    expected = read_tensors(healed.output)
    made = job(heal={"epochs": 8, "learning_rate": 0.003})
    summary = made.run().json
    assert summary["healed"]["after"] < summary["healed"]["before"]
    assert summary["held_out"]["divergence"] < healed.ledger("held_out_score")["divergence"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_tensors(made.output).items())
    assert json.loads(command("status", str(made.run_dir), "--json").out)["state"] == "finished"


def test_another_healing_begins_with_the_solved_layers(healed: Job) -> None:
    digests, first = file_digests(healed.output), healed.compression()["healed"]
    ended = command("heal", str(healed.run_dir), "--set", "heal.epochs=4", "--set", "heal.learning_rate=0.001")
    assert ended.code == 0, ended.err
    assert "repairing" not in ended.err
    assert "score teacher" not in ended.err
    second = healed.compression()["healed"]
    assert second["steps"] == 8
    assert second["before"] == first["before"]
    assert command("heal", str(healed.run_dir), *SETTINGS).code == 0
    assert file_digests(healed.output) == digests


def _dying(owner: Any, name: str, calls: int, after: bool = False) -> tuple[Any, str, Callable[..., Any]]:
    """Return arguments of `setattr` that end the command at a call of a function, before or after it."""
    real, done = getattr(owner, name), list[int]()

    def call(*arguments: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == calls and not after:
            raise KeyboardInterrupt
        result = real(*arguments, **options)
        if len(done) == calls:
            raise KeyboardInterrupt
        return result

    return owner, name, call


@pytest.mark.parametrize(
    ("dying", "said"),
    [
        (lambda: _dying(Trainer, "_step", 8), "resuming after step 7 of 16"),
        (
            lambda: _dying(pipeline.healing.training_process, "save_state", 4, after=True),
            "resuming after step 3 of 16",
        ),
        (lambda: _dying(pipeline.job.healing, "forget_figures", 1), "healed: 16 steps"),
        (lambda: _dying(pipeline.job.healing, "score_held_out", 1), "healed: 16 steps"),
    ],
    ids=["in a step", "in a checkpoint", "before it is entered", "before it is assembled"],
)
def test_an_interrupted_healing_resumes_with_the_same_bytes(
    healed: Job, dying: Callable[[], tuple[Any, str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = file_digests(healed.output)
    healed.put_back()
    base = file_digests(healed.output)
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(*dying())
        assert command("heal", str(healed.run_dir), *SETTINGS).code == 75
    assert file_digests(healed.output) == base
    (healed.run_dir / "student-left").mkdir()  # as by SIGKILL
    ended = command("heal", str(healed.run_dir), *SETTINGS)
    assert ended.code == 0, ended.err
    assert said in ended.out + ended.err
    assert "score teacher" not in ended.err
    assert file_digests(healed.output) == digests
    assert not (healed.run_dir / "healing").exists()
    assert said.startswith("healed") or not [*healed.run_dir.glob("student-*")]


def test_activations_that_are_computed_twice_change_no_byte(healed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = file_digests(healed.output)
    healed.put_back()
    monkeypatch.setattr(pipeline.healing.student, "CHECKPOINTED_BYTES", 0)
    ended = command("heal", str(healed.run_dir), *SETTINGS)
    assert ended.code == 0, ended.err
    assert file_digests(healed.output) == digests


def test_a_healing_that_has_begun_keeps_its_rate(healed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    healed.put_back()
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(*_dying(Trainer, "_step", 3))
        begun = command("heal", str(healed.run_dir), "--set", "heal.epochs=2")
    assert begun.code == 75
    monkeypatch.setattr(pipeline.healing.training, "BASE_RATE", 1.0)
    ended = command("heal", str(healed.run_dir), "--set", "heal.epochs=2")
    assert ended.code == 0, ended.err
    assert "resuming after step 2 of 4" in ended.err
    first, second = (each.err.partition("learning rate ")[2].partition(" of")[0] for each in (begun, ended))
    assert float(first) == float(second) < 0.01


def test_damaged_rows_of_the_teacher_are_computed_again(healed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = file_digests(healed.output)
    healed.put_back()
    with monkeypatch.context() as patch:
        patch.setattr(*_dying(Trainer, "_step", 1))
        assert command("heal", str(healed.run_dir), *SETTINGS).code == 75
    record = healed.ledger("teacher")["rows"][0]
    for chunk in (healed.run_dir / "activations.zarr" / record["path"]).rglob("c*"):
        if chunk.is_file():
            flip(chunk)
    ended = command("heal", str(healed.run_dir), *SETTINGS)
    assert ended.code == 0, ended.err
    assert "repairing" in ended.err
    assert ended.err.count("phase score teacher") == 1
    assert file_digests(healed.output) == digests


def test_a_healing_that_helps_nothing_changes_nothing(job: MakeJob) -> None:
    made = job()
    made.run()
    base = read_tensors(made.output)
    ended = command("heal", str(made.run_dir), "--set", "heal.learning_rate=0.9")
    assert ended.code == 0, ended.err
    assert "no step came closer to the dense model" in ended.err
    assert "healed" not in made.compression()
    assert all(torch.equal(tensor, base[name]) for name, tensor in read_tensors(made.output).items())
    assert made.run().json["already_finished"]


def test_gradients_that_are_not_finite_are_skipped_and_end_the_training(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()
    made.run()
    digests = file_digests(made.output)
    real = Trainer._gradients

    def gradients(self: Trainer, chosen: list[int]) -> float:
        loss = real(self, chosen)
        next(iter(self.student.trained.values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return loss

    monkeypatch.setattr(Trainer, "_gradients", gradients)
    ended = command("heal", str(made.run_dir), *SETTINGS)
    assert ended.code == NumericsError.exit_code
    assert "the gradients of 10 steps were NaN or infinite" in ended.err
    assert file_digests(made.output) == digests


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "heal.tokens=100000"), "heal.tokens: 100000: the text has 192 tokens"),
        (("--set", "heal.learning_rate=2"), "should be a number above 0 and below 1, or auto"),
    ],
)
def test_wrong_settings_leave_output_as_it_was(options: tuple[str, ...], said: str, job: MakeJob) -> None:
    made = job()
    made.run()
    digests = file_digests(made.output)
    ended = command("heal", str(made.run_dir), *options)
    assert (ended.code, said in ended.err) == (2, True), ended.err
    assert file_digests(made.output) == digests


def test_an_unfinished_job_is_refused(job: MakeJob, tmp_path: Path) -> None:
    ended = command("heal", str(tmp_path))
    assert (ended.code, "no run directory" in ended.err) == (2, True)
