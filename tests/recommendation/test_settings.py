"""Settings follow from the memory of the machines: fewer workers first, then fewer hidden states, shorter samples."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.recommendation.nodes import Node, worker_sizes
from pipeline.recommendation.settings import Goal, Settings, choose_settings
from pipeline.recommendation.text_use import TextUse

GIB = 2.0**30
TEXT = TextUse(end=0.9, length=2048, samples=256, available=1 << 20)
CPU_NODE = Node(cores=16, gpus=0, memory_bytes=64 * GIB)
GPU_NODE = Node(cores=64, gpus=8, memory_bytes=1000 * GIB)


def chosen(nodes: list[Node], worker_gib: float) -> Settings:
    """Settings for workers that need this memory, half of it with little memory for hidden states, less with short
    samples."""

    def plan(settings: Settings) -> Any:
        share = 1.0 if settings.activation_gb == 8.0 else settings.text.length / 4096
        return SimpleNamespace(worker_host_bytes=worker_gib * GIB * share)

    return choose_settings(TEXT, nodes, plan)


@pytest.mark.parametrize(
    ("nodes", "worker_gib", "workers", "cpus", "gpus", "activation_gb", "length"),
    [
        ([CPU_NODE], 1, 8, 2, 0, 8.0, 2048),
        ([CPU_NODE], 20, 3, 2, 0, 8.0, 2048),  # what fits of eight
        ([CPU_NODE] * 3, 1, 24, 2, 0, 8.0, 2048),
        ([CPU_NODE], 100, 1, 16, 0, 1.0, 2048),
        ([CPU_NODE], 200, 1, 16, 0, 1.0, 1024),
        ([CPU_NODE], 9999, 1, 16, 0, 1.0, 512),  # nothing fits: what needs least
        ([GPU_NODE], 40, 8, 8, 1, 8.0, 2048),
        ([GPU_NODE] * 2, 300, 6, 8, 1, 8.0, 2048),
        ([replace(CPU_NODE, cores=1)], 1, 1, 1, 0, 8.0, 2048),
    ],
)
def test_memory_decides(
    nodes: list[Node], worker_gib: float, workers: int, cpus: int, gpus: int, activation_gb: float, length: int
) -> None:
    settings = chosen(nodes, worker_gib)
    assert (settings.workers, settings.cpus, settings.gpus) == (workers, cpus, gpus)
    assert (settings.activation_gb, settings.text.length) == (activation_gb, length)
    assert settings.shards >= settings.workers
    assert 1 <= settings.micro_batch <= settings.text.samples // settings.shards


def test_sizes_of_workers() -> None:
    assert worker_sizes([CPU_NODE]) == [(2, 0), (4, 0), (8, 0), (16, 0)]
    assert worker_sizes([replace(CPU_NODE, cores=3), CPU_NODE]) == [(1, 0), (3, 0)]
    assert worker_sizes([GPU_NODE]) == [(8, 1)]


@pytest.mark.parametrize(
    ("goal", "corrected", "label"),
    [
        (Goal("keep", 0.81), False, "keep-0.81"),
        (Goal("keep", 0.8), True, "keep-0.8"),
        (Goal("keep", 0.8, mixture=True), False, "keep-0.8"),
        (Goal("keep", 0.79, mixture=True), True, "keep-0.79"),
        (Goal("bytes", 0.25), True, "bytes-0.25"),
        (Goal("max_loss", 0.02), False, "max-loss-0.02"),
    ],
)
def test_corrections(goal: Goal, corrected: bool, label: str) -> None:
    assert (goal.corrected, goal.label) == (corrected, label)
