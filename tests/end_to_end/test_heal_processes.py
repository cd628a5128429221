"""Healing in several processes of Ray Train equals one process within rounding, and survives kills."""

from __future__ import annotations

import json
import math
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import pipeline.healing.training
import pipeline.healing.training_process
import pipeline.job.healing
import pipeline.job.student_training
from manifests.entries import HealingEntry
from pipeline.healing.processes import local
from pipeline.healing.student import Student
from pipeline.healing.training_process import TrainingJournal, TrainingTask, train
from stores.bucket import Bucket
from stores.disk import Disk
from tests import buckets, factories
from tests.encoders import encode_model
from tests.end_to_end.children import CONTEXT, Child, end_group, many_checkpoints, small_steps
from tests.end_to_end.clusters import head_node, loopback, private_node
from tests.end_to_end.jobs import (
    Job,
    Sweep,
    command,
    file_digests,
    read_tensors,
    take_small_steps,
    weight_digests,
    without_ray,
)

WAIT_S = 300.0
SETTINGS = ("--set", "heal.epochs=8")


def on_loopback() -> None:
    """Make small steps in a child that joins a cluster on loopback."""
    small_steps()
    loopback()


def many_checkpoints_on_loopback() -> None:
    """Make such steps in a child that joins a cluster on loopback."""
    many_checkpoints()
    loopback()


JOBS: dict[str, dict[str, Any]] = {
    "uniform": {"quantize": {"bits": 4, "levels": "uniform"}},
    "normal": {"quantize": {"bits": 4, "levels": "normal"}},
    "head": {"quantize": {"bits": 4, "levels": "uniform", "what": "all"}},
    "head-normal": {"quantize": {"bits": 4, "levels": "normal", "what": "all"}},
    "mla": {"methods": [{"method": "mla", "cache_keep": 0.5}], "budget": None, "calibration.propagate": "dense"},
    "mixture": {"methods": [{"method": "svd", "keep": 0.5}], "budget": None, "calibration.propagate": "dense"},
    "fp8": {"methods": [{"method": "svd", "keep": 0.5, "layers": [0]}], "budget": None},
}


OTHERS = ("normal", "head", "head-normal", "mla", "mixture", "fp8")


@pytest.fixture(params=["uniform"])
def solved(request: pytest.FixtureRequest, tmp_path: Path, text: Path) -> Job:
    """Return a finished job. The head of its model is its embedding, unless it is rounded. A mixture has more experts
    than the windows of one process in a step have tokens for."""
    tied = "head" not in request.param
    family, experts = ("mixtral", {"num_local_experts": 24}) if request.param == "mixture" else ("llama", {})
    source = factories.make_model(tmp_path / "source", family, num_hidden_layers=2, tie_word_embeddings=tied, **experts)
    if request.param == "fp8":
        source, _ = encode_model(source, tmp_path, "fp8 blocks")
    made = Job(tmp_path / "job", source, text, JOBS[request.param])
    with without_ray():
        assert made.run().json
    made.keep()
    return made


def heal(made: Job, *more: str, processes: int = 2, prepare: Callable[[], None] = small_steps) -> Child:
    options = [*SETTINGS, "--set", f"workers.max={processes}", *more]
    return Child("heal", [str(made.run_dir), *options], made.root / "log", None, False, prepare)


def ended(child: Child) -> str:
    assert child.end(WAIT_S) == 0, child.said
    end_group(child.pid)
    return child.said


def wait_for_line(child: Child, line: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while line not in child.said:
        assert child.process.is_alive(), child.said
        assert time.monotonic() < deadline, child.said
        time.sleep(0.05)


def kill_in_training(child: Child) -> None:
    """Kill a command and its processes after the sixth step of its healing."""
    wait_for_line(child, "heal step 6 of 16")
    child.kill()
    end_group(child.pid)
    assert child.process.exitcode == -signal.SIGKILL


def training_processes(child: Child) -> list[psutil.Process]:
    """Return the processes in which Ray Train trains."""
    return [each for each in psutil.Process(child.pid).children(recursive=True) if "RayTrainWorker" in each.name()]


@dataclass
class Written:
    """A journal that keeps the last checkpoint in a file."""

    path: Path

    def last(self) -> None:
        """Return None: each training begins at the start."""

    def say(self, line: str) -> None:
        pass

    def step(self, *_: float) -> bool:
        return False

    def enter(self, entry: HealingEntry) -> None:
        self.path.write_bytes(pickle.dumps(entry))


class MeasuredStudent(Student):
    """A student that writes how many numbers of its layers this process holds, and how many there are."""

    folder: Path

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        layers = [(name, each) for name, each in self.model.named_parameters() if ".layers." in name]
        held = {name: (local(each).numel(), each.numel()) for name, each in layers}
        (self.folder / f"held-{arguments[-1].rank}").write_text(json.dumps(held))


def train_one(task: TrainingTask, rank: int, folder: Path, offloads: bool) -> None:
    """Be one of two processes that gloo joins. `offloads`: FSDP keeps the layers in host memory."""
    torch.set_num_threads(1)
    pipeline.healing.training_process._offloads = lambda *_: offloads
    MeasuredStudent.folder = folder
    pipeline.healing.training_process.Student = MeasuredStudent  # type: ignore[misc]
    torch.distributed.init_process_group("gloo", f"file://{folder}/joined", rank=rank, world_size=2)
    train(task, Written(folder / "entry"), math.inf)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("solved", "offloads"),
    [
        ("uniform", False),
        *(pytest.param(name, False, marks=pytest.mark.nightly) for name in OTHERS),
        *(pytest.param(name, True, marks=pytest.mark.nightly) for name in ("head", "mixture")),
    ],
    indirect=["solved"],
)
def test_two_processes_heal_as_one_does(
    solved: Job, offloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_two(task: TrainingTask, journal: TrainingJournal, _: float) -> None:
        both = [CONTEXT.Process(target=train_one, args=(task, rank, tmp_path, offloads)) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join(WAIT_S)
            assert process.exitcode == 0
        journal.enter(pickle.loads((tmp_path / "entry").read_bytes()))

    take_small_steps(monkeypatch)
    with without_ray():
        assert command("heal", str(solved.run_dir), *SETTINGS).code == 0
        one, figures = read_tensors(solved.output), solved.compression()["healed"]
        solved.put_back()
        monkeypatch.setattr(pipeline.healing.training_process, "train", train_two)
        assert command("heal", str(solved.run_dir), *SETTINGS).code == 0
    assert not (solved.run_dir / "healing").exists()
    assert_close(solved, one, figures)
    held = [json.loads((tmp_path / f"held-{rank}").read_text()) for rank in range(2)]
    assert held[0].keys() == held[1].keys()
    for name, (numbers, of) in held[0].items():
        assert numbers + held[1][name][0] == of, name
        assert numbers < of or of < 2, name


@pytest.mark.nightly
@pytest.mark.ray
def test_two_processes_of_ray_train_heal_as_one_does(solved: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    take_small_steps(monkeypatch)
    with without_ray():
        assert command("heal", str(solved.run_dir), *SETTINGS).code == 0
    one, figures = read_tensors(solved.output), solved.compression()["healed"]
    solved.put_back()
    said = ended(heal(solved))
    assert "processes: 2" in said
    assert_close(solved, one, figures)


def assert_close(made: Job, one: dict[str, torch.Tensor], figures: dict[str, Any]) -> None:
    """Compare a healing with that of one process. Adam's steps have a size of their own, even of tiny gradients, so
    that rounding shows in single numbers."""
    two = made.compression()["healed"]
    assert [step for step, _ in two["curve"]] == [step for step, _ in figures["curve"]]
    assert two["after"] < two["before"]
    assert two["after"] == pytest.approx(figures["after"], rel=1e-2)
    for name, tensor in read_tensors(made.output).items():
        before, after = one[name].double(), tensor.double()
        assert (after - before).norm() <= 0.02 * before.norm(), name


@pytest.mark.nightly
@pytest.mark.ray
def test_a_killed_process_costs_the_steps_since_the_last_checkpoint(solved: Job) -> None:
    ended(heal(solved))
    digests = file_digests(solved.output)
    solved.put_back()
    child = heal(solved, prepare=many_checkpoints)
    wait_for_line(child, "heal step 6 of 16")
    training_processes(child)[1].kill()
    assert "resuming after step" in ended(child)
    assert file_digests(solved.output) == digests


@pytest.mark.nightly
@pytest.mark.ray
def test_after_a_kill_another_number_of_processes_goes_on(solved: Job) -> None:
    child = heal(solved, prepare=many_checkpoints)
    kill_in_training(child)
    said = ended(heal(solved, processes=1))
    assert "processes: 1" in said
    assert "resuming after step" in said
    figures = solved.compression()["healed"]
    assert figures["after"] < figures["before"]
    assert figures["steps"] == 16


@pytest.mark.nightly
@pytest.mark.ray
def test_a_process_on_each_of_two_nodes(solved: Job) -> None:
    ended(heal(solved))
    digests = file_digests(solved.output)
    solved.put_back()
    with head_node(1) as address, private_node(address, 1, solved.root.parent):
        said = ended(heal(solved, "--address", address, prepare=on_loopback))
    assert "processes: 2" in said
    assert file_digests(solved.output) == digests


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(600)  # Ray Train starts twice, and waits between
def test_after_a_lost_node_the_processes_that_have_room_go_on(solved: Job) -> None:
    with head_node(1, "--include-dashboard=false") as address:
        with private_node(address, 1, solved.root.parent):
            waits = ("--set", "workers.start_timeout_s=40")
            child = heal(solved, "--address", address, *waits, prepare=many_checkpoints_on_loopback)
            wait_for_line(child, "heal step 6 of 16")
        said = ended(child)
    assert "processes: 2" in said
    assert "room for 1, which go on" in said
    assert "resuming after step" in said
    figures = solved.compression()["healed"]
    assert figures["after"] < figures["before"]
    assert figures["steps"] == 16


@pytest.mark.nightly
@pytest.mark.ray
def test_a_sweep_killed_in_a_training_goes_on(tmp_path: Path, text: Path) -> None:
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    point = {"methods": [{"method": "flat_llm"}], "save": "all"}
    heal = {"epochs": 8, "learning_rate": 0.003}
    whole, killed = (
        Sweep(Job(tmp_path / name, source, text), [point], heal=heal, keep=[0.7], workers={"max": 2}) for name in "ab"
    )

    def started(sweep: Sweep, prepare: Callable[[], None]) -> Child:
        return Child("sweep", [str(sweep.write())], sweep.job.root / "log", None, False, prepare)

    ended(started(whole, small_steps))
    child = started(killed, many_checkpoints)
    kill_in_training(child)
    before = len(child.said)
    said = ended(started(killed, many_checkpoints))[before:]
    assert "resuming after step" in said
    assert "score teacher" not in said
    one, other = (weight_digests(sweep.job.output / "flat_llm-0.7") for sweep in (whole, killed))
    assert one == other


@pytest.mark.nightly
@pytest.mark.ray
def test_a_job_in_a_bucket_killed_in_a_training_goes_on(tmp_path: Path, text: Path, s3_bucket: str) -> None:
    source = factories.make_model(tmp_path / "source", num_hidden_layers=2)
    buckets.put_inputs(s3_bucket, source, text)
    heals = {"heal": {"epochs": 8, "learning_rate": 0.003}, "workers.max": 2}
    local, remote = (Job(tmp_path / name, source, text, heals).write() for name in ("local", "remote"))
    remote.changes = {**heals, **buckets.job_places(s3_bucket)}
    ended(Child("run", [str(local.manifest)], local.root / "log", None, False, small_steps))
    start = partial(Child, "run", [str(remote.write().manifest)], remote.root / "log", None, False, many_checkpoints)
    child = start()
    kill_in_training(child)
    said = ended(start())
    assert "resuming after step" in said
    assert buckets.digests(Bucket(f"{s3_bucket}/output")) == buckets.digests(Disk(local.output))
