"""Healing, in every form, and in a bucket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline.healing.checkpoints
import pipeline.healing.student
import pipeline.healing.training
import pipeline.healing.training_process
import pipeline.job.healing
import pipeline.job.student_training
from manifests.errors import NumericsError
from pipeline.healing.training import Trainer
from stores.bucket import Bucket
from stores.disk import Disk
from tests import buckets
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    command,
    file_digests,
    interrupting,
    load,
    read_tensors,
    take_small_steps,
    without_ray,
)
from tests.end_to_end.sources import make_source
from tests.failing_disk import flip

SETTINGS = ("--set", "heal.epochs=8", "--set", "heal.learning_rate=0.003")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> Job:
    """Return a job, run and healed once, with copies of both states: `put_back` restores that before healing."""
    root = tmp_path_factory.mktemp("healed")
    made = Job(root / "job", llama, text).write()
    with without_ray(), pytest.MonkeyPatch.context() as patch:
        take_small_steps(patch)
        assert made.run().json
        made.keep()
        assert command("heal", str(made.run_dir), "--json", *SETTINGS).json["healed"]
    shutil.copytree(made.root, root / "after")
    return made


@pytest.fixture
def healed_job(finished: Job) -> Job:
    """Return the healed job."""
    shutil.rmtree(finished.root)
    shutil.copytree(finished.root.with_name("after"), finished.root)
    return finished


@pytest.mark.usefixtures("small_steps")
def test_a_finished_job_is_healed_and_stays_what_it_is(healed_job: Job) -> None:
    record, kept = healed_job.compression(), healed_job.root.with_name("kept")
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
    assert "8 times on 192 tokens of" in (healed_job.output / "README.md").read_text()
    load(healed_job.output)
    assert command("report", str(healed_job.run_dir)).code == 0
    assert "by step of the healing" in (healed_job.run_dir / "report.html").read_text()
    verified = command("verify", str(healed_job.output), "--source", str(healed_job.source))
    assert verified.code == 0, verified.out
    digests = file_digests(healed_job.output)
    assert command("run", str(healed_job.manifest), "--json").json["already_finished"]
    assert command("heal", str(healed_job.run_dir), "--json", *SETTINGS).json["already_finished"]
    assert file_digests(healed_job.output) == digests


@pytest.mark.usefixtures("small_steps")
def test_in_the_manifest_it_gives_the_same_bytes_as_behind_a_finished_job(healed_job: Job, job: MakeJob) -> None:
    expected = read_tensors(healed_job.output)
    made = job(heal={"epochs": 8, "learning_rate": 0.003})
    summary = made.run().json
    assert summary["healed"]["after"] < summary["healed"]["before"]
    assert summary["held_out"]["divergence"] < healed_job.ledger("held_out_score")["divergence"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_tensors(made.output).items())
    assert json.loads(command("status", str(made.run_dir), "--json").out)["state"] == "finished"


@pytest.mark.usefixtures("small_steps")
def test_another_healing_begins_with_the_solved_layers(healed_job: Job) -> None:
    digests, first = file_digests(healed_job.output), healed_job.compression()["healed"]
    ended = command("heal", str(healed_job.run_dir), "--set", "heal.epochs=4", "--set", "heal.learning_rate=0.001")
    assert ended.code == 0, ended.err
    assert "repairing" not in ended.err
    assert "score teacher" not in ended.err
    second = healed_job.compression()["healed"]
    assert second["steps"] == 8
    assert second["before"] == first["before"]
    assert command("heal", str(healed_job.run_dir), *SETTINGS).code == 0
    assert file_digests(healed_job.output) == digests


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("dying", "said"),
    [
        (lambda: interrupting(Trainer, "_step", 8), "resuming after step 7 of 16"),
        (
            lambda: interrupting(pipeline.healing.training_process, "save_state", 4, after=True),
            "resuming after step 3 of 16",
        ),
        (lambda: interrupting(pipeline.job.healing, "forget_figures", 1), "healed: 16 steps"),
        (lambda: interrupting(pipeline.job.healing, "score_held_out", 1), "healed: 16 steps"),
    ],
    ids=["in a step", "in a checkpoint", "before it is entered", "before it is assembled"],
)
def test_an_interrupted_healing_resumes_with_the_same_bytes(
    healed_job: Job, dying: Callable[[], tuple[Any, str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = file_digests(healed_job.output)
    healed_job.put_back()
    base = file_digests(healed_job.output)
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(*dying())
        assert command("heal", str(healed_job.run_dir), *SETTINGS).code == 75
    assert file_digests(healed_job.output) == base
    (healed_job.run_dir / "student-left").mkdir()  # as by SIGKILL
    ended = command("heal", str(healed_job.run_dir), *SETTINGS)
    assert ended.code == 0, ended.err
    assert said in ended.out + ended.err
    assert "score teacher" not in ended.err
    assert file_digests(healed_job.output) == digests
    assert not (healed_job.run_dir / "healing").exists()
    assert said.startswith("healed") or not [*healed_job.run_dir.glob("student-*")]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (pipeline.healing.student, "CHECKPOINTED_BYTES", 0),
        (pipeline.healing.training_process, "_offloads", lambda *_: True),
    ],
    ids=["computed twice", "in host memory"],
)
def test_it_changes_no_byte_where_activations_and_layers_are(
    module: Any, name: str, value: Any, healed_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations that are computed twice, and layers that FSDP keeps in host memory, here beside the device's."""
    digests = file_digests(healed_job.output)
    healed_job.put_back()
    monkeypatch.setattr(module, name, value)
    ended = command("heal", str(healed_job.run_dir), *SETTINGS)
    assert ended.code == 0, ended.err
    assert file_digests(healed_job.output) == digests


@pytest.mark.usefixtures("small_steps")
def test_a_healing_that_has_begun_keeps_its_rate(healed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    healed_job.put_back()
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(*interrupting(Trainer, "_step", 3))
        begun = command("heal", str(healed_job.run_dir), "--set", "heal.epochs=2")
    assert begun.code == 75
    monkeypatch.setattr(pipeline.healing.training, "BASE_RATE", 1.0)
    ended = command("heal", str(healed_job.run_dir), "--set", "heal.epochs=2")
    assert ended.code == 0, ended.err
    assert "resuming after step 2 of 4" in ended.err
    first, second = (each.err.partition("learning rate ")[2].partition(" of")[0] for each in (begun, ended))
    assert float(first) == float(second) < 0.01


@pytest.mark.usefixtures("small_steps")
def test_damaged_rows_of_the_teacher_are_computed_again(healed_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = file_digests(healed_job.output)
    healed_job.put_back()
    with monkeypatch.context() as patch:
        patch.setattr(*interrupting(Trainer, "_step", 1))
        assert command("heal", str(healed_job.run_dir), *SETTINGS).code == 75
    record = healed_job.ledger("teacher")["rows"][0]
    for chunk in (healed_job.run_dir / "activations.zarr" / record["path"]).rglob("c*"):
        if chunk.is_file():
            flip(chunk)
    ended = command("heal", str(healed_job.run_dir), *SETTINGS)
    assert ended.code == 0, ended.err
    assert "repairing" in ended.err
    assert ended.err.count("phase score teacher") == 1
    assert file_digests(healed_job.output) == digests


@pytest.mark.usefixtures("small_steps")
def test_a_healing_that_helps_nothing_changes_nothing(job: MakeJob) -> None:
    made = job()
    made.run()
    base = read_tensors(made.output)
    ended = command("heal", str(made.run_dir), "--set", "heal.learning_rate=0.9")
    assert ended.code == 0, ended.err
    assert "no step came closer to the dense model" in ended.err
    assert "back to the weights of step 0; 0.3 of the rate from here on" in ended.err
    assert "not healed: of" in ended.out
    assert "peak memory in MiB: driver" in ended.out
    assert "; workers" not in ended.out, "none has worked in this run"
    assert "healed" not in made.compression()
    assert all(torch.equal(tensor, base[name]) for name, tensor in read_tensors(made.output).items())
    assert made.run().json["already_finished"]


@pytest.mark.usefixtures("small_steps")
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


@pytest.mark.usefixtures("small_steps")
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


@pytest.mark.usefixtures("small_steps")
def test_an_unfinished_job_is_refused(job: MakeJob, tmp_path: Path) -> None:
    ended = command("heal", str(tmp_path))
    assert (ended.code, "no run directory" in ended.err) == (2, True)


@pytest.mark.usefixtures("small_steps")
def test_a_moved_run_directory_is_healed_where_it_is(finished: Job) -> None:
    made = finished.put_back()
    moved = made.run_dir.rename(made.run_dir.with_name("moved"))
    assert command("heal", str(moved), "--json", *SETTINGS).json["healed"]
    assert not made.run_dir.exists()
    assert command("status", str(moved), "--json").json["summary"]["healed"]


# Method -> a part of the names of its own tensors that must change.
ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "lestd": ({"method": "lestd", "target": "both", "keep": 0.6}, "core"),
    "lestd-dense-core": ({"method": "lestd", "keep": 0.6, "prune": False}, "core"),
    "joint": ({"method": "joint_rank_k", "keep": 0.6, "mlp": False}, "first"),
    "lorc": ({"method": "lorc", "cache_keep": 0.5}, "k_proj"),
    "loss-aware": ({"method": "loss_aware", "keep": 0.6}, "coefficients"),
    "svd": ({"method": "svd", "keep": 0.6}, "second"),
    "magnitude": ({"method": "magnitude", "keep": 0.6}, "down"),
}
SAMPLE = ("lestd", "loss-aware")
FAMILIES = ("opt", "gemma2", "mixtral", "qwen3_next")


def healed(made: Job) -> set[str]:
    """Run a job with healing, check OUTPUT, and return the names of the tensors that the healing changed."""
    summary = made.run().json
    figures = summary["healed"]
    assert figures["after"] < figures["before"]
    record, tensors = made.compression(), read_tensors(made.output)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
    verified = command("verify", str(made.output), "--source", str(made.source))
    assert verified.code == 0, verified.out
    load(made.output)
    return {name for name, entry in record["tensors"].items() if entry.get("healed")}


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly]) for name in ENTRIES]
)
def test_a_form_trains_and_is_written_back(method: str, job: MakeJob) -> None:
    entry, part = ENTRIES[method]
    made = job(
        methods=[entry], budget=None, heal={"epochs": 4, "learning_rate": 0.002}, **{"calibration.propagate": "dense"}
    )
    changed = healed(made)
    assert any(part in name for name in changed), changed
    assert any("norm" in name for name in changed)
    assert not any(name.endswith("indices") for name in changed)


DENSE = {"calibration.propagate": "dense"}
MLA_HEAL = {"epochs": 4, "learning_rate": 0.002}
WHOLE: dict[str, Any] = {"methods": [], "budget": None}
ROUNDED: dict[str, dict[str, Any]] = {
    "uniform": {"quantize": {"bits": 3}, **WHOLE},
    "tables": {"quantize": {"bits": 3, "levels": "normal"}, **WHOLE},
    "learned": {"quantize": {"bits": 3, "levels": "learned"}, **WHOLE},
    "llama.cpp": {"quantize": {"bits": 4, "levels": "iq4_nl"}, "calibration.samples": 64, **WHOLE},
    "rows": {"quantize": {"bits": 4, "group": None}, **WHOLE},
    "factors": {**WHOLE, "quantize": {"bits": 4, "levels": "normal"}, "methods": [ENTRIES["loss-aware"][0]]},
}  # fmt: skip


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=[] if name == "uniform" else [pytest.mark.nightly]) for name in ROUNDED]
)
def test_scales_and_levels_train_while_codes_stay(form: str, job: MakeJob) -> None:
    rate = 5e-6 if form == "llama.cpp" else 5e-4  # its levels are up to 127, and scales as much smaller
    made = job(heal={"epochs": 4, "learning_rate": rate}, **{"calibration.propagate": "dense", **ROUNDED[form]})
    changed = healed(made)
    assert any(name.endswith("weight_scale") for name in changed)
    learned = "levels: learned" in made.manifest.read_text()  # engines have the tables of other kinds built in
    assert any(name.endswith("weight_levels") for name in changed) == learned
    assert not any(name.endswith(("weight_packed", "weight_shape")) for name in changed)
    figures, held_out = made.compression()["healed"], made.ledger("held_out_score")
    assert figures["before"] == pytest.approx(held_out["divergence"], rel=0.02)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.nightly
@pytest.mark.parametrize("levels", ["uniform", "normal"])
def test_a_rounded_head_stays_while_layers_heal(levels: str, job: MakeJob) -> None:
    quantize = {"bits": 3, "levels": levels, "what": "all"}
    made = job(quantize=quantize, heal={"epochs": 4, "learning_rate": 0.0005}, **WHOLE, **DENSE)
    changed = healed(made)
    assert any(name.endswith("weight_scale") for name in changed)
    assert all(".layers." in name for name in changed)
    record = made.compression()
    assert any(name.startswith("lm_head.weight_packed") for name in record["tensors"])
    assert record["healed"]["before"] == pytest.approx(made.ledger("held_out_score")["divergence"], rel=0.02)


@pytest.mark.usefixtures("small_steps")
def test_a_checkpoint_of_another_class(job: MakeJob) -> None:
    made = job(methods=[{"method": "mla", "cache_keep": 0.5}], budget=None, heal=MLA_HEAL, **DENSE)
    changed = healed(made)
    assert any("kv_b_proj" in name for name in changed)
    assert any("norm" in name for name in changed)
    assert all(".layers." in name for name in changed)
    figures, held_out = made.compression()["healed"], made.ledger("held_out_score")
    assert figures["before"] == pytest.approx(held_out["divergence"], rel=0.02)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("form", ["tables", pytest.param("factors", marks=pytest.mark.nightly)])
def test_codes_train_through_the_rounding(form: str, job: MakeJob) -> None:
    heal = {"epochs": 4, "learning_rate": 0.001, "what": "codes"}  # large enough that a code of this model changes
    changed = healed(job(heal=heal, **{**DENSE, "calibration.samples": 64, **ROUNDED[form]}))
    assert any(name.endswith("weight_packed") for name in changed)
    assert not any(name.endswith("weight_shape") for name in changed)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family)
    changed = healed(job(source, heal={"epochs": 8, "learning_rate": 0.0005}))
    assert changed
    assert not any("router" in name or name.endswith("gate.weight") for name in changed)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.nightly
def test_a_router_with_fewer_experts_stays(job: MakeJob, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "mixtral")
    methods, heal = [{"method": "reap", "refit": True}], {"epochs": 8, "learning_rate": 0.0005}
    changed = healed(job(source, methods=methods, heal=heal, **{"calibration.propagate": "dense"}))
    assert any("experts" in name for name in changed)
    assert not any(name.endswith("gate.weight") for name in changed)


@pytest.mark.usefixtures("small_steps")
def test_text_of_its_own_for_a_job_without_calibration(job: MakeJob, text: Path) -> None:
    heal = {"text": {"files": [str(text)]}, "tokens": 640, "learning_rate": 0.002, "what": "norms"}
    made = job(methods=[{"method": "svd", "keep": 0.6}], budget=None, calibration=None, heal=heal)
    changed = healed(made)
    assert all(name.endswith("norm.weight") for name in changed)
    assert made.compression()["healed"]["text"] == [text.name]


HEAL = {"epochs": 8, "learning_rate": 0.003}


@pytest.mark.nightly
def test_a_killed_healing_in_a_bucket_goes_on(
    job: MakeJob,
    s3_bucket: str,
    llama: Path,
    text: Path,
    small_steps: None,
    interrupted_training: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline.job.student_training, "CHECKPOINT_S", 0.0)
    buckets.put_inputs(s3_bucket, llama, text)
    local, remote = job(heal=HEAL), job(heal=HEAL, **buckets.job_places(s3_bucket))
    expected = local.run().json
    with interrupted_training():
        assert remote.run().code == 75
    run_dir = Bucket(f"{s3_bucket}/run")
    assert [name.rpartition("/")[2] for name in run_dir.names("healing")] == [".metadata", "__0_0.distcp"]
    run_dir.put_if_absent("student-left/config.json", b"{}")  # as by SIGKILL
    ended: Any = remote.run()
    assert "resuming after step 5 of 16" in ended.err
    assert "score teacher" not in ended.err
    assert ended.json["healed"] == expected["healed"]
    assert buckets.digests(Bucket(f"{s3_bucket}/output")) == buckets.digests(Disk(local.output))
    assert not run_dir.names("healing")
    assert not [folder for folder in run_dir.folders() if folder.startswith("student-")]
    assert [path.name for path in remote.root.iterdir()] == ["manifest.yaml"], "nothing is on this disk"
