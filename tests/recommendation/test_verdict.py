"""The plan of a recommended job in five lines."""

from __future__ import annotations

from typing import Any

from pipeline.recommendation.settings import Goal
from pipeline.recommendation.verdict import Verdict

PLAN: dict[str, Any] = {
    "limits": [], "workers": 2, "worker_host_bytes": 3e9, "worker_device_bytes": 0, "driver_peak_bytes": 5e8,
    "source_bytes": 1000, "output_bytes": 800, "run_dir_bytes": 2e6, "estimated_seconds": 90.0,
    "phases": {"statistics": 60.0, "compress": 30.0},
}  # fmt: skip


def lines(field: str = "keep", **changes: Any) -> list[str]:
    goal = Goal(field, 0.8)  # type: ignore[arg-type]  # one of its fields
    return list(Verdict({**PLAN, **changes}, goal, ["transformers", "vLLM"]).lines())


def test_a_job_that_fits() -> None:
    fits, size, time, disk, serves = lines()
    assert fits == "fits   2 workers with 3 GB of memory each, and a driver with 500 MB"
    assert size.endswith("1 kB before, at most 800 bytes after (0.80)")
    assert time.startswith("time   about ")
    assert disk == "disk   800 bytes for the output, 2 MB for the run directory"
    assert serves == "serves transformers, vLLM"


def test_limits_come_in_place_of_the_fit() -> None:
    assert lines(limits=["too small", "too slow"])[:2] == ["too small", "too slow"]


def test_a_gpu_is_named() -> None:
    assert "3 GB of memory and 40 GB of a GPU each" in lines(worker_device_bytes=4e10)[0]


def test_a_goal_by_loss_has_no_size_yet() -> None:
    assert lines("max_loss")[1] == "size   1 kB before; after, the smallest within the loss"


def test_an_output_that_is_no_smaller_gets_advice() -> None:
    assert "no smaller: `--bytes" in lines(output_bytes=1200)[1]
