"""The description of the hardware has comparable fields, and is the same for all processes of a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests import VERSION
from manifests.schema import Workers
from workers import hardware
from workers.device_settings import device_settings
from workers.hardware import describe_hardware, software_versions, unused_here


def test_of_a_cpu() -> None:
    found = describe_hardware(torch.device("cpu"))
    assert found.keys() == {"device", "instructions", "half_precision", "torch"}
    assert found["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert found["torch"] == torch.__version__
    assert all(found.values())


@pytest.mark.slow
def test_another_process_says_the_same() -> None:
    """As entries of the ledger, it is compared as JSON."""
    code = (
        "import json, torch; from workers.hardware import *; print(json.dumps(describe_hardware(torch.device('cpu'))))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == describe_hardware(torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n", "AuthenticAMD"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "0x41"),
        ("", "unknown make"),
    ],
)
def test_the_maker_of_a_cpu(text: str, maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of oneMKL differ by it."""
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    assert describe_hardware(torch.device("cpu"))["device"] == f"CPU of {maker}"


def test_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = describe_hardware(torch.device("cuda"))
    assert found == {
        "device": "NVIDIA H200", "compute_capability": "9.0", "torch": torch.__version__, "cuda": "13.0",
        **device_settings(),
    }  # fmt: skip


def test_versions() -> None:
    assert software_versions() == {
        "Lamina": VERSION,
        "Python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in ("ray", "torch", "transformers")},
    }


@pytest.mark.parametrize(
    ("cores", "gpus", "workers", "said"),
    [
        (64, 0, {}, "63 of this machine's 64 cores stay unused: workers.max is 1, with workers.cpus: 1 each"),
        (64, 0, {"max": 8, "cpus": 4}, "32 of this machine's 64 cores stay unused: workers.max is 8, with"),
        (64, 0, {"max": 33}, None),
        (1, 0, {}, None),
        (64, 8, {"max": 8}, "8 of this machine's 8 GPUs stay unused: workers.max is 8, with workers.gpus: 0 each"),
        (64, 8, {"max": 3, "gpus": 0.5}, "6 of this machine's 8 GPUs stay unused: workers.max is 3, with"),
        (64, 8, {"max": 8, "gpus": 1}, None),
    ],
)
def test_what_workers_leave_unused(
    cores: int, gpus: int, workers: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "machine_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    unused = unused_here(Workers(**workers))
    assert unused is None if said is None else unused is not None and unused.startswith(said)
