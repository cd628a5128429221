"""docs/python-api.md: its blocks run, in their order, on a tiny model."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import factories
from tests.docs.walkthrough import ROOT, WAIT_S, blocks

CODE = [block.text for block in blocks(ROOT / "docs" / "python-api.md") if block.language == "python"]
OURS = ("manifests", "pipeline", "stores", "workers")


def test_its_imports_name_definitions() -> None:
    """Reads the sources only: quick enough to notice a new name at once."""
    imports = [
        node for node in ast.walk(ast.parse("\n".join(CODE))) if isinstance(node, ast.ImportFrom) and node.module
    ]
    own = [(node.module, alias.name) for node in imports for alias in node.names if str(node.module).startswith(OURS)]
    assert len(own) > 6
    for module, name in own:
        text = (ROOT / f"{str(module).replace('.', '/')}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", text, re.MULTILINE), f"{module}.{name}"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_blocks_run(tmp_path: Path) -> None:
    factories.make_model(tmp_path / "model", num_hidden_layers=2, peaked=False)
    factories.write_text(tmp_path / "text.txt", 5_000)
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(CODE)],
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
