"""The pages under docs/: links and anchors lead somewhere, tables say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manifests.entries import KINDS
from tests.docs.family_table import PAGE, written
from tests.test_imports import LAYERS
from tools.manifest_reference import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in ("", "docs", "docs/tutorials", "tools", "deploy/serving")
    for path in (ROOT / folder).glob("*.md")
)
CODE = [
    path
    for folder in ("manifests", "pipeline", "stores", "workers", "deploy", "tools", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CITED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Returns anchors of headings as GitHub has them: lower case, no punctuation but - and _, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


def _broken(target: str, base: Path) -> bool:
    path, _, anchor = target.partition("#")
    page = (base.parent / path).resolve() if path else base
    return not page.exists() or bool(anchor and anchor not in _anchors(page))


def test_there_are_pages_and_links() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "docs/architecture.md", "docs/methods.md", "docs/formats.md", "docs/glossary.md"} <= names
    assert sum(len(LINK.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 20
    assert "who-imports-whom" in _anchors(ROOT / "docs" / "architecture.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if _broken(target, page)] == []


@pytest.mark.slow
def test_what_the_code_cites_is_there() -> None:
    cited = {(path, target) for path in CODE for target in CITED.findall(path.read_text(encoding="utf-8"))}
    assert [
        f"{path.relative_to(ROOT)}: {target}" for path, target in cited if _broken(target, ROOT / "README.md")
    ] == []


def test_paths_that_the_pages_name_exist() -> None:
    """`pipeline/driver/driver.py` in backticks, and what a tutorial adds aside, is a file or a folder."""
    named = re.compile(r"`((?:manifests|pipeline|stores|workers|deploy|tools|tests|docs)/[\w./-]*)(?::[^`]*)?`")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        if page.parent.name != "tutorials"
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert missing == []


def test_the_import_table_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| `([\w.]+)`[^|]* \| ([^|]+) \| [^|]+ \|$", _section("Who imports whom"), re.MULTILINE)
    table = {name: set(re.findall(r"`([\w.]+)`", own)) for name, own in rows}
    assert table == {name: set(layer.own) for name, layer in LAYERS.items()}


def _section(heading: str) -> str:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_the_kinds_of_entries_are_those_that_are_checked() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").partition("| key | record |")[2]
    keys = {key.partition("/")[0] for key in re.findall(r"^\| `([\w/…]+)` \|", text.partition("\n\n")[0], re.MULTILINE)}
    assert keys == {*KINDS, "source", "hardware"}


def test_the_code_cites_nothing_else() -> None:
    outside = re.compile(r"\b[A-Z]{4,} (?:§|section )\d")
    citing = {path for path in CODE for _ in outside.finditer(path.read_text(encoding="utf-8"))}
    assert sorted(path.relative_to(ROOT).as_posix() for path in citing) == []


def test_each_term_stands_once_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+?) \| ", text, re.MULTILINE)[1:]
    assert len(terms) > 40
    words = [word.strip().lower() for term in terms for word in term.split(",")]
    assert len(words) == len(set(words))
    assert terms == sorted(terms, key=str.lower)


def test_the_manifest_reference_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_table_of_families_is_what_the_code_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run: python -m tests.docs.family_table"
