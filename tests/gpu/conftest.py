"""Runs the tests on a CUDA device if there is one, and otherwise on the emulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.emulated_device import EmulatedDevice, emulated_device
from tests.workers.bench import save_source


@pytest.fixture(autouse=True)
def emulated() -> Iterator[EmulatedDevice | None]:
    """Yield the emulated device; None on a real one."""
    if torch.cuda.is_available():
        yield None
        return
    with emulated_device() as device:
        yield device


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("llama") / "model")
