"""Metrics of a job, with a stand-in for Ray's metrics; `tests/end_to_end/test_submitted.py` has Ray's."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util import metrics as ray_metrics

from manifests.errors import NumericsError
from manifests.schema import Workers
from pipeline.units.units import Forward, ShardDone, Unit
from tests.workers.fake_ray import FakeRay, Watch
from workers import metrics as names
from workers import pool as pool_module
from workers.metrics import OF_THE_POOL, OF_WORKERS, Meters, Metric, PoolMeters, WorkerMeters, run_name
from workers.outcomes import Outcome
from workers.pool import RayPool


class Recorder:
    """`ray.util.metrics`: keeps sums of counters, the last of gauges, and all that a histogram sees."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, ...], float] = defaultdict(float)
        self.last: dict[tuple[str, ...], float] = {}
        self.seen: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def Counter(self, name: str, _: str, tags: tuple[str, ...]) -> Any:  # noqa: N802 - Ray's name
        return Recorded(self, name, tags)

    Gauge = Counter

    def Histogram(self, name: str, _: str, boundaries: list[float], tags: tuple[str, ...]) -> Any:  # noqa: N802
        assert boundaries == sorted(boundaries)
        return Recorded(self, name, tags)


class Recorded:
    """One metric. Fails on tags that were not declared, as Ray does."""

    def __init__(self, recorder: Recorder, name: str, tags: tuple[str, ...]) -> None:
        self.recorder, self.name, self.tags = recorder, name, tags
        self.default: dict[str, str] = {}

    def set_default_tags(self, tags: dict[str, str]) -> Recorded:
        self.default = tags
        return self

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        given = {**self.default, **tags}
        assert given.keys() == set(self.tags), f"{self.name}: {given}"
        return (self.name, *(given[tag] for tag in self.tags))

    def inc(self, amount: float, tags: dict[str, str]) -> None:
        assert amount > 0
        self.recorder.sums[self._key(tags)] += amount

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.recorder.last[self._key(tags)] = value

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self.recorder.seen[self._key(tags)].append(value)


@pytest.mark.parametrize("metric", [*OF_WORKERS, *OF_THE_POOL], ids=lambda metric: metric.name)
def test_names_are_prometheus_ones(metric: Metric) -> None:
    assert re.fullmatch(r"lamina_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "Counter")
    assert metric.description.endswith(".")
    assert not {"run", "job"} & set(metric.tags)


def test_every_metric_is_somebody_s() -> None:
    declared = {value for value in vars(names).values() if isinstance(value, Metric)}
    assert declared == {*OF_WORKERS, *OF_THE_POOL}
    assert len({metric.name for metric in declared}) == len(declared)


def test_a_worker_counts_its_units(tmp_path: Any) -> None:
    recorder = Recorder()
    meters = WorkerMeters(recorder, "keep80")
    (tmp_path / "read").write_bytes(b"x" * 300_000)
    assert len((tmp_path / "read").read_bytes()) == 300_000
    (tmp_path / "written").write_bytes(b"x" * 200_000)
    done = ShardDone(tokens=64, cosine=(0.0, 1), partials={}, activation=None)
    meters.unit_done(Forward("dense", 3, 1), Outcome(done, None, seconds=2.0, compute_seconds=1.5, peak_bytes=7))
    meters.unit_done(Forward("dense", 4, 1), Outcome(done, None, seconds=3.0, compute_seconds=0.5, peak_bytes=9))
    failed = Outcome(None, NumericsError("NaN"), seconds=1.0, compute_seconds=0.0, peak_bytes=9)
    meters.unit_done(Forward("dense", 5, 1), failed)
    of_forward = ("keep80", "forward")
    assert recorder.sums["lamina_units_total", *of_forward] == 3
    assert recorder.sums["lamina_unit_errors_total", *of_forward] == 1
    assert recorder.sums["lamina_tokens_total", *of_forward] == 128
    assert recorder.sums["lamina_compute_seconds_total", *of_forward] == 2.0
    assert recorder.seen["lamina_unit_seconds", *of_forward] == [2.0, 3.0, 1.0]
    assert recorder.last["lamina_worker_peak_bytes", "keep80"] == 9
    assert 300_000 <= recorder.sums["lamina_read_bytes_total", "keep80"] < 600_000
    assert 500_000 <= recorder.sums["lamina_written_bytes_total", "keep80"] < 700_000


@pytest.mark.parametrize(
    ("folder", "name"), [("keep 80", "keep 80"), ("läuft/größe-模型", "gr%C3%B6%C3%9Fe-%E6%A8%A1%E5%9E%8B")]
)
def test_a_run_directory_may_have_any_name(folder: str, name: str) -> None:
    """Ray takes tags in ASCII alone."""
    setup: Any = SimpleNamespace(manifest=SimpleNamespace(run_dir=f"/data/{folder}/"))
    assert run_name(setup) == name
    Meters(ray_metrics, OF_WORKERS, run_name(setup)).add(names.READ)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`watched(fake)`: a pool of two on it, and what it tells."""

    def make(fake: FakeRay) -> tuple[RayPool, Recorder]:
        recorder = Recorder()
        monkeypatch.setattr(pool_module, "watch_ray", lambda _: Watch())
        monkeypatch.setattr(pool_module, "ray", fake)
        monkeypatch.setattr(pool_module, "metrics", recorder)
        manifest = SimpleNamespace(run_dir="/data/runs/keep80")
        setup: Any = SimpleNamespace(shards=8, hardware=None, manifest=manifest, memory_bytes=0)
        return RayPool(setup, Workers(min=2, max=2), threading.Event(), lambda _: None), recorder

    return make


def test_the_pool_counts_workers_and_deaths(watched: Any) -> None:
    pool, recorder = watched(FakeRay((0, 5, 7), (0, 1, None)))
    units: list[Unit] = [Forward("dense", 0, shard) for shard in range(8)]
    for unit in units:
        pool.submit(unit)
    pool.wait()
    time.sleep(0.01)
    pool.wait()
    assert 0.01 <= recorder.last["lamina_longest_unit_seconds", "keep80"] < 60
    for _ in units[2:]:
        pool.wait()
    assert recorder.sums["lamina_worker_deaths_total", "keep80"] == 1
    assert 1 <= recorder.sums["lamina_units_retried_total", "keep80"] <= pool_module.DEPTH
    assert recorder.last["lamina_workers", "keep80", "wanted"] == 2
    assert 1 <= recorder.last["lamina_workers", "keep80", "ready"] <= 2
    assert recorder.last["lamina_units_waiting", "keep80"] == 0


def test_progress_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 107.0, 108.0])
    monkeypatch.setattr(names.time, "monotonic", lambda: next(clock))
    recorder = Recorder()
    meters = PoolMeters(recorder, "keep80")
    meters.progress("importance", 3, 12)
    meters.progress("importance", 6, 12)
    meters.progress("walk", 0, 0)
    assert recorder.sums["lamina_phase_seconds_total", "keep80", "importance"] == 7.0
    assert recorder.sums["lamina_phase_seconds_total", "keep80", "walk"] == 1.0
    assert recorder.last["lamina_phase_progress", "keep80", "importance"] == 0.5
    assert recorder.last["lamina_phase_progress", "keep80", "walk"] == 0.0
