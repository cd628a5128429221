"""Skipped tests are counted where a person looks last."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_summary_says_how_many_were_skipped_and_why(tmp_path: Path) -> None:
    """With the real conftest, in a checkout that has no trained models beside it."""
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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"2 skipped: no trained models: {tmp_path / 'shared'} is missing" in ended.stdout
    assert "1 skipped: of the moon" in ended.stdout
