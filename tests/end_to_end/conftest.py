from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from matplotlib.backends.backend_svg import FigureCanvasSVG

import workers.cluster
import workers.pool
from manifests.schema import Workers
from pipeline.console.eta import Eta, PlannedPhase
from pipeline.console.progress import JobObserver
from pipeline.healing.training import Trainer
from tests import factories
from tests.end_to_end.jobs import Job, interrupting, take_small_steps, without_ray
from tests.end_to_end.shared_ray import KeptPool
from tests.end_to_end.sources import make_source
from tests.processes import ON_ONE_RAY
from workers.cluster import connect

ROOT = Path(__file__).resolve().parents[2]
WIDE = {"hidden_size": 64, "intermediate_size": 96}
RENDER = "test_report.py"


@pytest.fixture(scope="session", autouse=True)
def _processes_find_the_packages() -> Iterator[None]:
    """Let Ray's workers and our subprocesses import the same packages as this process, installed or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "deploy" / "serving")]))
        yield


@pytest.fixture(scope="session")
def _cluster(_processes_find_the_packages: None) -> Iterator[tuple[str, list[Any]]]:
    """Yield a local Ray, started as `run` does: (address, idle actors)."""
    yield connect(None, Workers(max=2)), []
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_ray(request: pytest.FixtureRequest, _cluster: tuple[str, list[Any]]) -> Iterator[None]:
    """Make commands use one Ray, in this process."""
    by_day = any(
        item.path == request.path and "shared_ray" in item.fixturenames and not item.get_closest_marker("nightly")
        for item in request.session.items
        if isinstance(item, pytest.Function)
    )
    file = request.path.relative_to(ROOT).as_posix()
    assert file in ON_ONE_RAY or not by_day, f"add {file} to ON_ONE_RAY in tests/processes.py"
    address, idle = _cluster
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptPool, "idle", idle, raising=False)
        patch.setattr(workers.cluster, "connect", lambda *_: address)
        patch.setattr(workers.pool, "RayPool", KeptPool)
        yield


@pytest.fixture(autouse=True)
def _plots_are_not_rendered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the SVG elements of plots empty: to lay out and render them takes longer than a small job.

    The functions that plot are called all the same. The file RENDER, tests/reporting and tests/sweeping render.
    """
    if request.path.name != RENDER:

        def write(canvas: FigureCanvasSVG, file: io.StringIO, **_: Any) -> None:
            file.write("<svg></svg>")

        monkeypatch.setattr(FigureCanvasSVG, "print_svg", write)


@pytest.fixture
def inline() -> Iterator[None]:
    """Give commands `--in-process`."""
    with without_ray():
        yield


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a command fail if it starts Ray."""

    def refuse(*_: Any) -> str:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(workers.cluster, "connect", refuse)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text for calibration."""
    return factories.write_text(tmp_path_factory.mktemp("text") / "text.txt", 20_000)


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short text to score."""
    return factories.write_text(tmp_path_factory.mktemp("scored") / "scored.txt", 2_000, seed=9)


@pytest.fixture(scope="session")
def shallow_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama: two layers, grouped heads, head_dim 16 at hidden size 48, several shards."""
    return factories.make_model(tmp_path_factory.mktemp("llama") / "source", num_hidden_layers=2)


@pytest.fixture(scope="session")
def deep_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same with three layers, for tests that need a layer which is neither the first nor the last."""
    return factories.make_model(tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture(scope="module")
def llama(request: pytest.FixtureRequest) -> Path:
    """Return the Llama of two layers, or of three in files that set `LAYERS` to three."""
    deep = getattr(request.module, "LAYERS", 2) == 3
    source: Path = request.getfixturevalue("deep_llama" if deep else "shallow_llama")
    return source


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose widths groups of 32 divide."""
    return make_source(tmp_path_factory.mktemp("wide"), "llama", layers=2, **WIDE)


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> Job:
    """A finished job, not to be changed."""
    made = Job(tmp_path_factory.mktemp("finished"), llama, text).write()
    with without_ray():
        assert made.run().code == 0
    return made


@pytest.fixture
def small_steps(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a healing take many small steps, without Ray."""
    take_small_steps(monkeypatch)


@pytest.fixture
def interrupted_training(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which a signal comes in the sixth step of a healing."""

    @contextmanager
    def interrupted() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(*interrupting(Trainer, "_step", 6))
            yield

    return interrupted


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobObserver, Eta, tuple[PlannedPhase, ...]]]:
    """Return the growing list of estimates of the remaining time, with the phases that each began with."""
    etas: list[tuple[JobObserver, Eta, tuple[PlannedPhase, ...]]] = []
    expect = JobObserver.expect

    def kept(self: JobObserver, eta: Eta) -> None:
        etas.append((self, eta, eta.planned))
        expect(self, eta)

    monkeypatch.setattr(JobObserver, "expect", kept)
    return etas


@pytest.fixture
def model(tmp_path: Path, llama: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def job(tmp_path: Path, llama: Path, text: Path) -> Any:
    """Return `job(**changes)`, which creates a job on the llama. Each job of a test has a separate folder."""

    def make(source: Path = llama, **changes: Any) -> Job:
        return Job(tmp_path / f"job-{len(list(tmp_path.glob('job-*')))}", source, text, changes).write()

    return make
