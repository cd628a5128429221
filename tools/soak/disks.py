"""Disks that fail at every write of a job: `python -m tools.soak.disks [--stride N] [--only PART] [--job JOB]`.

- sweep: at the nth operation on RUN_DIR or OUTPUT (open, write, fsync, rename, link, mkdir, remove), for every n, the
  disk is full, over its quota, read-only, without permission, failing or stale; only then, or from then on.
- full: RUN_DIR and OUTPUT lie on a real filesystem of ever more bytes, until the job fits.
- vanished: the filesystem is taken away (umount) at the nth operation and mounted again. These two need to mount.

All three are done for each job of `JOBS`.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import pipeline.job.heartbeat
from tests.end_to_end.jobs import COMMANDS, file_digests
from tools.soak.case import INDEX, RUN, SWEEP, VERIFY, Command
from tools.soak.faults import Fault, failing
from tools.soak.sandbox import Ended, run_commands
from tools.soak.world import World, document, make_world

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)
HEARTBEAT_S = 0.05
FIRST_BYTES, STEP_BYTES = 64 * 1024, 96 * 1024
ROOM_BYTES = 64 * 1024 * 1024
HELD = ExitStack()  # of a child: its disk fails to its end


@dataclass(frozen=True)
class DiskJob:
    """A job whose disks fail: its manifest's changes, its command, and the checkpoint that it writes."""

    changes: Mapping[str, Any]
    command: Command = RUN
    checkpoint: str = "output"

    def document(self) -> dict[str, Any]:
        """The manifest, or the sweep."""
        whole = document()
        for name, value in self.changes.items():
            section, _, key = name.rpartition(".")
            (whole[section] if section else whole)[key] = value
        return {name: value for name, value in whole.items() if value is not None}


DENSE: dict[str, Any] = {"calibration.propagate": "dense"}
LOSS_AWARE = {"method": "loss_aware"}
JOBS = {
    "walk": DiskJob({}),
    "loss_aware": DiskJob({**DENSE, "methods": [LOSS_AWARE]}),
    "corrected": DiskJob({**DENSE, "methods": [{**LOSS_AWARE, "correct": "output"}]}),
    "refined": DiskJob({"methods": [{"method": "lestd", "target": "both", "sweeps": 2, "refine_sweeps": 2}]}),
    "bits": DiskJob(
        {
            **DENSE,
            "methods": [LOSS_AWARE],
            "budget": {"bytes": 0.4},
            "quantize": {"bits": "auto", "group": 32},
        }
    ),
    "sweep": DiskJob(
        {
            **DENSE,
            "methods": None,
            "budget": None,
            "keep": [0.8, 0.6],
            "points": [
                {"name": "flat", "methods": [{"method": "flat_llm"}]},
                {"name": "loss", "methods": [LOSS_AWARE], "quantize": [{"bits": 8, "group": 32}], "save": [0.6]},
            ],
            "evaluation": {"perplexity": {"text": {"files": ["text.txt"]}, "window": 16}},
        },
        SWEEP,
        "output/loss-0.6-int8",
    ),
}


@dataclass
class Stage:
    """A job in the folder where its cases are played; `reference`: the digests of an undisturbed job's checkpoint."""

    world: World
    name: str
    job: DiskJob
    reference: dict[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """Where a case is played."""
        return self.world.work

    @property
    def scratch(self) -> Path:
        """For counts and printed lines."""
        return self.world.scratch

    def fresh(self, below: str = "") -> None:
        """The folder as new, the manifest in it; RUN_DIR and OUTPUT lie in the folder `below`."""
        self.world.fresh()
        whole = self.job.document()
        whole |= {name: f"{below}{whole[name]}" for name in ("run_dir", "output")}
        (self.work / "manifest.yaml").write_text(yaml.safe_dump(whole))

    def digests(self) -> dict[str, str]:
        """Of the checkpoint in the working folder."""
        return file_digests(self.work / self.job.checkpoint)


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
        print(f"{'part':<20}" + "".join(f"{name:>8}" for name in columns))
        for part, counts in self.outcomes.items():
            print(f"{part:<20}" + "".join(f"{counts[column]:>8}" for column in columns))


def sweep(stage: Stage, tally: Tally, total: int, stride: int) -> None:
    """Every operation, the kinds of error in turn, once and for good in turn."""
    print(f"{stage.name}: {total} operations in the job", file=sys.stderr, flush=True)
    kinds = itertools.cycle(itertools.product(CODES, (True, False)))
    for nth in range(1, total + 1, stride):
        code, lasting = next(kinds)
        stage.fresh()
        what = f"operation {nth}, {errno.errorcode[code]}{' from then on' if lasting else ' once'}"
        ended = _run(stage, Fault(_places(stage), code, nth, lasting))
        tally.add(
            f"{stage.name} sweep", what, ended, [*_said(ended, os.strerror(code)), *_left(stage, ended), *_again(stage)]
        )


def full(stage: Stage, tally: Tally) -> None:
    """A filesystem that is really full, at every size."""
    size = FIRST_BYTES
    while True:
        stage.fresh("disk/")
        with _mounted(stage, size):
            ended = _run(stage, None)
            faults = [*_said(ended, "No space left", "bytes are needed", "GB free")]
            faults += _left(stage, ended, "disk/")
            _mount(["-o", f"remount,size={ROOM_BYTES}", str(stage.work / "disk")])
            faults += _again(stage, "disk/")
        tally.add(f"{stage.name} full", f"{size:,} bytes", ended, faults)
        if ended.code == 0:
            return
        size += STEP_BYTES


def vanished(stage: Stage, tally: Tally, total: int, stride: int) -> None:
    """RUN_DIR's filesystem goes away, and comes back."""
    for nth in range(2, total, max(1, stride // 4)):
        stage.fresh()
        (stage.work / "real").mkdir()
        (stage.work / "run").mkdir()
        _mount(["--bind", str(stage.work / "real"), str(stage.work / "run")])
        fault = Fault((stage.work / "run", stage.work / "output"), nth=nth)
        run = str(stage.work / "run")
        try:
            ended = _run(stage, fault, lambda run=run: subprocess.run(["umount", "-l", run], check=False))  # type: ignore[misc]
        finally:
            subprocess.run(["umount", "-l", run], check=False, stderr=subprocess.DEVNULL)
        faults = [*_said(ended, "No such file", "lock was lost", "missing", "mount lost"), *_left(stage, ended)]
        _mount(["--bind", str(stage.work / "real"), run])
        try:
            # Taken away before there was a lock in it, or after OUTPUT was whole: the job was another directory's.
            whole = ended.code == 0 and stage.digests() == stage.reference
            faults += [] if whole else _again(stage)
        finally:
            subprocess.run(["umount", "-l", run], check=False)
        tally.add(f"{stage.name} vanished", f"operation {nth}", ended, faults)


def _places(stage: Stage) -> tuple[Path, ...]:
    return stage.work / "run", stage.work / "output"


def _count(stage: Stage) -> int:
    """How many operations there are in an undisturbed job, which gives the reference, too."""
    stage.fresh()
    report = stage.scratch / "count"

    def count() -> None:
        fault = Fault(_places(stage))
        HELD.enter_context(failing(fault))
        name = stage.job.command[0]
        command = COMMANDS[name]

        def run(arguments: list[str] | None) -> int:
            code = command(arguments)
            report.write_text(json.dumps(fault.seen))
            return code

        COMMANDS[name] = run

    ended = run_commands(stage.work, [stage.job.command], stage.scratch, count, bounded=False)[0]
    assert ended.code == 0, ended.said
    stage.reference = stage.digests()
    return int(report.read_text())


def _run(stage: Stage, fault: Fault | None, strike: Callable[[], object] | None = None) -> Ended:
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

    return run_commands(stage.work, [stage.job.command], stage.scratch, prepare, bounded=False)[0]


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


def _left(stage: Stage, ended: Ended, below: str = "") -> Iterator[str]:
    """What an index stands for is whole."""
    output = f"{below}{stage.job.checkpoint}"
    found = stage.work / output
    if not (found / INDEX).exists():
        if ended.code == 0:
            yield "exit code 0, but no checkpoint"
        return
    check = run_commands(stage.work, [(VERIFY[0], output)], stage.scratch)[0]
    if check.code != 0:
        yield f"OUTPUT has an index, but verify says:\n{check.printed}{check.said}"


def _again(stage: Stage, below: str = "") -> Iterator[str]:
    ended = run_commands(stage.work, [stage.job.command], stage.scratch)[0]
    if ended.code != 0:
        yield f"run again on a good disk: exit {ended.code}\n{ended.said[-600:]}"
    elif file_digests(stage.work / f"{below}{stage.job.checkpoint}") != stage.reference:
        yield "run again on a good disk: other bytes"


@contextmanager
def _mounted(stage: Stage, size_bytes: int) -> Iterator[None]:
    disk = stage.work / "disk"
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
    options.add_argument("--job", choices=tuple(JOBS), help="this one only")
    options.add_argument("--directory", help="where to work; nothing is kept")
    arguments = options.parse_args(argv)
    tally, started = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disks-", dir=arguments.directory) as directory:
        torch.set_num_threads(1)
        world = make_world(Path(directory).resolve())
        mounts = can_mount(world.scratch)
        for name in (arguments.job,) if arguments.job else JOBS:
            stage = Stage(world, name, JOBS[name])
            total = _count(stage)
            if arguments.only in (None, "sweep"):
                sweep(stage, tally, total, arguments.stride)
            if arguments.only in (None, "full") and mounts:
                full(stage, tally)
            if arguments.only in (None, "vanished") and mounts:
                vanished(stage, tally, total, arguments.stride)
    tally.show()
    print(f"{time.monotonic() - started:.0f} s{'' if mounts else '; full and vanished left out: no right to mount'}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
