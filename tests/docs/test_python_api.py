"""docs/python-api.md: its blocks run, in their order, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import factories
from tests.docs.walkthrough import ROOT, WAIT_S, blocks


@pytest.mark.slow
def test_the_blocks_run(tmp_path: Path) -> None:
    code = [block.text for block in blocks(ROOT / "docs" / "python-api.md") if block.language == "python"]
    assert len(code) >= 6
    factories.make_model(tmp_path / "model")
    factories.write_text(tmp_path / "text.txt", 20_000)
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 0, result.stderr
    assert "of the bytes, perplexity" in result.stdout
    assert "finished" in result.stdout
    assert "svd_llm-0.7" in result.stdout
    assert "give 0.8" in result.stdout
