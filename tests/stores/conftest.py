"""Fixtures that show what a process leaves that is killed between any two changes to the disk, and damage files."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.failing_disk import flip

CHANGES = ("fsync", "link", "mkdir", "remove", "rename", "replace", "rmdir", "unlink")
LINK, MKDIR = os.link, os.mkdir


@pytest.fixture
def killed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return `killed_anywhere(act, check, prepare)`, which checks what a process leaves that dies in act(directory).

    The kernel keeps the writes of a killed process: its death before a change to the disk leaves the directory as it is
    then. So act(directory) runs once, and the directory is copied before each change. check(directory) checks each
    copy, in order and at the original path, and then the end. prepare(directory), if given, fills the directory first.
    Returns the number of copies.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it would only take time

    def run(
        act: Callable[[Path], None], check: Callable[[Path], None], prepare: Callable[[Path], None] = lambda _: None
    ) -> int:
        directory = tmp_path / "killed"
        directory.mkdir()
        prepare(directory)
        with monkeypatch.context() as patch:
            copies = _copied_before_changes(directory, patch.setattr)
            act(directory)
        copies.append(directory.rename(tmp_path / "end"))
        for copy in copies:
            copy.rename(directory)
            check(directory)
            shutil.rmtree(directory)
        return len(copies) - 1

    return run


def _copied_before_changes(directory: Path, patch: Callable[[Any, str, Any], None]) -> list[Path]:
    """Copy a directory before each change that this process makes to the disk. Return the growing list of copies."""
    copies: list[Path] = []
    changing = threading.RLock()  # stores write from several threads

    def copied(real: Callable[..., Any], is_change: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            with changing:
                if is_change(*arguments):
                    copies.append(directory.with_name(f"killed-{len(copies)}"))
                    _copy(directory, copies[-1])
                return real(*arguments, **options)

        return change

    opened = os.open
    for name in CHANGES:
        patch(os, name, copied(getattr(os, name)))
    patch(os, "open", copied(opened, lambda path, flags, *_: bool(flags & os.O_CREAT)))
    return copies


def _copy(directory: Path, copy: Path) -> None:
    """Copy a directory with its times. Names of one file remain names of one file."""
    first: dict[int, Path] = {}
    for folder, _, names in os.walk(directory):
        target = copy / Path(folder).relative_to(directory)
        MKDIR(target)
        for name in names:
            source = Path(folder, name)
            inode = source.stat().st_ino
            if inode in first:
                LINK(first[inode], target / name)
            else:
                first[inode] = target / name
                shutil.copy2(source, target / name)


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "flipped-end": _flip_last,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut-to-nothing": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "deleted": lambda path: path.unlink(),
}


@pytest.fixture(params=list(DAMAGES))
def damage(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    """Return a function that damages a file, in one of several ways."""
    return DAMAGES[request.param]
