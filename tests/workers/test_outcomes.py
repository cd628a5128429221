"""The error of a full GPU advises by the kind of unit: for a solve, the micro-batch would not help."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.units.units import Score, Solve
from workers.actor import WorkerActor
from workers.outcomes import memory_advice


def unit(kind: type) -> Any:
    return kind.__new__(kind)


def test_advice_by_unit() -> None:
    assert memory_advice(unit(Score)) == "lower calibration.micro_batch"
    assert "workers.gpus: 1" in memory_advice(unit(Solve))
    assert "micro_batch" not in memory_advice(unit(Solve))


def test_a_full_gpu_is_an_error_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.13 GiB")

    monkeypatch.setattr(Solve, "key", "solve/3/0/mlp")
    actor = WorkerActor.__new__(WorkerActor)
    actor.transfer = SimpleNamespace(emptied=list)  # type: ignore[assignment]
    actor.worker = SimpleNamespace(execute=execute, compute_seconds=0.0)  # type: ignore[assignment]
    actor.meters = SimpleNamespace(unit_done=lambda *_: None)  # type: ignore[assignment]
    actor.metering = threading.Lock()
    monkeypatch.setattr(Solve, "handles", 0)
    outcome = actor.execute(unit(Solve))
    assert str(outcome.error).startswith("solve/3/0/mlp: out of GPU memory; a solve holds one layer's moments")
    assert "Tried to allocate 6.13 GiB" in str(outcome.error)
