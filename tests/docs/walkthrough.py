"""Runs a tutorial as a program: applies its code blocks, in order, to a copy of the repository, and runs its commands.

The words after a fence define a block: a language and a path are a new file, `diff` and a path an edit of an existing
file, `bash` commands. Hunks of a diff begin with `@@`; `…` in a line matches any text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "manifests",
    "pipeline",
    "stores",
    "workers",
    "deploy",
    "tests",
    "tools",
    "docs",
    "pyproject.toml",
    "README.md",
)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WAIT_S = 280
# Lines of one block share an interpreter: each would take seconds to import torch.
IN_TURN = """
import json, runpy, sys
for module, *words in json.loads(sys.argv[1]):
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{module} {words}: exit code {ended.code}")
"""


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    language: str
    path: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Returns the code blocks of a page, in order."""
    return [Block(language, path, text) for language, path, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def copy_of_the_repository(folder: Path) -> Path:
    """Copies the parts of the repository that a tutorial needs into `folder`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, folder / name)
    return folder


def apply(block: Block, tree: Path) -> None:
    """Creates or edits a file. Raises AssertionError if the page does not fit the tree."""
    path = tree / block.path
    if block.language == "diff":
        text = path.read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", block.text, flags=re.MULTILINE)[1:]:
            text = edited(text, hunk.splitlines())
        path.write_text(text, encoding="utf-8")
        return
    assert not path.exists(), f"{block.path} is there already"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


def edited(text: str, hunk: list[str]) -> str:
    """Returns `text` with one hunk applied at the only place where its context fits."""
    assert hunk
    assert all(line[:1] in " +-" for line in hunk), hunk
    before = "\n".join(_pattern(line[1:]) for line in hunk if not line.startswith("+"))
    places = list(re.finditer(f"^{before}$", text, re.MULTILINE))
    assert len(places) == 1, f"{len(places)} places fit {hunk}"
    captured = iter(places[0].groups())
    lines, removed = [], []
    for line in hunk:
        fillings = [next(captured) for _ in range(line.count("…"))] if not line.startswith("+") else []
        if line.startswith("-"):
            removed += fillings
        elif line.startswith("+"):
            lines.append(_filled(line[1:], removed))
        else:
            lines.append(_filled(line[1:], fillings))
    return text[: places[0].start()] + "\n".join(lines) + text[places[0].end() :]


def _pattern(line: str) -> str:
    return "(.*?)".join(map(re.escape, line.split("…")))


def _filled(line: str, captured: list[str]) -> str:
    for filling in captured[: line.count("…")]:
        line = line.replace("…", filling, 1)
    assert "…" not in line, line
    return line


def run(block: Block, tree: Path) -> str:
    """Runs the commands of a block, one after another, in the tree. Returns their output; raises when one fails."""
    lines = [shlex.split(line) for line in block.text.splitlines()]
    assert all(line[:2] == ["python", "-m"] for line in lines), block.text
    return run_modules([line[2:] for line in lines], tree)


def run_modules(modules: list[list[str]], tree: Path) -> str:
    """Runs modules with their arguments, as `python -m` does. Returns their output; raises when one fails."""
    result = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps(modules)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "deploy" / "serving")])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert result.returncode == 0, f"{modules}:\n{result.stdout}\n{result.stderr}"
    return result.stdout
