"""Skipped tests are counted where a person looks last."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_summary_says_how_many_were_skipped_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real conftest, in a checkout that has no trained models beside it: a run of pytest inside this one."""
    tests = tmp_path / "checkout" / "tests"
    tests.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tests / "conftest.py")
    (tests / "test_some.py").write_text(
        "import pytest\n"
        "def test_one(shared_dir): pass\n"
        "def test_two(shared_dir): pass\n"
        "@pytest.mark.skip('of the moon')\n"
        "def test_three(): pass\n"
        "def test_four(): pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    without = [f"-pno:{name}" for name in ("cacheprovider", "xdist", "faulthandler")]
    try:
        assert pytest.main(["-q", "-s", *without, f"--rootdir={tmp_path}", str(tests)]) == 0
    finally:
        for name in ("conftest", "test_some"):
            sys.modules.pop(name, None)
    said = capsys.readouterr().out
    assert f"2 skipped: no trained models: {tmp_path / 'shared'} is missing" in said
    assert "1 skipped: of the moon" in said
