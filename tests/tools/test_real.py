"""`make real`: every step once, in order, skipped when its result exists; commands are replaced by a program that notes
them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="gguf, an extra, is not installed")
from tools import hub_texts, real
from tools.tuning import passages

STUB = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in *"$BROKEN"*) echo half a table; exit 3;; esac
echo "figures of $2"
"""


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands that ran, one a line. BROKEN is part of the command that fails."""
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(STUB)
    stub.chmod(0o755)
    log.touch()
    monkeypatch.setattr(sys, "executable", str(stub))
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("BROKEN", "nothing")
    monkeypatch.chdir(tmp_path)
    return log


def _call(log: Path, *more: str) -> tuple[int, list[str]]:
    """The exit code, and the modules of the commands that ran."""
    log.write_text("")
    code = real.main(["--models", "models", "--texts", "texts", "--made", "made", *more])
    return code, [line.split()[1] for line in log.read_text().splitlines()]


def test_steps_without_a_result_run_once(noted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, ran = _call(noted)
    assert code == 0
    assert ran[:4] == ["pipeline.sweep", "pipeline.init", "pipeline.run", "tools.off_grid"]
    assert ran[-1] == "tools.simulate"
    assert "tools.benchmarks.served" not in ran
    said = capsys.readouterr().out
    assert "left out: no .engines/vllm/bin/python, .engines/llama-cpp; `make test-vllm`" in said
    assert "in all about 3.0 hours" in said
    assert "figures of pipeline.sweep" in said
    assert _call(noted) == (0, [])
    said = capsys.readouterr().out
    assert "sweep       the first table, and the picture: done, made/sweep.txt" in said
    assert "in all about 0.0 hours" in said


def test_a_failed_step_ends_the_call_and_is_repeated(
    noted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKEN", "tools.peers")
    code, ran = _call(noted)
    assert (code, ran[-1]) == (3, "tools.peers")
    assert "half a table\nllama.cpp: ended with 3" in capsys.readouterr().out
    monkeypatch.setenv("BROKEN", "nothing")
    code, again = _call(noted)
    assert (code, again[0]) == (0, "tools.peers")
    assert not {*again} & {"tools.off_grid", "pipeline.sweep"}


def test_another_command_makes_a_result_anew(noted: Path) -> None:
    assert _call(noted, "tasks")[1] == ["tools.benchmarks.streamed_tasks"]
    assert _call(noted, "tasks", "--tasks", "a.yaml")[1] == ["tools.benchmarks.streamed_tasks"]
    assert _call(noted, "tasks", "--tasks", "a.yaml")[1] == []


def test_half_of_a_file_that_a_command_refuses_is_deleted(noted: Path) -> None:
    half = Path("made/off-grid")
    half.mkdir(parents=True)
    _call(noted, "off-grid")
    assert not half.exists()


def test_what_comes_from_the_hub_comes_first(noted: Path) -> None:
    assert real.main(["--made", "made"]) == 0
    assert [line.split()[1] for line in noted.read_text().splitlines()][:2] == [
        "huggingface_hub.cli.hf",
        "tools.hub_texts",
    ]
    assert "models/" not in noted.read_text()


def test_a_step_that_is_not_known(noted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _call(noted, "sweeep")
    assert "sweeep: no such step; known: sweep, init" in capsys.readouterr().err


def test_each_command_takes_its_options(
    noted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("vllm/bin/python", "llama-cpp"):
        Path(".engines", folder).mkdir(parents=True)
    _, ran = _call(noted)
    assert "tools.benchmarks.served" in ran
    for line in noted.read_text().splitlines():
        _, module, *words = line.split()
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(module).main()
        printed = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and word not in printed] == [], line


def test_texts_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(dataset: str, name: str, split: str) -> list[str]:
        assert (dataset, name, split) == ("allenai/c4", "en", "validation") or dataset == "Salesforce/wikitext"
        return ["= title =\n", "long " * 100, "other " * 100]

    monkeypatch.setattr(hub_texts, "rows", rows)
    (tmp_path / real.TEST).write_text("kept")
    hub_texts.main([str(tmp_path)])
    assert passages(f"{tmp_path / real.PASSAGES}:0-1") == "long " * 100
    assert passages(str(tmp_path / real.TEST)) == "kept"
    assert passages(str(tmp_path / real.OTHER)).splitlines() == ["= title =", "", "long " * 100, "other " * 100]
    assert {*os.listdir(tmp_path)} == {real.PASSAGES, real.TEST, real.OTHER}
