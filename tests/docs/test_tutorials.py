"""The tutorials, followed word by word in a copy of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import factories
from tests.docs.walkthrough import ROOT, Block, apply, blocks, copy_of_the_repository, edited, run

TUTORIALS = ROOT / "docs" / "tutorials"


def _follow(name: str, folder: Path) -> tuple[Path, list[Block]]:
    """The tree after everything is added, and the commands that are left to run."""
    tree = copy_of_the_repository(folder)
    found = blocks(TUTORIALS / f"{name}.md")
    for block in found:
        if block.path:
            apply(block, tree)
    commands = [block for block in found if block.language == "bash"]
    assert commands
    return tree, commands


def _tests(commands: list[Block]) -> list[Block]:
    return [block for block in commands if "pytest" in block.text]


def _lint(tree: Path) -> None:
    new = [block for name in TUTORIALS.glob("*.md") for block in blocks(name) if block.path.endswith(".py")]
    paths = sorted({block.path for block in new if (tree / block.path).exists()})
    ruff = [Path(sys.executable).parent / "ruff"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *paths], cwd=tree, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_method(tmp_path: Path) -> None:
    tree, commands = _follow("adding-a-method", tmp_path)
    _lint(tree)
    for block in _tests(commands):
        assert " passed" in run(block, tree)


@pytest.mark.ray
def test_a_method_in_a_job(tmp_path: Path) -> None:
    tree, commands = _follow("adding-a-method", tmp_path)
    factories.make_model(tree / "model")
    factories.write_text(tree / "text.txt", 20_000)
    for block in commands:
        if "pipeline.run" in block.text:
            run(block, tree)
    tensors = json.loads((tree / "output" / "compression.json").read_text())["tensors"]
    origins = Counter(entry["origin"] for name, entry in tensors.items() if ".o_proj." in name)
    assert origins == {"output_svd": 6}  # two factors in each of three layers


def test_a_hunk_fits_one_place_only() -> None:
    text = "a = [1, 2]\nb = 3\nb = 3\n"
    assert edited(text, ["-a = [… 2]", "+a = [… 2, 4]", "+c = 5"]) == "a = [1, 2, 4]\nc = 5\nb = 3\nb = 3\n"
    assert edited(text, [" a = …", "+c = 5"]).startswith("a = [1, 2]\nc = 5\nb")
    for hunk in ([" b = 3", "+c = 5"], [" d = …"], ["-a = [1]"]):
        with pytest.raises(AssertionError, match="places fit"):
            edited(text, hunk)
