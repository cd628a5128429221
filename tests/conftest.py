"""Settings that must precede the imports of torch, ray and transformers, and fixtures for all tests.

Fixtures import torch and transformers themselves: the process that only distributes tests to xdist's workers needs
neither.
"""

from __future__ import annotations

import os

# Ray's local clusters switch token authentication on by themselves and write a token to the home directory.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gc
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from manifests.packages import limit_onednn
from tests import buckets
from tests.processes import make_scheduler
from tests.remote_code import modules_cache
from tests.sampling import mark_variants

__all__ = ["modules_cache"]

limit_onednn()  # before a test multiplies
gc.disable()  # until all tests are collected: a fifth of the time of the imports

# The same examples in every run, no time limit for one (machines are shared), nothing kept on disk.
settings.register_profile("lamina", derandomize=True, deadline=None, database=None)
settings.load_profile("lamina")


MEMORY = "/dev/shm"
NEEDED_BYTES = 4 * 2**30


def pytest_configure() -> None:
    """Put the tests' folders in memory where there is room.

    No test loses the page cache, so that a disk would reveal no more. `make nightly` uses a disk all the same.
    """
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= NEEDED_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)  # pytest's name for the parent of its folders


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, and all files that share a Ray."""
    return make_scheduler(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the variants of tests that `make unit` leaves out."""
    mark_variants(items)


def pytest_collection_finish() -> None:
    """Exempt the million objects of the imports from garbage collection, and collect the rest less often."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of skipped tests by reason: a green run without the trained models tests less."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason}", yellow=True)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Reset the number of threads, which another file's tests may have set.

    It decides the last bits, and several threads only slow tiny products down.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _small_probe() -> Iterator[None]:
    from tests.probing import probe_small_matrices

    with pytest.MonkeyPatch.context() as patch:
        probe_small_matrices(patch.setattr)
        yield


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the folder of trained models and texts beside the checkout."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"no trained models: {path} is missing")
    return path


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Yield the URL of an S3 server: moto's on loopback, or the one in S3_SERVER."""
    if "S3_SERVER" in os.environ:
        yield os.environ["S3_SERVER"]
        return
    with buckets.s3_server() as url:
        yield url


@pytest.fixture
def s3_bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a new bucket, with the environment that opens it here and in child processes."""
    for name, value in {**buckets.ENVIRONMENT, "AWS_ENDPOINT_URL": s3_url}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{buckets.make_bucket(s3_url)}"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Yield the growing list of messages that reach the root logger."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener = Listener()
    logging.getLogger().addHandler(listener)
    yield messages
    logging.getLogger().removeHandler(listener)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a random model: `tiny_model("qwen2", tie_word_embeddings=True)` -> its directory."""
    from tests import factories

    def make(family: str = "llama", **overrides: object) -> Path:
        number = len(list(tmp_path.glob("model-*")))
        return factories.make_model(tmp_path / f"model-{number}", family, **overrides)

    return make


@pytest.fixture
def calibration_text(tmp_path: Path) -> Path:
    """Return a text file of about 100 KB."""
    from tests import factories

    return factories.write_text(tmp_path / "calibration.txt")
