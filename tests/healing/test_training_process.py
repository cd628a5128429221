"""The processes of a training: where their layers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.errors import InputError
from manifests.heal import TrainingMemory
from pipeline.healing import training_process
from pipeline.healing.processes import Processes

GB = 10**9
MEMORY = TrainingMemory(divided=160 * GB, copies=60 * GB, whole=20 * GB, gathered=5 * GB)


@pytest.fixture
def offloads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `offloads(GB of a GPU, GB of host memory, processes, lines said)`."""

    def decide(device: int, host: int, processes: int, said: list[str]) -> bool:
        found = SimpleNamespace(total_memory=device * GB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        task: Any = SimpleNamespace(use_gpu=device > 0, memory=MEMORY)
        return training_process._offloads(task, Processes(0, processes), host * GB, said.append)

    return decide


def test_layers_are_in_host_memory_if_the_gpu_does_not_hold_them(offloads: Any) -> None:
    said: list[str] = []
    assert not offloads(0, 1, 1, said), "a CPU has one memory"
    assert not offloads(180, 1, 1, said)
    assert not offloads(105, 1, 2, said)
    assert not said
    assert offloads(179, 220, 1, said)
    assert offloads(104, 110, 2, said)
    needs = [("180.0 GB of its GPU, which has 179.0", "220.0 GB"), ("105.0 GB of its GPU, which has 104.0", "110.0 GB")]
    for line, (gpu, host) in zip(said, needs, strict=True):
        place = f"weights, gradients and moments of the layers are in {host} of host memory"
        assert line == f"heal: a process needs {gpu}: {place}"


@pytest.mark.parametrize(
    ("device", "host", "said"),
    [
        (24, 500, "heal needs 25 GB of each of 1 GPUs with the layers in host memory, and each has 24; leave out heal"),
        (
            80,
            219,
            "heal needs 220.0 GB of host memory for each of 1 processes, since their GPUs do not hold the layers, and "
            "there are 219.0; raise workers.max",
        ),
    ],
)
def test_what_fits_neither_is_refused_by_name(device: int, host: int, said: str, offloads: Any) -> None:
    with pytest.raises(InputError, match=said):
        offloads(device, host, 1, [])
