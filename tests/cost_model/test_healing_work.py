"""The planned work of a healing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manifests.heal import TrainingMemory, step_windows
from pipeline.cost_model.healing_work import healing_work
from pipeline.cost_model.rates import GPUS
from tests.families.geometries import LLAMA_70B, llama, manifest
from workers import cluster

GIB = 2**30


def work(**fields: Any) -> Any:
    calibration = {"text": {"files": ["-"]}, "samples": 256, "sequence_length": 4096}
    job = manifest({"method": "loss_aware"}, keep=0.8, calibration=calibration, **fields)
    return healing_work(job, llama(**LLAMA_70B), 0.8)


def test_a_70b_model() -> None:
    gpus = {"min": 1, "max": 8, "gpus": 1}
    planned = work(heal={"text": {"files": ["-"]}, "tokens": 10_000_000}, workers=gpus)
    assert planned.teacher_flops == pytest.approx(1.4e18, rel=0.1)
    assert planned.training_flops == pytest.approx(4.5e18, rel=0.15)
    assert planned.disk_bytes > 192 * 10_000_000
    h200 = GPUS["NVIDIA H200"]
    assert 16 * 0.8 * 68e9 / 8 < planned.memory_bytes(h200) < h200.device_bytes
    seconds = planned.seconds(h200, 8)
    assert sum(seconds.values()) < 7200.0
    assert seconds["heal"] > planned.training_flops / 8 / h200.backward
    alone = work(heal={"text": {"files": ["-"]}, "tokens": 10_000_000}, workers={**gpus, "max": 1})
    assert alone.memory_bytes(h200) < h200.device_bytes < 16 * 0.8 * 68e9 < alone.report(h200)["healing_host_bytes"]
    assert alone.exchanged_bytes() == 0.0
    assert alone.seconds(h200, 1)["heal"] > alone.seconds(replace(h200, device_bytes=2e12), 1)["heal"]
    rounded = work(heal={"tokens": 10_000_000}, workers=gpus, quantize={"bits": 4})
    assert rounded.memory_bytes(h200) < planned.memory_bytes(h200) / 2
    codes = work(heal={"tokens": 10_000_000, "what": "codes"}, workers=gpus, quantize={"bits": 4})
    assert codes.memory.on_device(8) > planned.memory.on_device(8), "dense weights beside the codes"
    nodes = planned.seconds(replace(h200, workers_per_node=4), 8)
    assert nodes["heal"] == pytest.approx(seconds["heal"] + planned.exchanged_bytes() / h200.network)


def test_the_calibration_text_and_texts_of_unknown_length() -> None:
    assert work() is None
    assert work(heal={"text": {"files": ["-"]}}) is None
    assert work(heal={}).tokens == 256 * 4096


@pytest.mark.parametrize(
    ("windows", "length", "epochs", "processes", "expected"),
    [
        (82, 1024, 1, 1, 1),  # a short text: each window is a step
        (82, 1024, 1, 2, 2),  # a window for each process
        (600, 1024, 1, 1, 2),
        (300, 1024, 4, 1, 4),
        (5000, 1024, 1, 1, 4),  # 4096 tokens
        (5000, 8192, 1, 1, 1),
        (5000, 2048, 1, 8, 8),
    ],
)
def test_windows_of_a_step(windows: int, length: int, epochs: int, processes: int, expected: int) -> None:
    assert step_windows(windows, length, epochs, processes) == expected


@pytest.fixture
def healed(planned: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return `healed(options of plan, **sizes of the model)`: the plan of a job that heals a Llama."""
    text = {"files": [str(tmp_path / "text.txt")]}
    calibration = {"text": text, "samples": 256, "sequence_length": 256, "propagate": "dense"}
    job = {"calibration": calibration, "heal": {"text": text, "tokens": 10_000_000}}
    return lambda *options, **sizes: planned(*options, config={**LLAMA_70B, **sizes}, **job)


def test_memory_of_a_process() -> None:
    memory = TrainingMemory(divided=160, copies=60, whole=20, gathered=5)
    assert [memory.on_device(processes) for processes in (1, 2, 4)] == [180, 105, 65]
    assert [memory.on_device(processes, offloaded=True) for processes in (1, 4)] == [25, 25]
    assert [memory.on_host(2, offloaded) for offloaded in (False, True)] == [30, 110]
    assert [memory.offloads(processes, 105) for processes in (1, 2)] == [True, False]


@pytest.mark.slow
def test_layers_that_gpus_do_not_hold_are_in_host_memory(healed: Callable[..., Any]) -> None:
    gpus = ("--gpu", "H200", "--set", "workers.gpus=1")
    several = healed(*gpus, "--set", "workers.max=8")
    assert not [said for said in [*several["limits"], *several["remarks"]] if "heal" in said]
    assert "healing_host_bytes" not in several
    alone = healed(*gpus, "--set", "workers.max=1")
    assert not [limit for limit in alone["limits"] if "heal" in limit]
    (said,) = (remark for remark in alone["remarks"] if "heal" in remark)
    assert said.startswith("heal: the GPUs do not hold the layers that train, which are in host memory, ")
    assert f"{alone['healing_host_bytes'] / 1e9:,.1f} GB for each of 1 processes" in said
    assert alone["healing_host_bytes"] > 16 * 0.8 * 68e9


@pytest.mark.slow
def test_gpus_too_small_for_the_student_are_refused_by_name(healed: Callable[..., Any]) -> None:
    found = healed("--gpu", "H200", "--set", "workers.gpus=1", "--set", "workers.max=8", vocab_size=2_500_000)
    (said,) = (limit for limit in found["limits"] if "heal" in limit)
    assert said.startswith("does not fit: heal needs ")
    assert said.endswith(
        " GB of each of 8 GPUs with the layers in host memory, and each has 141; leave out heal, or take a larger one"
    )
    assert not found["fits"]


@pytest.mark.slow
def test_memory_too_small_for_the_student_is_refused_by_name(
    healed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "get_system_memory", lambda: 4 * GIB)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 8000}
    found = healed("--tflops", "1", "--set", "workers.max=2", **sizes)
    (said,) = (limit for limit in found["limits"] if "heal" in limit)
    assert said.startswith("does not fit: heal trains in 2 processes of ")
    assert said.endswith("this machine has 4.3; leave out heal, or give --address of a cluster")


@pytest.mark.slow
def test_a_disk_too_small_for_rows_and_checkpoints(healed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = healed("--gpu", "H200")
    free = found["run_dir_bytes"] + found["healing_disk_bytes"] - 1
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert any("does not fit: run_dir takes" in limit for limit in healed("--gpu", "H200")["limits"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free + 1))
    assert not any("run_dir" in limit for limit in healed("--gpu", "H200")["limits"])
