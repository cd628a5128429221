"""A whole job on a CUDA device, or the emulated one: that of the benchmark of a large model's layer."""

from __future__ import annotations

import pytest

from tests.emulated_device import EmulatedDevice
from tools.benchmarks.device_layer import main

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.parametrize("memory", [pytest.param([], marks=pytest.mark.nightly), ["--memory", "1"]])
def test_a_job_goes_through(
    memory: list[str], emulated: EmulatedDevice | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--narrower", "128", "--samples", "1", *memory]) == 0
    said = capsys.readouterr().out
    assert said.count("| a layer |") == 2  # dense, and compressed
    assert said.count(" GiB of ") == 2
