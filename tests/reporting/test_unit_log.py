"""The log of units: it never ends a job."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.reporting.unit_log import units_logged


def test_a_line_for_each_unit(tmp_path: Path) -> None:
    pool: Any = SimpleNamespace(trace=None)
    with units_logged(pool, tmp_path, "job"):
        pool.trace({"unit": "solve/1", "seconds": 1.5})
        (path,) = tmp_path.iterdir()
        assert path.name.endswith(".units.jsonl")
        assert json.loads(path.read_text()) == {
            "run": "job",
            "unit": "solve/1",
            "seconds": 1.5,
        }  # at once: a kill may come
        pool.trace({"unit": "solve/2"})
    assert [json.loads(line)["unit"] for line in path.read_text().splitlines()] == ["solve/1", "solve/2"]
    pool.trace({"unit": "solve/3"})
    assert len(path.read_text().splitlines()) == 2


def test_what_cannot_be_opened_is_said(tmp_path: Path, said: list[str]) -> None:
    pool: Any = SimpleNamespace(trace=lambda _: None)
    reached = False
    with units_logged(pool, tmp_path / "none", "job"):
        pool.trace({"unit": "solve/1"})
        reached = True
    assert reached
    assert "units are not logged" in "".join(said)


def test_a_full_disk_is_said_once(tmp_path: Path, said: list[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    pool: Any = SimpleNamespace(trace=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", lambda *_, opened=open, **options: opened(full, "w", **options))
        with units_logged(pool, tmp_path, "job"):
            pool.trace({"unit": "solve/1"})
            pool.trace({"unit": "solve/2"})
    assert "".join(said).count("units are not logged any more") == 1
