"""A processor that promises AMX without tiles must not end a process at its first half precision product."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lamina import processor_lamina
from lamina.processor_lamina import multiplies_fast, processor_flags
from manifests import processor
from manifests.processor import LIMIT, WITHOUT_TILES, promises_tiles, settle_processor, tile_palettes

AMX = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t: fpu amx_bf16 amx_tile\n\nprocessor\t: 1\nflags : fpu\n"


@pytest.mark.parametrize(
    ("promised", "palettes", "asked", "limit"),
    [
        (AMX, 0, None, WITHOUT_TILES),
        (AMX, 1, None, None),
        (AMX, None, None, None),
        (AMX, 0, "AVX2", "AVX2"),
        ("flags : fpu avx512f\n", 0, None, None),
        ("Features : fp asimd\n", None, None, None),
        ("", 0, None, None),
    ],
)
def test_onednn_is_limited_where_tiles_are_promised_in_vain(
    promised: str,
    palettes: int | None,
    asked: str | None,
    limit: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(promised)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor, "tile_palettes", lambda: palettes)
    monkeypatch.setattr(os, "environ", {} if asked is None else {LIMIT: asked})
    settle_processor()
    assert os.environ.get(LIMIT) == limit


def test_elsewhere_nothing_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processor, processor_lamina):
        monkeypatch.setattr(module, "CPU_INFO", tmp_path / "none")
    assert processor_flags() == frozenset()
    assert not promises_tiles()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert tile_palettes() is None


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="no x86-64 Linux")
def test_this_processor_can_be_asked() -> None:
    assert processor_flags()
    assert tile_palettes() in (0, 1)


def test_half_precision_is_multiplied_here() -> None:
    code = "import pipeline, torch; a = torch.ones(64, 64).bfloat16(); print(float((a @ a).sum()))"
    environment = {name: value for name, value in os.environ.items() if name != LIMIT}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, "262144.0\n"), ended.stderr


@pytest.mark.parametrize(
    ("flags", "limit", "bfloat16", "float16"),
    [
        ("amx_tile amx_bf16 avx512_bf16 avx512_fp16", None, True, True),
        ("amx_tile amx_bf16 avx512_bf16 avx512_fp16", WITHOUT_TILES, False, True),
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
