"""docs/first_hour.md: its commands in their order, in a folder that begins empty; and what they print."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.quickstart.__main__ import main as quickstart
from tests.docs.walkthrough import ROOT, blocks
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import command

PAGE = ROOT / "docs" / "first_hour.md"
MODEL = Path("lamina/runs/quickstart")


class Shown(NamedTuple):
    """A command of the page and the lines below it."""

    words: tuple[str, ...]
    lines: tuple[str, ...]


def shown() -> list[Shown]:
    text = "".join(block.text for block in blocks(PAGE) if block.language == "console")
    first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first
    return [Shown(tuple(shlex.split(part.splitlines()[0])), tuple(part.splitlines()[1:])) for part in parts]


def commands_of(name: str) -> list[Shown]:
    return [each for each in shown() if each.words[0] == name]


def test_what_is_installed_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ((*_, constraints, project),) = [each.words for each in shown() if each.words[:2] == ("pip", "install")]
    assert (ROOT / Path(constraints).relative_to("lamina")).is_file()
    assert set(re.findall(r"\[(.*)\]", project)[0].split(",")) <= {*extras}


def test_the_model_is_made_by_the_command_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((*_, module, option),) = [each.words for each in shown() if "deploy.quickstart" in each.words]
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit):
        quickstart()
    assert option.removesuffix(")") in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
def test_the_job_and_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path, text: Path) -> None:
    """On another small model, in this process; the first run kills itself at a commit."""
    monkeypatch.chdir(tmp_path)
    MODEL.mkdir(parents=True)
    (MODEL / "model").symlink_to(llama)
    (MODEL / "calibration.txt").symlink_to(text)
    following = [each.words[1] for each in commands_of("lamina")]
    assert following == ["init", "run", "status", "run", "verify", "report", "export"]
    for one in commands_of("lamina"):
        _, name, *options = one.words
        if name == "run":
            killed = options[-1] == "&"
            words = [*options[:1], "--set", "workers.max=1", "--set", "model.accept_loss=true"]
            child = Child(
                name, words, tmp_path / f"{killed}.log", Hook("commit", 2, "dense/", after=True) if killed else None
            )
            assert child.end() == (-signal.SIGKILL if killed else 0), child.said
            assert killed or missing(one, child.said) == []
            continue
        ended = command(name, *options)
        assert ended.code == 0, ended.err
        assert missing(one, ended.out + ended.err) == []
    (script,) = [block for block in blocks(PAGE) if block.language == "python"]
    assert commands_of("python")[-1].words == ("python", script.path)
    paths = os.pathsep.join(path for path in sys.path if not Path(path, "lamina").is_dir())
    said = subprocess.run(
        [sys.executable, "-c", script.text], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()


def missing(one: Shown, said: str) -> list[str]:
    """The lines of the page that begin with a word with which no printed line begins."""
    printed = {first for line in said.splitlines() if (first := first_word(line))}
    heads = [(line, first_word(line)) for line in one.lines]
    return [line for line, head in heads if head and head not in printed]


def first_word(line: str) -> str:
    return next(iter(re.findall(r"^ *([A-Za-z_]+)", line)), "")
