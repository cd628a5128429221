"""A job that is killed, stopped, damaged or changed keeps its finished work, and ends with the bytes of one run."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import workers.pool
from pipeline.units.units import Forward, Unit
from stores.durable import is_hidden
from tests import factories
from tests.end_to_end.children import Child, Hook, wait_for
from tests.end_to_end.jobs import FLAT_LLM, Job, MakeJob, command, file_digests, weight_digests, without_ray, work_done
from tests.end_to_end.shared_ray import KeptPool
from workers import pool_health

LAYERS = 3  # of the fixture `llama`
SHARDS = 2
INDEX = "model.safetensors.index.json"
MOST_RUNS = 60


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> dict[str, dict[str, str]]:
    """The output of one run without an interruption, by `propagate`."""
    found = {}
    for propagate in ("compressed", "dense"):
        made = Job(tmp_path_factory.mktemp(propagate), llama, text, {"calibration.propagate": propagate}).write()
        child = Child("run", [str(made.manifest)], made.root / "log")
        assert child.end() == 0, child.said
        found[propagate] = file_digests(made.output)
    assert found["compressed"] != found["dense"]
    return found


def run_killed(job: Job, hook: Hook, whole: dict[str, str]) -> int:
    """A run that the hook ends, or that comes to its end. A directory with an index is a whole checkpoint."""
    child = Child("run", [str(job.manifest)], job.root / "log", hook)
    code = child.end()
    assert code in (0, -signal.SIGKILL), child.said
    assert code == -signal.SIGKILL or (job.output / INDEX).exists()
    if (job.output / INDEX).exists():
        found = file_digests(job.output)
        assert {name: digest for name, digest in found.items() if code == 0 or not is_hidden(name)} == whole
    return code


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("propagate", "every", "hook"),
    [
        ("compressed", 1, Hook("commit", nth=2)),
        ("compressed", 2, Hook("commit", nth=2, after=True)),
        pytest.param("dense", 1, Hook("commit", nth=1, after=True), marks=pytest.mark.nightly),
    ],
)
def test_killed_at_every_commit(
    propagate: str, every: int, hook: Hook, job: MakeJob, reference: dict[str, dict[str, str]]
) -> None:
    """One job, killed again and again, each time one or two commits further: before an entry is made, or just after."""
    made = job(**{"calibration.propagate": propagate, "resume.every": every})
    runs = 0
    before: list[str] = []
    while run_killed(made, hook, reference[propagate]) != 0:
        runs += 1
        assert runs < MOST_RUNS
        repeated = [unit for unit in work_done(made)[len(before) :] if unit in before]
        layers = {unit.split("/")[2] for unit in repeated}
        assert len(layers) <= every, repeated
        assert len(repeated) <= 2 * SHARDS * every, repeated
        before = work_done(made)
    assert runs >= 8
    assert file_digests(made.output) == reference[propagate]
    assert sum(unit.startswith("replay") for unit in work_done(made)) == 0 or every > 1


@pytest.mark.nightly
@pytest.mark.parametrize("keep", [True, False])
def test_killed_after_every_layer_that_a_pass_solves(keep: bool, job: MakeJob, tmp_path: Path) -> None:
    """Moments are stored meanwhile, or only in memory; then those of unfinished layers are computed again."""
    settings = {
        "calibration.propagate": "dense",
        "methods": [{**FLAT_LLM, "allocation": "uniform"}],
        "statistics.keep": keep,
    }
    source = factories.make_model(tmp_path / "deep", num_hidden_layers=8)
    whole, made = job(source, **settings), job(source, **settings)
    assert Child("run", [str(whole.manifest)], whole.root / "log").end() == 0
    runs = 0
    while run_killed(made, Hook("commit", match="layer/", after=True), file_digests(whole.output)) != 0:
        runs += 1
        assert runs < MOST_RUNS
    assert runs == 8
    assert file_digests(made.output) == file_digests(whole.output)


@pytest.mark.nightly
def test_killed_at_every_file_of_the_output(job: MakeJob, reference: dict[str, dict[str, str]]) -> None:
    """Before and after each file gets its name; the index comes last, and nothing is computed again."""
    made = job()
    assert run_killed(made, Hook("commit", match="assembling"), reference["compressed"]) == -signal.SIGKILL
    work = work_done(made)
    states: list[set[str]] = []
    for nth in range(1, MOST_RUNS):
        if (
            run_killed(
                made, Hook("file", nth=nth, match=f"{made.output}/", after=nth % 2 == 0), reference["compressed"]
            )
            == 0
        ):
            break
        states.append({path.name for path in made.output.iterdir() if not is_hidden(path.name)})
    assert len(states) > 8  # copied shards are placed once, everything else in every run
    assert states[-1] >= set(reference["compressed"]) - {INDEX}
    assert work_done(made) == work
    assert file_digests(made.output) == reference["compressed"]


def test_killed_between_index_and_last_entry(job: MakeJob, reference: dict[str, dict[str, str]]) -> None:
    made = job()
    assert run_killed(made, Hook("commit", match="complete"), reference["compressed"]) == -signal.SIGKILL
    published = {name: digest for name, digest in file_digests(made.output).items() if not is_hidden(name)}
    assert published == reference["compressed"]
    assert run_killed(made, Hook("commit", match="nothing"), reference["compressed"]) == 0
    assert file_digests(made.output) == reference["compressed"]


@pytest.mark.nightly
def test_killed_while_old_data_is_dropped(job: MakeJob, reference: dict[str, dict[str, str]]) -> None:
    made = job()
    runs = 0
    while run_killed(made, Hook("remove", nth=2), reference["compressed"]) != 0:
        runs += 1
        assert runs < MOST_RUNS
    assert runs >= 2
    assert file_digests(made.output) == reference["compressed"]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stop_before", "damaged"),
    [
        ("layer/00001", "statistics.zarr/layer-00001/*/*/c.*"),
        ("statistics/00001", "activations.zarr/compressed/layer-00001/*/*/c.*"),
        ("activations/00002", "staged/layer-00001.*"),
        ("dense/00002", "activations.zarr/dense/layer-00002/*/*/c.*"),
    ],
)
def test_damaged_data_is_made_again(
    stop_before: str, damaged: str, job: MakeJob, reference: dict[str, dict[str, str]]
) -> None:
    made = job(**{"statistics.keep": True})  # or a walk stores none
    assert run_killed(made, Hook("commit", match=stop_before), reference["compressed"]) == -signal.SIGKILL
    files = sorted(made.run_dir.glob(damaged))
    assert files
    flip_byte(files[0])
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert "repairing" in child.said
    assert file_digests(made.output) == reference["compressed"]


def test_damaged_layer_is_not_shipped(job: MakeJob, reference: dict[str, dict[str, str]]) -> None:
    """Found when all is computed: file and tensor are named, and that layer alone is solved again."""
    made = job()
    assert run_killed(made, Hook("commit", match="assembling"), reference["compressed"]) == -signal.SIGKILL
    staged = next(made.run_dir.glob("staged/layer-00000.*"))
    flip_byte(staged)
    child = Child("run", [str(made.manifest)], made.root / "second")
    assert child.end() == 0, child.said
    assert f"repairing: {staged}: sha256 differs" in child.said
    assert child.said.count("compress layer 0 committed") == 1
    assert file_digests(made.output) == reference["compressed"]


def flip_byte(path: Path) -> None:
    """One bit in the middle; a copy takes the file's place, so that its other names stay whole."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


# -- Ray ---------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.ray
def test_killed_with_ray_then_stopped_then_finished(
    job: MakeJob, reference: dict[str, dict[str, str]], shared_ray: None
) -> None:
    """SIGKILL to driver, Ray and workers in the middle of the walk; SIGTERM to the next; a third finishes."""
    made = job()
    pause = made.root / "pause"
    first = Child(
        "run",
        [str(made.manifest)],
        made.root / "log",
        Hook("commit", match="layer/00000", pause=str(pause)),
        inline=False,
    )
    wait_for(pause, first)
    family = psutil.Process(first.pid).children(recursive=True)
    assert sum("raylet" in process.name() for process in family) == 1
    refused = made.run()
    assert (refused.code, f"pid {first.pid}" in refused.err) == (2, True), refused
    state = command("status", str(made.run_dir), "--json").json
    assert (state["state"], state["owner"]["pid"]) == ("running", first.pid)
    assert state["layers"] == {"importance_or_statistics": 3, "compressed": 0}
    first.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert command("status", str(made.run_dir), "--json").json["state"] == "killed"

    second = Child("run", [str(made.manifest)], made.root / "second", inline=False)
    while "\nphase" not in f"\n{second.said}":
        assert second.process.is_alive(), second.said
        time.sleep(0.01)
    os.kill(second.pid, signal.SIGTERM)
    assert second.end(30) == 75, second.said
    assert "\ninterrupted" in second.said
    assert "phase importance" not in second.said
    assert not made.output.exists() or not list(made.output.iterdir())  # the killed one left a lock there

    assert made.run().code == 0
    assert file_digests(made.output) == reference["compressed"]
    assert command("status", str(made.run_dir), "--json").json["state"] == "finished"


@pytest.mark.ray
def test_the_raylet_dies(job: MakeJob, reference: dict[str, dict[str, str]]) -> None:
    """Ray's core would end the command in silence; it is said what happened, and the next run goes on."""
    made = job()
    pause = made.root / "pause"
    hook = Hook("commit", match="layer/00001", pause=str(pause))
    first = Child("run", [str(made.manifest)], made.root / "log", hook, inline=False)
    wait_for(pause, first)
    family = psutil.Process(first.pid).children(recursive=True)
    raylet = next(process for process in family if process.name() == "raylet")
    workers = [process for process in raylet.children() if process.name().startswith("ray::")]
    raylet.kill()
    psutil.wait_procs(workers, timeout=5)  # or the job could end before it is noticed
    pause.unlink()
    assert first.end() == 1, first.said
    assert "\nfailed: Ray has ended on this machine: its raylet is gone" in first.said
    state = command("status", str(made.run_dir), "--json").json
    assert (state["state"], "raylet is gone" in state["last_run"]["error"]) == ("failed", True)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    child = Child("run", [str(made.manifest)], made.root / "second")
    assert child.end() == 0, child.said
    assert "compress layer 0 committed" not in child.said
    assert file_digests(made.output) == reference["compressed"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "key"),
    [(signal.SIGTERM, "dense/00001"), (signal.SIGINT, "activations/00001"), (signal.SIGTERM, "layer/00001")],
)
def test_signals(number: signal.Signals, key: str, job: MakeJob, reference: dict[str, dict[str, str]]) -> None:
    """The command ends with exit code 75 and finishes the current commit. The next run continues behind it."""
    made = job()
    pause = made.root / "pause"
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=key, pause=str(pause)))
    wait_for(pause, child)
    os.kill(child.pid, number)
    pause.unlink()
    assert child.end(30) == 75, child.said
    assert "run the same command again" in child.said
    assert list((made.run_dir / "ledger").glob(f"{key.replace('/', '.')}.*.json"))
    assert not made.output.exists()
    assert run_killed(made, Hook("commit", match="nothing"), reference["compressed"]) == 0
    assert file_digests(made.output) == reference["compressed"]
    assert len(work_done(made)) == len(set(work_done(made)))


@pytest.mark.sample(1)
@pytest.mark.ray
@pytest.mark.parametrize("moment", ["in a forward", "with its partial sums"])
def test_worker_dies(
    moment: str, job: MakeJob, reference: dict[str, dict[str, str]], shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker process is killed; the job goes on in the same run."""
    monkeypatch.setattr(pool_health, "GATHER_SECONDS", 0.0)  # the pool is kept, not closed
    victims: list[int] = []

    class Deadly(KeptPool):
        counted = 0

        def wait(self) -> tuple[Unit, Any]:
            unit, result = super().wait()
            if isinstance(unit, Forward) and unit.moments and unit.layer == 1:
                self.counted += 1
                if not victims and self.counted == (1 if moment == "in a forward" else SHARDS):
                    self.kill_holder_of(unit.shard)
            return unit, result

        def kill_holder_of(self, shard: int) -> None:
            member = next(member for member in self.members if ("", shard) in member.shards)
            victims.append(member.where["pid"])
            os.kill(victims[0], signal.SIGKILL)

    monkeypatch.setattr(workers.pool, "RayPool", Deadly)
    made = job(**{"workers.max": 2, "workers.min": 2})
    ended = made.run()
    assert ended.code == 0, ended.err
    assert victims
    assert f"1 worker died (process {victims[0]}; " in ended.err
    assert file_digests(made.output) == reference["compressed"]


# -- another job, another driver ---------------------------------------------------------------------------------------


@pytest.fixture
def finished(job: MakeJob, tmp_path: Path, llama: Path, text: Path, inline: None) -> Job:
    """Return a finished job on copies of model and text."""
    shutil.copytree(llama, tmp_path / "model")
    shutil.copy(text, tmp_path / "own.txt")
    made = job(tmp_path / "model", **{"calibration.text": {"files": [str(tmp_path / "own.txt")]}})
    assert made.run().code == 0
    return made


def test_another_job_is_refused_by_name(finished: Job, tmp_path: Path) -> None:
    before = file_digests(finished.output)
    refused = {
        "manifest.budget.keep: 0.7 -> 0.8": ["--set", "budget.keep=0.8"],
        "manifest.seed: 3 -> 4": ["--set", "seed=4"],
        "manifest.calibration.propagate": ["--set", "calibration.propagate=dense"],
        "manifest.methods.0.basis": ["--set", "methods.0.basis=value"],
        "manifest.workers.cpus: 1 -> 2": ["--set", "workers.cpus=2"],
    }
    for name, options in refused.items():
        ended = finished.run(*options)
        assert (ended.code, name in ended.err) == (2, True), (name, ended.err)
    with (tmp_path / "own.txt").open("r+") as file:
        file.write("Nobody")
    ended = finished.run()
    assert (ended.code, "calibration_tokens" in ended.err) == (2, True), ended.err
    factories.write_text(tmp_path / "own.txt", 20_000)
    assert finished.run().json["already_finished"] is True
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    stat = shard.stat()
    flip_byte(shard)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ended = finished.run()
    assert (ended.code, f"source.{shard.name}.sha256" in ended.err) == (2, True), ended.err
    assert shard.stat().st_size == stat.st_size
    assert file_digests(finished.output) == before


def test_what_changes_no_result_is_not_refused(finished: Job, text: Path, tmp_path: Path) -> None:
    before = file_digests(finished.output)
    options = [
        "resume.every=2",
        "workers.activation_memory_gb=1",
        "statistics.keep=true",
    ]
    for option in options:
        assert finished.run("--set", option).json["already_finished"] is True, option
    with without_ray(lambda _: ()):  # which one process refuses, and a finished job does not come to
        assert finished.run("--set", "workers.max=3").json["already_finished"] is True
    (tmp_path / "model").rename(tmp_path / "moved")
    assert finished.run("--set", f"model.source={tmp_path / 'moved'}").json["already_finished"] is True
    finished.run_dir.rename(tmp_path / "elsewhere")
    moved = ["--set", f"model.source={tmp_path / 'moved'}", "--set", f"run_dir={tmp_path / 'elsewhere'}"]
    assert finished.run(*moved).json["already_finished"] is True
    shutil.copytree(tmp_path / "moved", tmp_path / "of-another")
    ended = finished.run(*moved, "--set", f"output={tmp_path / 'of-another'}")
    assert (ended.code, "holds files that Lamina did not write" in ended.err) == (2, True), ended.err
    ended = finished.run(*moved, "--set", f"output={tmp_path / 'second'}")
    assert "phase walk" not in ended.err
    assert ended.json["output"] == str(tmp_path / "second")
    assert weight_digests(tmp_path / "second") == {
        name: digest for name, digest in before.items() if name.endswith(".safetensors")
    }
    assert file_digests(finished.output) == before


@pytest.mark.nightly
def test_fresh_starts_over(finished: Job, job: MakeJob) -> None:
    before = weight_digests(finished.output)
    assert finished.run("--set", "budget.keep=0.8").code == 2
    summary = finished.run("--set", "budget.keep=0.8", "--fresh").json
    assert "already_finished" not in summary
    assert weight_digests(finished.output) != before
    clean = job(finished.source, **{**finished.changes, "budget.keep": 0.8})
    assert clean.run().code == 0
    assert weight_digests(finished.output) == weight_digests(clean.output)
    assert finished.run("--fresh").code == 0
    assert weight_digests(finished.output) == before


def test_two_at_once(job: MakeJob, tmp_path: Path, inline: None) -> None:
    """On one run directory, or on one output from two run directories: the second is told who is first."""
    made = job(methods=[{**FLAT_LLM, "mlp": False, "keep": 0.5}], budget=None)
    pause = tmp_path / "pause"
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="layer/00002", pause=str(pause)))
    wait_for(pause, child)
    started = time.monotonic()
    for options in (
        [],
        ["--set", f"run_dir={tmp_path / 'other-run'}"],
        ["--set", f"output={tmp_path / 'other-output'}"],
        ["--fresh"],
    ):
        ended = made.run(*options)
        assert (ended.code, f"pid {child.pid}" in ended.err) == (2, True), (options, ended)
    assert time.monotonic() - started < 20
    pause.unlink()
    assert child.end() == 0, child.said
    assert made.run().json["already_finished"] is True
    assert not (tmp_path / "other-output").exists()
