"""Healing in trouble: kills, full disks, other settings after an interruption, weights that overflow. OUTPUT stays
whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import pipeline.job.student_training
from manifests.errors import NumericsError
from pipeline.healing.training import Trainer
from stores.durable import is_hidden
from stores.source import INDEX_FILE
from tests.end_to_end.children import Child, Hook, many_checkpoints
from tests.end_to_end.jobs import Ended, Job, command, file_digests, take_small_steps, without_ray
from tests.failing_disk import Fault, failing

SETTINGS = ("--set", "heal.epochs=8", "--set", "heal.learning_rate=0.003")
OTHER = ("--set", "heal.epochs=4", "--set", "heal.learning_rate=0.001")
MOST_RUNS = 40
Interrupted = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shallow_llama: Path, text: Path, scored: Path) -> Job:
    """Return a finished job with scores. `put_back` restores it."""
    root = tmp_path_factory.mktemp("solved")
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 24}}
    made = Job(root / "job", shallow_llama, text, {"evaluation": evaluation}).write()
    with without_ray():
        assert made.run().json
    made.keep()
    return made


@pytest.fixture(scope="module")
def healed(finished: Job) -> dict[str, str]:
    """Return the digests of the job's OUTPUT after its healing."""
    with without_ray(), pytest.MonkeyPatch.context() as patch:
        take_small_steps(patch)
        assert heal(finished).code == 0
    shutil.copytree(finished.root, finished.root.with_name("after"))
    return file_digests(finished.output)


@pytest.fixture
def solved(finished: Job, healed: dict[str, str], small_steps: None, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return the finished job before its healing, which writes a checkpoint after each step."""
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    return finished.put_back()


def heal(made: Job, settings: tuple[str, ...] = SETTINGS) -> Ended:
    return command("heal", str(made.run_dir), *settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "match", "least"),
    [
        ("unlink", "/output/", 1),
        ("file", "/output/", 8),
        ("file", "/healing/step-", 8),
        ("file", "/ledger/", 8),
        ("file", "/staged/", 2),
    ],
)
def test_killed_again_and_again_each_time_a_file_further(
    what: str, match: str, least: int, solved: Job, healed: dict[str, str]
) -> None:
    """Before or after a file gets its name, or is removed: OUTPUT is the old checkpoint, none, or the healed one."""
    before = published(solved)
    for nth in range(1, MOST_RUNS):
        hook = Hook(what, nth, match, after=nth % 2 == 0)
        child = Child("heal", [str(solved.run_dir), *SETTINGS], solved.root / "log", hook, prepare=many_checkpoints)
        code = child.end()
        assert code in (0, -signal.SIGKILL), child.said
        found = published(solved)
        assert INDEX_FILE not in found or found in (before, healed)
        state = command("status", str(solved.run_dir), "--json").json["state"]
        if code == 0:
            assert state == "finished"
            break
        assert state == "killed" or found == healed  # at its very end, `ended.json` is there already
        assert match in ("/output/", "/ledger/") or found == before
    assert nth > least, child.said
    steps = re.findall(r"resuming after step (\d+) of 16", child.said)
    assert steps == sorted(steps, key=int)
    assert published(solved) == healed
    assert not (solved.run_dir / "healing").exists()
    assert not [*solved.run_dir.glob("student-*")]


def published(made: Job) -> dict[str, str]:
    """Return the digests of the files that readers of OUTPUT see."""
    return {name: digest for name, digest in file_digests(made.output).items() if not is_hidden(name)}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("match", "nth"),
    [
        ("activations.zarr/", 1),  # the teacher's distribution
        ("/student-", 3),
        ("/healing/step-000001", 2),
        ("/healing/step-000009", 1),
        ("/staged/", 1),
        ("/ledger/healing.", 2),
        ("/ledger/healed.", 1),
        ("/output/compression.json", 1),
        ("/output/", 12),
    ],
)
def test_a_full_disk_ends_it_and_costs_nothing(match: str, nth: int, solved: Job, healed: dict[str, str]) -> None:
    before = file_digests(solved.output)
    with failing(Fault((solved.run_dir, solved.output), errno.ENOSPC, nth, match=match)) as fault:
        ended = heal(solved)
    assert fault.struck, f"only {fault.seen} operations on {match}"
    assert ended.code == 1, ended.err
    assert os.strerror(errno.ENOSPC) in ended.err
    assert "Traceback" not in ended.err
    assert "internal error" not in ended.err
    assert not (solved.output / INDEX_FILE).exists() or file_digests(solved.output) == before
    assert "output" in match or file_digests(solved.output) == before
    again = heal(solved)
    assert again.code == 0, again.err
    assert file_digests(solved.output) == healed
    assert not (solved.run_dir / "healing").exists()
    assert not [*solved.run_dir.glob("student-*")]


def test_other_settings_begin_again_behind_an_interrupted_training(
    solved: Job, interrupted_training: Interrupted
) -> None:
    assert heal(solved, OTHER).code == 0
    expected = file_digests(solved.output)
    solved.put_back()
    with interrupted_training():
        assert heal(solved).code == 75
    state = command("status", str(solved.run_dir)).out
    assert "interrupted" in state
    assert re.search(r"checkpoint after step 5 of 16; divergence on held-out text 0\.\d{4} at the start, 0\.", state)
    ended = heal(solved, OTHER)
    assert ended.code == 0, ended.err
    assert "resuming after step" not in ended.err
    assert "score teacher" not in ended.err
    assert file_digests(solved.output) == expected


def test_behind_a_damaged_checkpoint_the_training_begins_again(
    solved: Job, healed: dict[str, str], interrupted_training: Interrupted
) -> None:
    with interrupted_training():
        assert heal(solved).code == 75
    (part,) = solved.run_dir.glob("healing/step-000005.*/*.distcp")
    part.write_bytes(part.read_bytes()[:1000])
    ended = heal(solved)
    assert ended.code == 0, ended.err
    assert "the checkpoint of a healing is damaged" in ended.err
    assert "resuming after step" not in ended.err
    assert "score teacher" not in ended.err
    assert file_digests(solved.output) == healed


@pytest.mark.parametrize(
    ("words", "tokens", "said"),
    [
        ("a few words", (), "heal.text: the text has "),
        (20 * "a few words more than that ", ("--set", "heal.tokens=6000"), "heal.tokens: 6000: the text has "),
        ("", (), "text"),
        (None, (), "no-such.txt"),
    ],
)
def test_a_text_that_is_too_short_or_missing(
    words: str | None, tokens: tuple[str, ...], said: str, solved: Job, tmp_path: Path
) -> None:
    before, text = file_digests(solved.output), tmp_path / "no-such.txt"
    if words is not None:
        text = tmp_path / "short.txt"
        text.write_text(words)
    ended = heal(solved, ("--set", f"heal.text.files=[{text}]", *tokens))
    assert (ended.code, said in ended.err) == (2, True), ended.err
    assert file_digests(solved.output) == before
    assert heal(solved).code == 0


def spoil_divergence(monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[int], bool]) -> None:
    """Make the held-out divergence NaN after some steps."""
    measure = Trainer._held_out_divergence

    def divergence(self: Trainer) -> float:
        return float("nan") if spoiled(self.progress.step) else measure(self)

    monkeypatch.setattr(Trainer, "_held_out_divergence", divergence)


def test_weights_whose_divergence_is_not_finite_are_not_kept(solved: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_divergence(monkeypatch, lambda step: step > 8)
    ended = heal(solved)
    assert ended.code == 0, ended.err
    assert "heal step 16 of 16: the divergence on held-out text is not finite" in ended.err
    figures = solved.compression()["healed"]
    assert [step for step, _ in figures["curve"]] == [0, 2, 4, 6, 8]
    assert 0 < figures["best_step"] <= 8
    assert command("report", str(solved.run_dir)).code == 0


def test_a_model_that_is_not_finite_before_training_is_refused(solved: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_digests(solved.output)
    spoil_divergence(monkeypatch, lambda step: True)
    ended = heal(solved)
    assert (ended.code, "not finite before a step" in ended.err) == (NumericsError.exit_code, True), ended.err
    assert file_digests(solved.output) == before


def test_its_scores_are_those_of_the_healed_model(solved: Job, scored: Path) -> None:
    first = command("status", str(solved.run_dir), "--json").json["summary"]["evaluation"]
    assert heal(solved).code == 0
    second = command("status", str(solved.run_dir), "--json").json["summary"]["evaluation"]
    assert second["perplexity"]["loss"] != first["perplexity"]["loss"]
    evaluated: Any = command("evaluate", str(solved.output), "--text", str(scored), "--window", "24", "--json").json
    assert second["perplexity"]["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
