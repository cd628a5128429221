"""Run the real commands in forked children of a warm process, bounded in memory, file size and time, without Ray.

A child that writes outside its folder is refused as if it had no permission, and the attempt is noted.
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
SHOWN_CHARACTERS = 20_000
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
    """The end of a command in its child.

    Attributes:
        code: exit code; negative for a signal.
        out, err: standard output and standard error.
        outside: writes that were refused.
    """

    command: list[str]
    code: int
    out: str = ""
    err: str = ""
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
    """Run commands one after another in `folder`, each in a child of its own.

    Args:
        scratch: a folder for the output of the commands, outside of `folder`.
        prepare: runs first in every child.
    """
    return [_run_in_child(folder, command, scratch, prepare, bounded) for command in commands]


def in_child(action: Callable[[], None]) -> int:
    """Run an action in a forked child; return its exit status. This process must have no threads."""
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


def _run_in_child(
    folder: Path, command: Sequence[str], scratch: Path, prepare: Callable[[], None], bounded: bool
) -> Ended:
    out, err, report = (scratch / name for name in ("out", "err", "report"))
    for path in (out, err, report):
        path.write_bytes(b"")
    started = time.monotonic()

    def act() -> None:
        os.chdir(folder)
        tempfile.tempdir = str(folder / "tmp")
        _redirect(out, err)
        outside: list[str] = []
        _watch_writes((folder.resolve(), scratch.resolve()), outside)
        before_bytes = _memory_bytes("VmRSS")
        if bounded:
            _bound()
        prepare()
        code = _run(command)
        sys.stdout.flush()
        sys.stderr.flush()
        ended = Ended(list(command), code, outside=outside, grown_bytes=_memory_bytes("VmHWM") - before_bytes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        report.write_text(json.dumps(asdict(ended)))

    status = in_child(act)
    text = report.read_text()
    ended = Ended(**json.loads(text)) if text else Ended(list(command), status or 1)
    ended.err = err.read_text(errors="replace")[:SHOWN_CHARACTERS]
    ended.out = out.read_text(errors="replace")[:SHOWN_CHARACTERS]
    ended.seconds = time.monotonic() - started
    return ended


def _run(command: Sequence[str]) -> int:
    """Run a command to the exit code of `python -m pipeline.NAME`."""
    try:
        return int(COMMANDS[command[0]]([*command[1:], *in_process(command[0])]))
    except SystemExit as ended:  # raised by argparse
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


def _redirect(out: Path, err: Path) -> None:
    """Set up descriptors and text layers as CPython does in a UTF-8 locale."""
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="strict")
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)


def _bound() -> None:
    limit_bytes = _memory_bytes("VmSize") + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.alarm(CASE_SECONDS)  # has no handler: it ends the child


def _memory_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _watch_writes(allowed: tuple[Path, ...], outside: list[str]) -> None:
    roots = (*(f"{root}{os.sep}" for root in allowed), "/proc/self/")
    places = (*map(str, allowed), "/dev/null")

    def check(event: str, path: Any, descriptor: Any) -> None:
        if isinstance(path, int):  # an open file
            return
        folder = os.getcwd()
        if isinstance(descriptor, int) and descriptor >= 0:
            folder = os.readlink(f"/proc/self/fd/{descriptor}")
        joined = os.path.join(folder, os.fsdecode(path))
        place = os.path.join(os.path.realpath(os.path.dirname(joined)), os.path.basename(joined))
        if not place.startswith(roots) and place not in places:
            outside.append(f"{event} {place}")
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
    """Yield a list. When the block ends it holds the changes below `folder`, apart from the entries `besides` in it."""
    changed: list[str] = []
    before = _state(folder, besides)
    yield changed
    after = _state(folder, besides)
    changed += [f"added {path}" for path in sorted(after.keys() - before.keys())]
    changed += [f"changed {path}" for path in sorted(before) if before[path] != after.get(path)]


def _state(folder: Path, besides: Sequence[str]) -> dict[str, tuple[int, ...]]:
    state: dict[str, tuple[int, ...]] = {}
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in besides]
            files = [name for name in files if name not in besides]
        for name in (*folders, *files):
            stat = os.lstat(os.path.join(parent, name))
            changes = (stat.st_size, stat.st_mtime_ns) if name in files else ()  # a hard link changes the ctime
            state[os.path.relpath(os.path.join(parent, name), folder)] = (stat.st_mode, stat.st_ino, *changes)
    return state
