"""Disks that fail at every write of a job: `python -m tools.soak.disks [--stride N] [--only PART]`.

- sweep: at the nth operation on RUN_DIR or OUTPUT (open, write, fsync, rename, link, mkdir, remove), for every n, the
  disk is full, over its quota, read-only, without permission, failing or stale; only then, or from then on.
- full: RUN_DIR and OUTPUT lie on a real filesystem of ever more bytes, until the job fits.
- vanished: the filesystem is taken away (umount) at the nth operation and mounted again. These two need to mount.

Each time the command must end by itself with 0, 1 or 2, a message with path and cause, and no traceback; a directory
with an index is a whole checkpoint; and the same command, once the disk works, gives the bytes of an undisturbed job.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pipeline.job.heartbeat
from tests.end_to_end.jobs import file_digests
from tools.soak.case import INDEX, RUN, VERIFY
from tools.soak.faults import Fault, failing
from tools.soak.sandbox import Ended, run_commands, use_no_ray
from tools.soak.world import World, make_world

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)
HEARTBEAT_S = 0.05
FIRST_BYTES, STEP_BYTES = 64 * 1024, 96 * 1024
ROOM_BYTES = 64 * 1024 * 1024
HELD = ExitStack()  # of a child: its disk fails to its end


@dataclass
class Tally:
    """How the commands ended, by part."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    failed: int = 0

    def add(self, part: str, what: str, ended: Ended, faults: list[str]) -> None:
        """One command; prints it when something is wrong with it."""
        counts = self.outcomes.setdefault(part, Counter())
        counts.update(["cases", str(ended.code)])
        if faults:
            self.failed += 1
            counts["failed"] += 1
            print(f"FAILED {part}, {what}: exit {ended.code}\n  " + "\n  ".join(faults))
            print("  | " + ended.said[-900:].strip().replace("\n", "\n  | "), flush=True)

    def show(self) -> None:
        """The table."""
        columns = ("cases", "0", "1", "2", "failed")
        print("".join(f"{name:>10}" for name in ("part", *columns)))
        for part, counts in self.outcomes.items():
            print("".join(f"{value:>10}" for value in (part, *(counts[column] for column in columns))))


def sweep(world: World, tally: Tally, stride: int) -> None:
    """Every operation, the kinds of error in turn, once and for good in turn."""
    total = _count(world)
    print(f"sweep: {total} operations in a job", file=sys.stderr, flush=True)
    kinds = itertools.cycle(itertools.product(CODES, (True, False)))
    for nth in range(1, total + 1, stride):
        code, lasting = next(kinds)
        world.fresh()
        what = f"operation {nth}, {errno.errorcode[code]}{' from then on' if lasting else ' once'}"
        ended = _run(world, Fault(_places(world), code, nth, lasting))
        tally.add("sweep", what, ended, [*_said(ended, os.strerror(code)), *_left(world, ended), *_again(world)])


def full(world: World, tally: Tally) -> None:
    """A filesystem that is really full, at every size."""
    size = FIRST_BYTES
    while True:
        world.fresh()
        with _mounted(world, size):
            (world.work / "manifest.yaml").write_text(
                (world.work / "manifest.yaml").read_text().replace("output: output", "output: disk/output")
                .replace("run_dir: run", "run_dir: disk/run")
            )  # fmt: skip
            ended = _run(world, None)
            faults = [*_said(ended, "No space left", "bytes are needed", "GB free")]
            faults += _left(world, ended, "disk/output")
            _mount(["-o", f"remount,size={ROOM_BYTES}", str(world.work / "disk")])
            faults += _again(world, "disk/output")
        tally.add("full", f"{size:,} bytes", ended, faults)
        if ended.code == 0:
            return
        size += STEP_BYTES


def vanished(world: World, tally: Tally, stride: int) -> None:
    """RUN_DIR's filesystem goes away, and comes back."""
    total = _count(world)
    for nth in range(2, total, max(1, stride // 4)):
        world.fresh()
        (world.work / "real").mkdir()
        (world.work / "run").mkdir()
        _mount(["--bind", str(world.work / "real"), str(world.work / "run")])
        fault = Fault((world.work / "run", world.work / "output"), nth=nth)
        run = str(world.work / "run")
        try:
            ended = _run(world, fault, lambda run=run: subprocess.run(["umount", "-l", run], check=False))  # type: ignore[misc]
        finally:
            subprocess.run(["umount", "-l", run], check=False, stderr=subprocess.DEVNULL)
        faults = [*_said(ended, "No such file", "lock was lost", "missing", "mount lost"), *_left(world, ended)]
        _mount(["--bind", str(world.work / "real"), run])
        try:
            # Taken away before there was a lock in it, or after OUTPUT was whole: the job was another directory's.
            whole = ended.code == 0 and file_digests(world.work / "output") == world.reference["compressed"]
            faults += [] if whole else _again(world)
        finally:
            subprocess.run(["umount", "-l", run], check=False)
        tally.add("vanished", f"operation {nth}", ended, faults)


def _places(world: World) -> tuple[Path, ...]:
    return world.work / "run", world.work / "output"


def _count(world: World) -> int:
    """How many operations there are in a job."""
    world.fresh()
    report = world.scratch / "count"

    def count() -> None:
        fault = Fault(_places(world))
        HELD.enter_context(failing(fault))
        main = sys.modules["pipeline.run"]
        real = main.run_job  # type: ignore[attr-defined]

        def run_job(*arguments: object, **options: object) -> object:
            found = real(*arguments, **options)
            report.write_text(json.dumps(fault.seen))
            return found

        main.run_job = run_job  # type: ignore[attr-defined]

    ended = run_commands(world.work, [RUN], world.scratch, count, bounded=False)[0]
    assert ended.code == 0, ended.said
    return int(report.read_text())


def _run(world: World, fault: Fault | None, strike: Callable[[], object] | None = None) -> Ended:
    """The job on a bad disk, with a heartbeat that is fast enough to be hit."""

    def prepare() -> None:
        pipeline.job.heartbeat.BEAT_SECONDS = HEARTBEAT_S
        if fault is None:
            return
        if strike is not None:
            meet = fault.meet

            def meet_once(kind: str, path: object) -> None:
                meet(kind, path)
                if fault.seen == fault.nth:
                    fault.seen += 1
                    strike()

            fault.meet = meet_once  # type: ignore[method-assign]
        HELD.enter_context(failing(fault))

    return run_commands(world.work, [RUN], world.scratch, prepare, bounded=False)[0]


def _said(ended: Ended, *causes: str) -> Iterator[str]:
    if ended.code not in (0, 1, 2):
        yield f"exit code {ended.code}"
    for words in ("Traceback", "internal error", "Logging error"):
        if words in ended.said:
            yield words
    at = max(ended.said.rfind("failed: "), ended.said.rfind("wrong input: "))
    if ended.code and (at < 0 or not any(cause in ended.said[at:] for cause in causes)):
        yield f"the message does not say why: none of {causes}"
    if ended.code and not any(name in ended.said[at:] for name in ("run", "output", "RUN_DIR")):
        yield "the message does not say where"


def _left(world: World, ended: Ended, output: str = "output") -> Iterator[str]:
    """What an index stands for is whole."""
    found = world.work / output
    if not (found / INDEX).exists():
        if ended.code == 0:
            yield "exit code 0, but no checkpoint"
        return
    check = run_commands(world.work, [(VERIFY[0], output)], world.scratch)[0]
    if check.code != 0:
        yield f"OUTPUT has an index, but verify says:\n{check.printed}{check.said}"


def _again(world: World, output: str = "output") -> Iterator[str]:
    ended = run_commands(world.work, [RUN], world.scratch)[0]
    if ended.code != 0:
        yield f"run again on a good disk: exit {ended.code}\n{ended.said[-600:]}"
    elif file_digests(world.work / output) != world.reference["compressed"]:
        yield "run again on a good disk: other bytes"


@contextmanager
def _mounted(world: World, size_bytes: int) -> Iterator[None]:
    disk = world.work / "disk"
    disk.mkdir()
    _mount(["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(disk)])
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _mount(arguments: list[str]) -> None:
    subprocess.run(["mount", *arguments], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a filesystem."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        return False
    subprocess.run(["umount", "-l", str(folder)], check=True)
    return True


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.disks")
    options.add_argument("--stride", type=int, default=1, help="every so many operations only")
    options.add_argument("--only", choices=("sweep", "full", "vanished"))
    options.add_argument("--directory", help="where to work; nothing is kept")
    arguments = options.parse_args(argv)
    tally, started = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disks-", dir=arguments.directory) as directory:
        use_no_ray()
        world = make_world(Path(directory).resolve())
        mounts = can_mount(world.scratch)
        if arguments.only in (None, "sweep"):
            sweep(world, tally, arguments.stride)
        if arguments.only in (None, "full") and mounts:
            full(world, tally)
        if arguments.only in (None, "vanished") and mounts:
            vanished(world, tally, arguments.stride)
    tally.show()
    print(f"{time.monotonic() - started:.0f} s{'' if mounts else '; full and vanished left out: no right to mount'}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
