"""A processor that promises AMX and cannot do it must not end a process at its first half precision product."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina import processor_lamina
from lamina.processor_lamina import multiplies_fast, processor_flags
from manifests import processor
from manifests.processor import LIMIT, WITHOUT_AMX, limit_onednn, promises_amx

AMX = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t: fpu amx_bf16 amx_tile\n\nprocessor\t: 1\nflags : fpu\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the processor's description, and an empty temporary folder."""
    (tmp_path / "boot").write_text("a-boot\n")
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "BOOT_ID", tmp_path / "boot")
    monkeypatch.setattr(processor.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("promised", "works", "asked", "limit"),
    [
        (AMX, False, None, WITHOUT_AMX),
        (AMX, True, None, None),
        (AMX, False, "AVX2", "AVX2"),
        ("flags : fpu avx512f\n", False, None, None),
        ("Features : fp asimd\n", False, None, None),
        ("", False, None, None),
    ],
)
def test_onednn_is_limited_where_amx_is_promised_in_vain(
    promised: str, works: bool, asked: str | None, limit: str | None, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "cpuinfo").write_text(promised)
    monkeypatch.setattr(processor, "product_works", lambda: works)
    monkeypatch.setattr(os, "environ", {} if asked is None else {LIMIT: asked})
    limit_onednn()
    assert os.environ.get(LIMIT) == limit


@pytest.mark.parametrize("works", [False, True])
def test_a_machine_tries_once_until_it_boots(works: bool, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    ended = SimpleNamespace(returncode=0 if works else -signal.SIGILL)

    def run(*_: Any, **__: Any) -> SimpleNamespace:
        tried.append(1)
        return ended

    (machine / "cpuinfo").write_text(AMX)
    monkeypatch.setattr(processor.subprocess, "run", run)
    for boot, tries in (("a-boot", 1), ("a-boot", 1), ("another", 2)):
        (machine / "boot").write_text(boot)
        monkeypatch.setattr(os, "environ", {})
        limit_onednn()
        assert (os.environ.get(LIMIT), len(tried)) == (None if works else WITHOUT_AMX, tries)


def test_a_temporary_folder_that_takes_no_file(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "cpuinfo").write_text(AMX)
    monkeypatch.setattr(processor.tempfile, "gettempdir", lambda: str(machine / "none"))
    monkeypatch.setattr(processor, "product_works", lambda: False)
    monkeypatch.setattr(os, "environ", {})
    limit_onednn()
    assert os.environ[LIMIT] == WITHOUT_AMX


def test_elsewhere_nothing_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processor, processor_lamina):
        monkeypatch.setattr(module, "CPU_INFO", tmp_path / "none")
    assert processor_flags() == frozenset()
    assert not promises_amx()


@pytest.mark.slow
def test_the_product_is_multiplied_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != LIMIT}
    code = f"from manifests.processor import *; limit_onednn(); {processor.PRODUCT}; print(float((a @ a).sum()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, "262144.0\n"), ended.stderr


@pytest.mark.parametrize(
    ("flags", "limit", "bfloat16", "float16"),
    [
        ("amx_tile amx_bf16 avx512_bf16 avx512_fp16", None, True, True),
        ("amx_tile amx_bf16 avx512_bf16 avx512_fp16", WITHOUT_AMX, False, True),
        ("amx_tile amx_bf16 amx_fp16 avx512_bf16 avx512_fp16", "default", True, True),
        ("amx_tile amx_bf16 avx512_bf16 avx512_fp16", "AVX2", False, False),
        ("avx2 avx512f avx512_bf16", None, True, False),
        ("avx2 avx512f avx512_bf16", "AVX512_CORE", False, False),
        ("avx2", None, False, False),
        ("fp asimd bf16 asimdhp", None, True, False),
        ("", None, False, False),
    ],
)
def test_which_products_are_fast(
    flags: str, limit: str | None, bfloat16: bool, float16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_lamina, "processor_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(os, "environ", {} if limit is None else {LIMIT: limit})
    assert (multiplies_fast("bfloat16"), multiplies_fast("float16")) == (bfloat16, float16)
