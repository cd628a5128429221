"""`file.py: Name.member` on a page is a definition in that file."""

from __future__ import annotations

import re

import pytest

from tests.docs.walkthrough import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SYMBOL = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
FOLDERS = ("manifests", "pipeline", "workers", "stores", "deploy", "tools", "tests")
MODULES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
CITED = sorted({cited for page in PAGES for cited in SYMBOL.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize(("path", "name"), CITED)
def test_it_is_defined(path: str, name: str) -> None:
    files = [file for file in MODULES if file.as_posix().endswith(f"/{path}")]
    assert files, path
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for part in name.split("."):
        assert re.search(rf"^\s*(?:def|class) {part}\b", text, re.MULTILINE), part


def test_pages_cite_definitions() -> None:
    assert len(CITED) >= 8
