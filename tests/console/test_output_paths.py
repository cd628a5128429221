"""Outputs that options name are prepared before anything is computed; scores are printed whatever fails after them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError, WorkerError
from pipeline import evaluate
from pipeline.console.paths import prepare_file, prepare_folder

FOUND = {"perplexity": 7.5, "loss": 2.0149, "tokens": 100, "window": 16}


def test_a_folder_is_created_and_tried(tmp_path: Path) -> None:
    prepare_folder("--plots", str(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--plots .*/file/b: cannot be used: .* a file is in the way"):
        prepare_folder("--plots", str(tmp_path / "file" / "b"))


def test_a_file_has_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, name = prepare_file("--output", str(tmp_path / "report.html"))
    assert (storage.at(name), os.listdir(tmp_path)) == (str(tmp_path / "report.html"), [])
    with pytest.raises(InputError, match=r"no such folder .*missing; create it"):
        prepare_file("--output", str(tmp_path / "missing" / "report.html"))
    for folder in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(InputError, match="is a folder; give the name of a file in it"):
            prepare_file("--output", folder)
    monkeypatch.chdir(tmp_path)
    assert prepare_file("--output", "report.html")[1] == "report.html"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_perplexity_is_printed_though_tasks_fail(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise WorkerError("tasks: out of memory")

    monkeypatch.setattr(evaluate, "check_tasks", lambda *_: None)
    monkeypatch.setattr(evaluate, "_perplexity", lambda _: FOUND)
    monkeypatch.setattr(evaluate, "_scored_tasks", fail)
    assert evaluate.main(["model", "--text", "a.txt", "--tasks", "piqa", *options]) == 1
    shown = capsys.readouterr()
    assert "failed: tasks: out of memory" in shown.err
    if options:
        assert json.loads(shown.out) == {"model": "model", **FOUND}
    else:
        assert shown.out == "model: perplexity 7.5000 over 100 tokens, windows of 16\n"


def test_scratch_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert evaluate.main(["model", "--text", "a.txt", "--scratch", str(tmp_path / "file")]) == 2
    assert f"--scratch {tmp_path / 'file'}: cannot be used" in capsys.readouterr().err
