"""The real commands in forked children of a warm process: bounded in memory, file size and time, watched in what they
write. No Ray: they get `--in-process`.

A child that writes outside its folder is refused the write as if it had no permission, and the attempt is noted.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Before transformers and ray are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_AUTH_MODE": "disabled"}

from tests.end_to_end.jobs import COMMANDS, in_process

GROWTH_BYTES = 1 << 30  # resident at the peak, beyond the warm process
ADDRESS_BYTES = 6 << 30  # likewise, of addresses: allocators reserve more than they use
FILE_BYTES = 64 << 20
CASE_SECONDS = 60
SAID_CHARACTERS = 20_000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # audit event -> positions of the paths that it changes (and of their folders' descriptors)
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, None),),
}


@dataclass
class Ended:
    """How a command ended in its child. `code`: of the command; negative for a signal. `outside`: refused writes."""

    command: list[str]
    code: int
    said: str = ""
    printed: str = ""
    outside: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    seconds: float = 0.0


def run_commands(
    folder: Path,
    commands: Sequence[Sequence[str]],
    scratch: Path,
    prepare: Callable[[], None] = lambda: None,
    bounded: bool = True,
) -> list[Ended]:
    """Runs commands one after another, each in a child of its own, with `folder` as the working directory.

    `prepare` runs first in every child (hooks). `scratch`: for what they print, outside of `folder`.
    """
    return [_in_child(folder, command, scratch, prepare, bounded) for command in commands]


def in_child(action: Callable[[], None]) -> int:
    """Runs an action in a forked child; its exit status. This process stays without threads."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _in_child(folder: Path, command: Sequence[str], scratch: Path, prepare: Callable[[], None], bounded: bool) -> Ended:
    said, printed, report = (scratch / name for name in ("said", "printed", "report"))
    for path in (said, printed, report):
        path.write_bytes(b"")
    started = time.monotonic()

    def act() -> None:
        os.chdir(folder)
        tempfile.tempdir = str(folder / "tmp")
        _redirect(printed, said)
        outside: list[str] = []
        _watch_writes((folder.resolve(), scratch.resolve()), outside)
        before = _resident("VmRSS")
        if bounded:
            _bound()
        prepare()
        code = _run(command)
        sys.stdout.flush()
        sys.stderr.flush()
        ended = Ended(list(command), code, outside=outside, grown_bytes=_resident("VmHWM") - before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        report.write_text(json.dumps(asdict(ended)))

    status = in_child(act)
    text = report.read_text()
    ended = Ended(**json.loads(text)) if text else Ended(list(command), status or 1)
    ended.said = said.read_text(errors="replace")[:SAID_CHARACTERS]
    ended.printed = printed.read_text(errors="replace")[:SAID_CHARACTERS]
    ended.seconds = time.monotonic() - started
    return ended


def _run(command: Sequence[str]) -> int:
    """As `python -m pipeline.NAME` would end."""
    try:
        return int(COMMANDS[command[0]]([*command[1:], *in_process(command[0])]))
    except SystemExit as ended:  # of argparse
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


def _redirect(printed: Path, said: Path) -> None:
    """Descriptors and text layers as CPython sets them up in a UTF-8 locale."""
    for number, path in ((1, printed), (2, said)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="strict")
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)


def _bound() -> None:
    limit = _resident("VmSize") + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.alarm(CASE_SECONDS)  # nobody handles it: it ends the child


def _resident(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _watch_writes(allowed: tuple[Path, ...], outside: list[str]) -> None:
    roots = tuple(f"{root}{os.sep}" for root in allowed)
    places = (*map(str, allowed), "/dev/null")

    def located(path: Any, descriptor: Any) -> str:
        folder = os.getcwd()
        if isinstance(descriptor, int) and descriptor >= 0:
            folder = os.readlink(f"/proc/self/fd/{descriptor}")
        joined = os.path.join(folder, os.fsdecode(path))
        return os.path.join(os.path.realpath(os.path.dirname(joined)), os.path.basename(joined))

    def check(event: str, path: Any, descriptor: Any) -> None:
        if isinstance(path, int):  # an open file
            return
        where = located(path, descriptor)
        if not where.startswith((*roots, "/proc/self/")) and where not in places:
            outside.append(f"{event} {where}")
            raise PermissionError(13, "Permission denied", os.fsdecode(path))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES:
                check(event, path, None)
        elif event in CHANGES:
            for position, folder in CHANGES[event]:
                check(event, arguments[position], arguments[folder] if folder is not None else None)

    sys.addaudithook(hook)


@contextmanager
def snapshot(folder: Path, besides: Sequence[str]) -> Iterator[list[str]]:
    """Fills a list, when the block ends, with what changed below `folder` apart from the entries named on top of it."""
    changed: list[str] = []
    before = _state(folder, besides)
    yield changed
    after = _state(folder, besides)
    changed += [f"added {path}" for path in sorted(after.keys() - before.keys())]
    changed += [f"changed {path}" for path in sorted(before.keys()) if before[path] != after.get(path)]


def _state(folder: Path, besides: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in besides]
            files = [name for name in files if name not in besides]
        for name in (*folders, *files):
            stat = os.lstat(os.path.join(parent, name))
            changes = (stat.st_size, stat.st_mtime_ns) if name in files else ()  # a hard link changes the ctime
            found[os.path.relpath(os.path.join(parent, name), folder)] = (stat.st_mode, stat.st_ino, *changes)
    return found
