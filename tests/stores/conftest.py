"""Fixtures that kill a process between any two of its changes to the disk, and that damage files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("fsync", "link", "mkdir", "remove", "rename", "replace", "rmdir", "unlink")
KILLED = 9


@pytest.fixture
def killed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return `killed_anywhere(act, check, prepare)`, which runs act(directory) in children that are killed.

    The first child dies before its first change to the disk, the second before its second, and so on, until one
    survives. prepare(directory), if given, fills the directory of each; check(directory) checks it after each. Returns
    the number of deaths.
    """
    # The kernel keeps the writes of a killed process, so that fsync would only take time.
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def run(
        act: Callable[[Path], None], check: Callable[[Path], None], prepare: Callable[[Path], None] = lambda _: None
    ) -> int:
        deaths = 0
        while True:
            directory = tmp_path / f"killed-{deaths}"
            directory.mkdir()
            prepare(directory)
            finished = _run_child(act, directory, deaths)
            check(directory)
            if finished:
                return deaths
            deaths += 1
            assert deaths < 500, "the action never ends"

    return run


def _run_child(act: Callable[[Path], None], directory: Path, allowed: int) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _die_after(allowed)
            act(directory)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), "the action failed in the child, see its traceback"
    return code == 0


def _die_after(allowed: int) -> None:
    left = allowed

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os._exit(KILLED)
            left -= 1
            return real(*arguments, **options)

        return change

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    opened = os.open
    created = counted(opened)
    os.open = lambda path, flags, *rest, **options: (  # type: ignore[assignment]
        (created if flags & os.O_CREAT else opened)(path, flags, *rest, **options)
    )


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
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
