"""The planned work of a healing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manifests.heal import step_windows
from manifests.schema import Manifest
from pipeline.cost_model.healing_work import HealingWork, healing_work
from pipeline.cost_model.rates import GPUS
from tests.families.geometries import LLAMA_70B, llama


def work(**fields: Any) -> HealingWork | None:
    document = {
        "version": 1,
        "model": {"source": "-"},
        "output": "-",
        "run_dir": "-",
        "methods": [{"method": "loss_aware"}],
        "budget": {"keep": 0.8},
        "calibration": {"text": {"files": ["-"]}, "samples": 256, "sequence_length": 4096},
        **fields,
    }
    return healing_work(Manifest.model_validate(document), llama(**LLAMA_70B), 0.8, 2)


def test_a_70b_model() -> None:
    gpus = {"min": 1, "max": 8, "gpus": 1}
    planned = work(heal={"text": {"files": ["-"]}, "tokens": 10_000_000}, workers=gpus)
    assert planned is not None
    assert planned.teacher_flops == pytest.approx(1.4e18, rel=0.1)
    assert planned.training_flops == pytest.approx(4.5e18, rel=0.15)
    assert planned.disk_bytes > 192 * 10_000_000
    h200 = GPUS["NVIDIA H200"]
    assert 16 * 0.8 * 68e9 / 8 < planned.memory_bytes < h200.device_bytes
    seconds = planned.seconds(h200, 8)
    assert sum(seconds.values()) < 7200.0
    assert seconds["heal"] > planned.training_flops / 8 / h200.backward
    alone = work(heal={"text": {"files": ["-"]}, "tokens": 10_000_000}, workers={**gpus, "max": 1})
    assert alone is not None
    assert alone.memory_bytes > 16 * 0.8 * 68e9
    assert alone.exchanged_bytes == 0.0
    rounded = work(heal={"tokens": 10_000_000}, workers=gpus, quantize={"bits": 4})
    assert rounded is not None
    assert rounded.memory_bytes < planned.memory_bytes / 2
    codes = work(heal={"tokens": 10_000_000, "what": "codes"}, workers=gpus, quantize={"bits": 4})
    assert codes is not None
    assert codes.memory_bytes > planned.memory_bytes, "dense weights beside the codes"
    nodes = planned.seconds(replace(h200, workers_per_node=4), 8)
    assert nodes["heal"] == pytest.approx(seconds["heal"] + planned.exchanged_bytes / h200.network)


def test_the_calibration_text_and_texts_of_unknown_length() -> None:
    assert work() is None
    assert work(heal={"text": {"files": ["-"]}}) is None
    planned = work(heal={})
    assert planned is not None
    assert planned.tokens == 256 * 4096


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
