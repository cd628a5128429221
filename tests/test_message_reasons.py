"""Messages about files name the reason, not an error's number or its repr; values are shown as YAML writes them."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

from manifests.calibration import Text
from manifests.errors import InputError, reason
from manifests.loading import _as_written, load_manifest
from manifests.sweep import parse_sweep

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("manifests", "pipeline", "stores", "workers")


def test_a_reason_has_no_number_and_no_path(tmp_path: Path) -> None:
    error = OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/x/y")
    assert "[Errno 2]" in str(error)
    assert reason(error) == "No such file or directory"
    assert reason(ValueError("embedded null byte")) == "embedded null byte"
    assert reason(OSError()) == "OSError"
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(InputError, match=rf"manifest {path}: cannot be read \({said}\); give the path of a YAML"):
            load_manifest(path)


def test_values_are_shown_as_yaml_writes_them() -> None:
    """Points of a sweep are manifests of blocks that are checked already: neither tuples nor classes are shown."""
    document = {"version": 1, "model": {"source": "m"}, "output": "o", "run_dir": "r", "points": [{"methods": []}]}
    with pytest.raises(InputError, match=r"or none, beside `quantize` \(given: \[\]\)"):
        parse_sweep(document)
    given = (Text(files=("a.txt",)), {"text": (1, 2)})
    assert _as_written(given) == [{"files": ["a.txt"]}, {"text": [1, 2]}]


def bare_errors(tree: ast.AST) -> list[int]:
    """Lines where an f-string shows an OSError by its `str`, which has its number and the repr of its path."""
    lines = []
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type):
        kinds = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else set()
        if not kinds & {"OSError", "FileNotFoundError", "PermissionError", "NotADirectoryError"}:
            continue
        shown = (node.value for part in handler.body for node in ast.walk(part) if isinstance(node, ast.FormattedValue))
        lines += [value.lineno for value in shown if isinstance(value, ast.Name) and value.id == handler.name]
    return lines


@pytest.mark.slow
def test_no_message_shows_an_error_of_the_system_as_it_is() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line in bare_errors(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not wrong
