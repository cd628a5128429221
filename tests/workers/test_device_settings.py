"""Settings of a worker for its GPU, tested without one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers import actor
from workers.device_settings import configure_device, device_settings, tensor_cores


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    taken: list[float] = []
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    cudnn = torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield taken
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.allow_tf32 = cudnn
    for name, value in before.items():
        setattr(matmul, name, value)


def test_a_share_of_a_gpu_caps_the_allocator(shares: list[float]) -> None:
    configure_device(0.5)
    assert shares == [0.5]
    assert device_settings() == {
        "deterministic": "True",
        "cublas_workspace": ":4096:8",
        "tf32": "False",
        "reduced_precision": "bfloat16 False, float16 False",
    }


def test_a_whole_gpu_and_none(shares: list[float]) -> None:
    configure_device(0)
    assert device_settings()["deterministic"] == "False"
    configure_device(1)
    assert device_settings()["deterministic"] == "True"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert shares == []


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_tensor_cores_are_for_what_is_exact_in_them(shares: list[float], stored: torch.dtype) -> None:
    configure_device(1)
    with suppress(KeyError), tensor_cores(stored):
        assert device_settings()["tf32"] == str(stored != torch.float32)
        raise KeyError
    assert device_settings()["tf32"] == "False"


def test_a_worker_settles_its_device_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(actor, "map_large_tensors", lambda: None)
    monkeypatch.setattr(actor, "configure_device", called.append)
    monkeypatch.setattr("workers.worker.Worker", lambda *_: called.append("worker"))
    monkeypatch.setattr("workers.metrics.WorkerMeters", lambda *_: None)
    monkeypatch.setattr("workers.metrics.run_name", lambda _: "run")
    actor.WorkerActor(pickle.dumps(SimpleNamespace(gpu_share=0.5, threads=torch.get_num_threads())))
    assert called == [0.5, "worker"]
