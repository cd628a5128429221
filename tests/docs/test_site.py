"""The site that `make docs` builds: all pages, no broken link or anchor, the API reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.walkthrough import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def _pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, list) or isinstance(entry, dict)
    return [page for part in parts for page in _pages(part)]


def test_every_page_is_in_the_navigation() -> None:
    pages = _pages(CONFIG["nav"])
    assert len(pages) == len(set(pages))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs <= set(pages)


def test_the_reference_names_what_there_is() -> None:
    """Without the extra: each object of the reference is in the sources."""
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 8
    for name in names:
        folder = ROOT / "deploy" / "serving" if name.startswith("lamina") else ROOT
        module, _, member = name.rpartition(".")
        if (folder / name.replace(".", "/")).is_dir() or (folder / f"{name.replace('.', '/')}.py").is_file():
            continue
        text = (folder / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(?:def|class) {member}\b", text, re.MULTILINE), name


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="the extra docs is not installed")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    reference = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert 'id="pipeline.job.running.run_job"' in reference
    assert 'id="stores.backend.Storage.put_if_absent"' in reference
