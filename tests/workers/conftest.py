"""Source models for tests of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.bench import FAMILIES, save_source


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("family") / "model", request.param)
