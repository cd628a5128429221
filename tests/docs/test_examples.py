"""Manifests that the pages show, whole or as entries, are ones that the schema accepts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from manifests.loading import parse_manifest
from manifests.methods import AnyMethod
from manifests.schema import Budget
from manifests.sweep import parse_sweep
from tests.docs.walkthrough import ROOT

REST = {"version": 1, "model": {"source": "m"}, "output": "o", "run_dir": "r", "methods": [{"method": "loss_aware"}]}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENTRY = re.compile(r"\{(?:name: \w+, methods: \[)?(method: [^{}]*)\}")
ENTRIES = sorted({entry for page in PAGES for entry in ENTRY.findall(page.read_text(encoding="utf-8"))})


def _documents() -> list[Any]:
    documents = []
    for page in PAGES:
        for text in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            documents.append(pytest.param(yaml.safe_load(text), id=f"{page.stem}-{len(documents)}"))
    return documents


@pytest.mark.parametrize("document", _documents())
def test_yaml_blocks(document: dict[str, Any]) -> None:
    if "points" in document:
        parse_sweep(document)
    else:  # whole, or the block of a whole one
        parse_manifest({**REST, **document})


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_methods(entry: str) -> None:
    TypeAdapter(AnyMethod).validate_python(yaml.safe_load(f"{{{entry}}}"))


def test_there_are_entries() -> None:
    assert len(ENTRIES) > 10


@pytest.mark.parametrize(
    "budget",
    sorted({text for page in PAGES for text in re.findall(r"budget: (\{[^{}…]*\})", page.read_text(encoding="utf-8"))}),
)
def test_budgets(budget: str) -> None:
    fields = yaml.safe_load(budget)
    assert isinstance(fields, dict)
    TypeAdapter(Budget).validate_python({name: 64 if value == "N" else value for name, value in fields.items()})
