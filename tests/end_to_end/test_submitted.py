"""Jobs on a cluster as an operator starts it: submitted, and scraped."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray._raylet import GcsClient
from ray.job_submission import JobStatus, JobSubmissionClient

from manifests import VERSION
from pipeline.reporting.unit_log import SUFFIX
from tests.end_to_end.clusters import ENVIRONMENT, free_port, head_node, private_node, ray_command
from tests.end_to_end.jobs import Job, file_digests
from workers.metrics import DEATHS, ERRORS, OF_THE_POOL, OF_WORKERS, RETRIES

LAYERS = 3  # of the fixture `llama`

pytestmark = pytest.mark.ray

WAIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, str]]:
    """Yield the address of a cluster of one CPU, and of its dashboard, to which jobs are submitted."""
    port = free_port()
    with head_node(1, "--include-dashboard=true", f"--dashboard-port={port}") as address:
        dashboard = f"http://127.0.0.1:{port}"
        await_jobs(dashboard)
        yield address, dashboard


def await_jobs(dashboard: str) -> None:
    """Wait for the agent that starts jobs, which starts after the dashboard."""
    deadline = time.monotonic() + WAIT_S
    while not takes_jobs(dashboard):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def takes_jobs(dashboard: str) -> bool:
    """Return True if a job can be submitted."""
    try:
        JobSubmissionClient(dashboard).submit_job(entrypoint="true")
    except (ConnectionError, RuntimeError):
        return False
    return True


def ray_job(dashboard: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ray job ARGUMENTS`."""
    command = ray_command("job", *arguments[:1], f"--address={dashboard}", *arguments[1:])
    return subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": ""}, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_submitted_stopped_and_submitted_again(cluster: tuple[str, str], job: Callable[..., Job], inline: None) -> None:
    _, dashboard = cluster
    settings = {"calibration.samples": 150, "calibration.micro_batch": 1}
    made, alone = job(**settings), job(**settings)
    assert alone.run().code == 0
    command = ("python", "-m", "pipeline.run", str(made.manifest))
    client, deadline = JobSubmissionClient(dashboard), time.monotonic() + WAIT_S  # `ray job` itself takes seconds
    client.submit_job(entrypoint=shlex.join(command), submission_id="first")
    while not list((made.run_dir / "ledger").glob("dense*")):
        assert time.monotonic() < deadline, client.get_job_logs("first")
        time.sleep(0.05)
    assert client.stop_job("first")
    while not client.get_job_status("first").is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs("first")
        time.sleep(0.2)
    assert client.get_job_status("first") == JobStatus.STOPPED
    assert not made.output.exists()
    assert "run the same command again to resume" in client.get_job_logs("first")

    done = ray_job(dashboard, "submit", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"output: {made.output}" in done.stdout + done.stderr
    assert file_digests(made.output) == file_digests(alone.output)


def test_a_token_is_missing(job: Callable[..., Job], tmp_path: Path) -> None:
    """Known before a connection is tried."""
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "pipeline.run", str(job().manifest), "--address", "127.0.0.1:9"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "no authentication token was found" in ended.stderr
    assert "Traceback" not in ended.stderr


NOT_INSTALLED = """# Drops what finds an installed Lamina, or one in another folder.
import sys
from pathlib import Path
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
here = Path(__file__).resolve().parent
sys.path[:] = [
    entry for entry in sys.path
    if Path(entry).resolve() == here or not any(Path(entry, name).is_dir() for name in ("manifests", "lamina"))
]
"""


def checkout_copy(folder: Path) -> Path:
    """Copy the packages of this checkout, with a version of their own; processes that run there find no others."""
    for name in ("manifests", "pipeline", "stores", "workers", "deploy/serving/lamina"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    stamped = folder / "manifests" / "__init__.py"
    stamped.write_text(stamped.read_text().replace(f'VERSION = "{VERSION}"', f'VERSION = "{VERSION}+brought"'))
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    return folder


@pytest.mark.nightly
def test_a_checkout_reaches_a_node_with_another_temporary_folder(
    cluster: tuple[str, str], llama: Path, text: Path, tmp_path: Path
) -> None:
    """`--working-dir .`: driver and workers import the code that was brought; lost paths are refused first."""
    shared, checkout = tmp_path / "shared", checkout_copy(tmp_path / "checkout")
    shutil.copytree(llama, shared / "model")
    settings = {"calibration.shards": 4, "workers": {"min": 2, "max": 2}}
    made = Job(shared / "job", shared / "model", text, settings).write()
    shutil.copy(made.manifest, checkout / "job.yaml")
    address, dashboard = cluster
    with private_node(address, 1, shared):
        command = (f"--working-dir={checkout}", "--", "python", "-m", "pipeline.run", "job.yaml")
        refused = ray_job(dashboard, "submit", *command, "--set", "output=results/out")
        assert refused.returncode != 0
        assert "output: results/out is relative" in refused.stdout + refused.stderr
        assert not made.run_dir.exists()
        done = ray_job(dashboard, "submit", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " died" not in done.stdout + done.stderr
    assert json.dumps(made.compression()).count(f"{VERSION}+brought")


SCRAPE_WAIT_S = 270.0
OFTEN_S = 0.5
ONLY_WHEN_WRONG = (DEATHS, ERRORS, RETRIES)
Series = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture
def reporting_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """(address, where to scrape) of a cluster that reports several times a second instead of every ten seconds."""
    port = free_port()
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "300")
    with head_node(2, f"--metrics-export-port={port}") as address:
        yield address, f"http://127.0.0.1:{port}/metrics"


@pytest.mark.nightly
def test_every_metric_is_scraped(reporting_cluster: tuple[str, str], job: Callable[..., Job]) -> None:
    address, metrics = reporting_cluster
    made = job(**{"workers": {"min": 1, "max": 2}, "calibration.samples": 96, "calibration.micro_batch": 1})
    command = [sys.executable, "-m", "pipeline.run", str(made.manifest), "--address", address]
    highest: dict[Series, float] = {}
    deadline = time.monotonic() + SCRAPE_WAIT_S
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
