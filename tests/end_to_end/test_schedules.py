"""Each way through the layers behind a dense pass: killed, damaged, or on several workers, it gives the same bytes.

The plain ways, without gradients, corrections or training: `test_interruption.py`, `test_job_variants.py`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.children import Child, Hook, killed_again_and_again
from tests.end_to_end.jobs import Job, MakeJob, file_digests, work_done
from tests.end_to_end.sources import make_source
from tests.failing_disk import flip

LAYERS, SHARDS, POINTS, MOST_RUNS = 3, 2, 4, 60
DENSE: dict[str, Any] = {"calibration.propagate": "dense"}
ROUNDED: dict[str, Any] = {**DENSE, "budget.keep": 0.6, "quantize": {"bits": 4, "group": None}}
TRAINED: dict[str, Any] = {**ROUNDED, "calibration.samples": 40, "calibration.shards": 5}
LOSS_AWARE = {"method": "loss_aware"}
SCHEDULES: dict[str, dict[str, Any]] = {  # the changes of a manifest
    "gradients": {**DENSE, "methods": [LOSS_AWARE]},
    "corrected": {**ROUNDED, "methods": [{**LOSS_AWARE, "correct": "output"}]},
    "rounded": {**DENSE, "methods": [], "budget": None, "quantize": {"bits": 4, "group": None, "correct": "output"}},
    "refined": {**TRAINED, "methods": [{**LOSS_AWARE, "refine": {"steps": 15}}]},
    "refined-dense": {**TRAINED, "methods": [{**LOSS_AWARE, "refine": {"steps": 15, "inputs": "dense"}}]},
    "refined-mixed": {**TRAINED, "methods": [{**LOSS_AWARE, "refine": {"steps": 15, "inputs": "mixed"}}]},
}
REFINED = [name for name in SCHEDULES if name.startswith("refined")]


@pytest.fixture(scope="module")
def source_of(deep_llama: Path, shallow_llama: Path) -> Callable[[str], Path]:
    """Return the model of a schedule: with three layers, or with two if they are trained."""
    return lambda schedule: shallow_llama if schedule in REFINED else deep_llama


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, source_of: Callable[[str], Path], text: Path
) -> Callable[[str], Job]:
    """Return the job of a schedule after one run without an interruption."""

    @cache
    def run(schedule: str) -> Job:
        made = Job(tmp_path_factory.mktemp("whole"), source_of(schedule), text, SCHEDULES[schedule]).write()
        child = Child("run", [str(made.manifest)], made.root / "log")
        assert child.end() == 0, child.said
        return made

    return run


@pytest.fixture
def scheduled(job: MakeJob, source_of: Callable[[str], Path]) -> MakeJob:
    """Return `scheduled(schedule, **changes)`, which creates a job."""
    return lambda schedule, **changes: job(source_of(schedule), **SCHEDULES[schedule], **changes)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gradients", "corrected"])
def test_each_shard_passes_each_layer_as_often_as_it_must(schedule: str, whole: Callable[[str], Job]) -> None:
    made = whole(schedule)
    each = [(layer, shard) for layer in range(LAYERS) for shard in range(SHARDS)]
    if schedule == "gradients":
        passes = [(f"forward/dense/{layer}/{shard}/dense", f"backward/{layer}/{shard}") for layer, shard in each]
        assert sorted(work_done(made)) == sorted(unit for both in passes for unit in both)
    else:
        lines = [line for log in (made.run_dir / "logs").glob("*.units.jsonl") for line in log.read_text().splitlines()]
        done = [json.loads(line)["unit"] for line in lines]
        pairs = [f"pair/{layer}/{step}/{shard}" for layer, shard in each for step in range(POINTS)]
        onward = [f"pair/{layer}/{POINTS}/{shard}" for layer, shard in each if layer + 1 < LAYERS]
        assert sorted(unit for unit in done if unit.startswith("pair/")) == sorted(pairs + onward)
        assert len(list((made.run_dir / "staged").iterdir())) <= LAYERS, "drafts are left"


@pytest.mark.parametrize(
    "schedule", ["refined-dense", "refined-mixed", pytest.param("refined", marks=pytest.mark.nightly)]
)
def test_training_makes_no_layer_worse_and_leaves_no_scratch(schedule: str, whole: Callable[[str], Job]) -> None:
    made = whole(schedule)
    assert len(list((made.run_dir / "staged").iterdir())) <= 2, "drafts are left"
    targets = (made.run_dir / "activations.zarr").glob("targets/*/*/*")
    assert not [path for path in targets if path.is_dir()], "targets are left"
    figures = [layer["refined"] for layer in made.compression()["layers"]]
    assert all(layer["after"] <= layer["before"] for layer in figures)
    assert any(layer["kept"] for layer in figures)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("schedule", "every", "hook"),
    [
        *((schedule, every, Hook("commit", after=every == 2)) for schedule in SCHEDULES for every in (1, 2)),
        ("gradients", 1, Hook("remove", nth=3)),
    ],
)
def test_killed_again_and_again_it_ends_the_same(
    schedule: str, every: int, hook: Hook, scheduled: MakeJob, whole: Callable[[str], Job]
) -> None:
    made = scheduled(schedule, **{"resume.every": every})
    before: list[str] = []
    for run in killed_again_and_again(made, hook, MOST_RUNS):
        repeated = [unit for unit in work_done(made)[len(before) :] if unit in before]
        assert schedule != "gradients" or len(repeated) <= SHARDS * every, (run, repeated)
        before = work_done(made)
    assert run >= 3
    assert file_digests(made.output) == file_digests(whole(schedule).output)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("schedule", "kills"),
    [
        ("refined-dense", 3),
        ("refined-mixed", 3),
        *(pytest.param(schedule, 50, marks=pytest.mark.nightly) for schedule in REFINED),
    ],
)
def test_killed_in_training_it_ends_the_same(
    schedule: str, kills: int, scheduled: MakeJob, whole: Callable[[str], Job]
) -> None:
    """Half of the kills are in the first layer in training, then half in the second."""
    made = scheduled(schedule)
    for number in range(kills):
        step = 1 + 5 * number % 7 + (15 if number == kills // 2 else 0)
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("step", step))
        assert child.end() == -signal.SIGKILL, child.said
    assert Child("run", [str(made.manifest)], made.root / "log").end() == 0
    assert file_digests(made.output) == file_digests(whole(schedule).output)


@pytest.mark.sample(1)
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["statistics.zarr/layer-00001/gradient-*", "activations.zarr/inputs/layer-00001"])
def test_damage_is_repaired(kind: str, scheduled: MakeJob, whole: Callable[[str], Job]) -> None:
    """Stopped in the middle of the backward pass; then a sum of gradients, or a layer's stored input, is damaged."""
    made = scheduled("gradients")
    hook = Hook("commit", match="curves/00000" if "statistics" in kind else "gradient/00002")
    assert Child("run", [str(made.manifest)], made.root / "log", hook).end() == -signal.SIGKILL
    for path in made.run_dir.glob(f"{kind}/**/c*"):
        if path.is_file():  # names of arrays are random, and begin with a c at times
            flip(path)
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert "repairing:" in child.said
    assert file_digests(made.output) == file_digests(whole("gradients").output)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    ("schedule", "workers"),
    [
        *((schedule, workers) for schedule in SCHEDULES for workers in (2, 3)),
        *((schedule, workers) for schedule in REFINED for workers in (1, 5)),
    ],
)
def test_bytes_for_any_number_of_workers(
    schedule: str, workers: int, scheduled: MakeJob, whole: Callable[[str], Job]
) -> None:
    made = scheduled(schedule, **{"workers.max": workers, "workers.min": min(workers, 2)})
    assert made.run().code == 0
    assert file_digests(made.output) == file_digests(whole(schedule).output)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_workers_and_kills_change_no_byte_of_corrected_experts(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", layers=2)
    changes = {**DENSE, "methods": [{**LOSS_AWARE, "correct": "output"}], "quantize": {"bits": 8, "group": None}}
    one, many, killed = (job(source, **changes, **{"workers.max": n}) for n in (1, 3, 1))
    assert one.run().code == many.run().code == 0
    child = Child("run", [str(killed.manifest)], killed.root / "log", Hook("commit", nth=8))
    assert child.end() == -signal.SIGKILL, child.said
    assert killed.run().code == 0
    assert file_digests(one.output) == file_digests(many.output) == file_digests(killed.output)


@pytest.mark.nightly
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("schedule", ["gradients", "corrected"])
def test_another_budget_takes_no_dense_pass(schedule: str, scheduled: MakeJob, whole: Callable[[str], Job]) -> None:
    """Neither forwards nor backwards. Corrected layers at one size are no inputs at another."""
    made, second = scheduled(schedule), whole(schedule).root / "second"
    assert made.run("--set", "budget.keep=0.85").code == 0
    ended = made.run("--set", f"output={second}")
    assert ended.json["seconds_saved"] > 0
    assert [phase for phase in ("phase gradient", "phase statistics", "curves layer") if phase in ended.err] == []
    assert "compress layer 0 committed" in ended.err
    assert file_digests(second) == file_digests(whole(schedule).output)
