"""The tutorials, followed word by word in a copy of the repository."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaConfig, GemmaForCausalLM

from tests import factories
from tests.docs.walkthrough import ROOT, Block, apply, blocks, copy_of_the_repository, edited, run, run_modules
from tests.end_to_end.jobs import command

TUTORIALS = ROOT / "docs" / "tutorials"


def _follow(name: str, folder: Path) -> tuple[Path, list[Block]]:
    """Applies the files of a tutorial to a copy of the repository. Returns the copy, and the commands to run there."""
    tree = copy_of_the_repository(folder)
    page = blocks(TUTORIALS / f"{name}.md")
    for block in page:
        if block.path:
            apply(block, tree)
    commands = [block for block in page if block.language == "bash"]
    assert commands
    return tree, commands


def _lint(tree: Path) -> None:
    new = [block for name in TUTORIALS.glob("*.md") for block in blocks(name) if block.path.endswith(".py")]
    paths = sorted({block.path for block in new if (tree / block.path).exists()})
    ruff = [Path(sys.executable).parent / "ruff"]
    for options in (["check"], ["format", "--check"]):
        result = subprocess.run([*ruff, *options, *paths], cwd=tree, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_what_they_add_passes_its_tests(tmp_path: Path) -> None:
    """All in one tree, and its tests in one run, as pytest takes seconds to start."""
    tree = copy_of_the_repository(tmp_path)
    files: list[str] = []
    for page in sorted(TUTORIALS.glob("*.md")):
        page_blocks = blocks(page)
        for block in page_blocks:
            if block.path and block.language != "yaml":
                apply(block, tree)
        (tests,) = [block for block in page_blocks if block.language == "bash" and "pytest" in block.text]
        python, *options = shlex.split(tests.text)
        assert [python, *options[:3]] == ["python", "-m", "pytest", "-q"]
        files += options[3:]
    _lint(tree)
    assert " passed" in run_modules([["pytest", "-q", *dict.fromkeys(files)]], tree)


@pytest.mark.nightly
@pytest.mark.ray
def test_a_method_in_a_job(tmp_path: Path) -> None:
    tensors = _job("adding-a-method", tmp_path, lambda tree: factories.make_model(tree / "model", peaked=False))
    origins = Counter(entry["origin"] for name, entry in tensors.items() if ".o_proj." in name)
    assert origins == {"output_svd": 6}  # two factors in each of three layers


@pytest.mark.ray
@pytest.mark.nightly
def test_a_family_in_a_job(tmp_path: Path) -> None:
    tensors = _job("adding-a-family", tmp_path, _gemma)
    origins = Counter(entry["origin"] for name, entry in tensors.items() if name.endswith("self_attn.v_proj.weight"))
    assert origins == {"flat_llm": 2}


def test_what_plan_says_of_the_new_family_s_model(tmp_path: Path) -> None:
    """Before the family is there; and how many files the tutorial changes."""
    page = blocks(TUTORIALS / "adding-a-family.md")
    changed = {block.path for block in page if block.path and block.language != "yaml"}
    assert {path for path in changed if not path.startswith("tests/")} == {"pipeline/families/dense.py"}
    _gemma(tmp_path)
    ended = command("plan", str(tmp_path / "model"))
    (said,) = [block.text for block in page if block.language == "text"]
    assert ended.code == 2
    assert said.strip() in ended.err
    assert "docs/tutorials/adding-a-family.md" in ended.err


def _job(name: str, folder: Path, make_model: Callable[[Path], object]) -> dict[str, Any]:
    """Runs the job of a tutorial on a model made for it. Returns the tensors of its compression record."""
    tree, commands = _follow(name, folder)
    make_model(tree)
    factories.write_text(tree / "text.txt", 20_000)
    jobs = [block for block in commands if "pipeline.run" in block.text]
    assert jobs
    for block in jobs:
        run(block, tree)
    tensors: dict[str, Any] = json.loads((tree / "output" / "compression.json").read_text())["tensors"]
    return tensors


def _gemma(tree: Path) -> None:
    config = GemmaConfig(**{**factories.GEOMETRY, "num_hidden_layers": 2, "tie_word_embeddings": True})
    GemmaForCausalLM(config).save_pretrained(tree / "model", max_shard_size="60KB")
    factories.make_tokenizer().save_pretrained(tree / "model")


def test_a_family_takes_one_file_besides_its_test() -> None:
    page = TUTORIALS / "adding-a-family.md"
    changed = {block.path for block in blocks(page) if block.path.endswith(".py")}
    assert changed == {"pipeline/families/dense.py", "tests/families/test_gemma.py"}
    said = "one file is changed besides its test, and one more is read, `block_lamina.py`."
    assert said in " ".join(page.read_text(encoding="utf-8").split())


def test_a_hunk_fits_one_place_only() -> None:
    text = "a = [1, 2]\nb = 3\nb = 3\n"
    assert edited(text, ["-a = [… 2]", "+a = [… 2, 4]", "+c = 5"]) == "a = [1, 2, 4]\nc = 5\nb = 3\nb = 3\n"
    assert edited(text, [" a = …", "+c = 5"]).startswith("a = [1, 2]\nc = 5\nb")
    for hunk in ([" b = 3", "+c = 5"], [" d = …"], ["-a = [1]"]):
        with pytest.raises(AssertionError, match="places fit"):
            edited(text, hunk)
