"""A job on a cluster as an operator starts it, seen through the port that Prometheus scrapes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray._raylet import GcsClient

from pipeline.reporting.unit_log import SUFFIX
from tests.end_to_end.clusters import ENVIRONMENT, free_port, head_node
from tests.end_to_end.jobs import Job
from workers.metrics import DEATHS, ERRORS, OF_THE_POOL, OF_WORKERS, RETRIES

pytestmark = pytest.mark.ray
WAIT_S = 270.0
OFTEN_S = 0.5
ONLY_WHEN_WRONG = (DEATHS, ERRORS, RETRIES)
Series = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """(address, where to scrape) of a cluster that reports several times a second instead of every ten seconds."""
    port = free_port()
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "300")
    with head_node(2, f"--metrics-export-port={port}") as address:
        yield address, f"http://127.0.0.1:{port}/metrics"


@pytest.mark.nightly
def test_every_metric_is_scraped(cluster: tuple[str, str], job: Callable[..., Job]) -> None:
    address, metrics = cluster
    made = job(**{"workers": {"min": 1, "max": 2}, "calibration.samples": 96, "calibration.micro_batch": 1})
    command = [sys.executable, "-m", "pipeline.run", str(made.manifest), "--address", address]
    highest: dict[Series, float] = {}
    deadline = time.monotonic() + WAIT_S
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": {**os.environ, **ENVIRONMENT}}
    with subprocess.Popen(command, text=True, **options) as running:
        while running.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(OFTEN_S)
            for series, value in scrape(metrics).items():
                highest[series] = max(value, highest.get(series, value))
        assert running.returncode == 0, running.stderr and running.stderr.read()
    names = {name for name, _ in highest}
    expected = {f"ray_{metric.name}" for metric in (*OF_WORKERS, *OF_THE_POOL) if metric not in ONLY_WHEN_WRONG}
    assert {re.sub("lamina_unit_seconds$", "lamina_unit_seconds_bucket", name) for name in expected} <= names
    assert {dict(labels)["run"] for _, labels in highest} == {made.run_dir.name}
    done: dict[tuple[str, str], float] = defaultdict(float)
    for (name, labels), value in highest.items():
        done[name, dict(labels).get("kind", "")] += value  # of all workers
    (log,) = (made.run_dir / "logs").glob(f"*{SUFFIX}")
    units = [json.loads(line) for line in log.read_text().splitlines()]
    counts = Counter(unit["kind"] for unit in units)
    assert {kind for name, kind in done if name == "ray_lamina_units_total"} >= counts.keys()
    for kind in ("checkgrids", "solve", "write"):  # forward passes are made for held-out text, too
        computing = sum(unit["compute_seconds"] for unit in units if unit["kind"] == kind)
        assert 0 < done["ray_lamina_units_total", kind] <= counts[kind]
        assert done["ray_lamina_compute_seconds_total", kind] <= computing * (1 + 1e-6)
    assert done["ray_lamina_tokens_total", "forward"] > 0
    assert done["ray_lamina_read_bytes_total", ""] > 100_000
    (told,) = [dict(info.config.metadata) for info in GcsClient(address=address).get_all_job_info().values()]
    assert told | {"lamina": made.run_dir.name, "output": str(made.output), "methods": "flat_llm"} == told


def scrape(address: str) -> dict[Series, float]:
    """Lamina's metrics as they are now; none while nobody answers yet."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "lamina" in sample.name
    }
