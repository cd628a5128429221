"""Let disks fail at every write of a job: `python -m tools.soak.disks [--stride N] [--only PART] [--job JOB]`.

- sweep: at the nth operation on RUN_DIR or OUTPUT (open, write, fsync, rename, link, mkdir, remove), for every n, the
  disk is full, over its quota, read-only, without permission, failing or stale; only then, or from then on.
- full: RUN_DIR and OUTPUT lie on a real filesystem of ever more bytes, until the job fits.
- vanished: the filesystem is unmounted at the nth operation and mounted again.

`full` and `vanished` need the right to mount. Each part is played for each job of `JOBS`.

Each time the command must end by itself with 0, 1 or 2, with a message that names path and cause, and without a
traceback. A directory with an index is a whole checkpoint. Once the disk works, the same command gives the bytes of an
undisturbed job.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import pipeline.job.heartbeat
from tests.end_to_end.jobs import COMMANDS, file_digests
from tests.failing_disk import Fault, failing
from tools.soak.sandbox import Ended, run_commands
from tools.soak.world import INDEX, RUN, SWEEP, VERIFY, Command, World, document, make_world

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)
HEARTBEAT_S = 0.05
FIRST_BYTES, STEP_BYTES, ENOUGH_BYTES = 64 * 1024, 96 * 1024, 64 * 1024 * 1024
UNTIL_EXIT = ExitStack()  # a child enters its fault here, and leaves it when it ends


@dataclass(frozen=True)
class DiskJob:
    """A job whose disks fail: changes of its manifest, its command, and the checkpoint that it writes."""

    changes: Mapping[str, Any]
    command: Command = RUN
    checkpoint: str = "output"

    def document(self) -> dict[str, Any]:
        """Return the manifest, or the sweep."""
        whole = document()
        for name, value in self.changes.items():
            section, _, key = name.rpartition(".")
            (whole[section] if section else whole)[key] = value
        return {name: value for name, value in whole.items() if value is not None}


DENSE: dict[str, Any] = {"calibration.propagate": "dense"}
LOSS_AWARE = {"method": "loss_aware"}
BITS = {"budget": {"bytes": 0.4}, "quantize": {"bits": "auto", "group": 32}}
POINTS = [
    {"name": "flat", "methods": [{"method": "flat_llm"}]},
    {"name": "loss", "methods": [LOSS_AWARE], "quantize": [{"bits": 8, "group": 32}], "save": [0.6]},
]
SWEPT = {
    "methods": None,
    "budget": None,
    "keep": [0.8, 0.6],
    "points": POINTS,
    "evaluation": {"perplexity": {"text": {"files": ["text.txt"]}, "window": 16}},
}
JOBS = {
    "walk": DiskJob({}),
    "loss_aware": DiskJob({**DENSE, "methods": [LOSS_AWARE]}),
    "corrected": DiskJob({**DENSE, "methods": [{**LOSS_AWARE, "correct": "output"}]}),
    "refined": DiskJob({"methods": [{"method": "lestd", "target": "both", "sweeps": 2, "refine_sweeps": 2}]}),
    "bits": DiskJob({**DENSE, "methods": [LOSS_AWARE], **BITS}),
    "sweep": DiskJob({**DENSE, **SWEPT}, SWEEP, "output/loss-0.6-int8"),
}


@dataclass
class Tally:
    """Exit codes by part, and the number of commands with faults."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, part: str, where: str, ended: Ended, faults: list[str]) -> None:
        """Count a command; print it if something is wrong with it."""
        self.outcomes.setdefault(part, Counter()).update(["cases", str(ended.code), *["failed"] * bool(faults)])
        if faults:
            print(f"FAILED {part}, {where}: exit {ended.code}\n  " + "\n  ".join(faults))
            print("  | " + ended.err[-900:].strip().replace("\n", "\n  | "), flush=True)

    def show(self) -> int:
        """Print the table. Return the number of failures."""
        columns = ("cases", "0", "1", "2", "failed")
        print(f"{'part':<20}" + "".join(f"{name:>8}" for name in columns))
        for part, counts in self.outcomes.items():
            print(f"{part:<20}" + "".join(f"{counts[column]:>8}" for column in columns))
        return sum(counts["failed"] for counts in self.outcomes.values())


@dataclass
class Stage:
    """A job in the folder where its cases are played.

    Attributes:
        below: the folder in which RUN_DIR and OUTPUT lie, with a slash.
        reference: digests of the checkpoint of an undisturbed job.
        operations: the number of operations of an undisturbed job.
    """

    world: World
    name: str
    job: DiskJob
    tally: Tally
    below: str = ""
    reference: dict[str, str] = field(default_factory=dict)
    operations: int = 0

    @property
    def folders(self) -> tuple[Path, Path]:
        """RUN_DIR and OUTPUT."""
        return self.world.work / f"{self.below}run", self.world.work / f"{self.below}output"

    def fresh(self) -> Path:
        """Make the folder again, with the manifest in it. Return the folder."""
        whole = self.job.document()
        whole |= {name: f"{self.below}{whole[name]}" for name in ("run_dir", "output")}
        (self.world.fresh() / "manifest.yaml").write_text(yaml.safe_dump(whole))
        return self.world.work

    def digests(self) -> dict[str, str]:
        """Return the digests of the checkpoint in the working folder."""
        return file_digests(self.world.work / self.below / self.job.checkpoint)

    def run(self, prepare: Callable[[], None] = lambda: None) -> Ended:
        """Run the job once."""
        return run_commands(self.world.work, [self.job.command], self.world.scratch, prepare, bounded=False)[0]

    def run_with(self, fault: Fault) -> Ended:
        """Run the job on a bad disk, with a heartbeat that is fast enough to be hit."""

        def prepare() -> None:
            _beat_fast()
            UNTIL_EXIT.enter_context(failing(fault))

        return self.run(prepare)

    def measure(self) -> None:
        """Run the job undisturbed; count its operations and keep its digests."""
        self.fresh()
        report, name = self.world.scratch / "count", self.job.command[0]

        def prepare() -> None:
            fault, command = Fault(self.folders), COMMANDS[name]
            UNTIL_EXIT.enter_context(failing(fault))

            def counted(arguments: list[str] | None) -> int:
                code = command(arguments)
                report.write_text(json.dumps(fault.seen))
                return code

            COMMANDS[name] = counted

        ended = self.run(prepare)
        assert ended.code == 0, ended.err
        self.reference, self.operations = self.digests(), int(report.read_text())
        print(f"{self.name}: {self.operations} operations in the job", file=sys.stderr, flush=True)

    def faults_of(self, ended: Ended, *causes: str) -> Iterator[str]:
        """Check exit code, message and OUTPUT of a job whose disk failed."""
        if ended.code not in (0, 1, 2):
            yield f"exit code {ended.code}"
        for words in ("Traceback", "internal error", "Logging error"):
            if words in ended.err:
                yield words
        at = max(ended.err.rfind("failed: "), ended.err.rfind("wrong input: "))
        if ended.code and (at < 0 or not any(cause in ended.err[at:] for cause in causes)):
            yield f"the message does not say why: none of {causes}"
        if ended.code and not any(name in ended.err[at:] for name in ("run", "output", "RUN_DIR")):
            yield "the message does not say where"
        output = f"{self.below}{self.job.checkpoint}"
        if (self.world.work / output / INDEX).exists():
            check = run_commands(self.world.work, [(VERIFY[0], output)], self.world.scratch)[0]
            if check.code != 0:
                yield f"OUTPUT has an index, but verify says:\n{check.out}{check.err}"
        elif ended.code == 0:
            yield "exit code 0, but no checkpoint"

    def faults_again(self) -> Iterator[str]:
        """Run the job again on a good disk: it ends with the same bytes."""
        ended = run_commands(self.world.work, [self.job.command], self.world.scratch)[0]
        if ended.code != 0:
            yield f"run again on a good disk: exit {ended.code}\n{ended.err[-600:]}"
        elif self.digests() != self.reference:
            yield "run again on a good disk: other bytes"


def sweep(stage: Stage, stride: int) -> None:
    """Fail at every operation, with the kinds of error in turn, once and for good in turn."""
    kinds = itertools.cycle(itertools.product(CODES, (True, False)))
    for nth in range(1, stage.operations + 1, stride):
        code, lasting = next(kinds)
        stage.fresh()
        ended = stage.run_with(Fault(stage.folders, code, nth, lasting))
        faults = [*stage.faults_of(ended, os.strerror(code)), *stage.faults_again()]
        where = f"operation {nth}, {errno.errorcode[code]}{' from then on' if lasting else ' once'}"
        stage.tally.add(f"{stage.name} sweep", where, ended, faults)


def full(stage: Stage, _: int) -> None:
    """Run on a filesystem that is really full, at every size."""
    stage.below = "disk/"
    for size_bytes in itertools.count(FIRST_BYTES, STEP_BYTES):
        disk = stage.fresh() / "disk"
        disk.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(disk))
        try:
            ended = stage.run(_beat_fast)
            faults = [*stage.faults_of(ended, "No space left", "bytes are needed", "free some room")]
            _mount("-o", f"remount,size={ENOUGH_BYTES}", str(disk))
            faults += stage.faults_again()
        finally:
            _unmount(disk)
        stage.tally.add(f"{stage.name} full", f"{size_bytes:,} bytes", ended, faults)
        if ended.code == 0:
            stage.below = ""
            return


def vanished(stage: Stage, stride: int) -> None:
    """Unmount the filesystem of RUN_DIR, and mount it again."""
    for nth in range(2, stage.operations, max(1, stride // 4)):
        real, run = stage.fresh() / "real", stage.folders[0]
        for folder in (real, run):
            folder.mkdir()
        _mount("--bind", str(real), str(run))
        try:
            ended = stage.run_with(_Unmounting(stage.folders, nth=nth))
        finally:
            _unmount(run)
        faults = [*stage.faults_of(ended, "No such file", "lock was lost", "missing", "mount lost")]
        _mount("--bind", str(real), str(run))
        try:
            # Unmounted before there was a lock in it, or after OUTPUT was whole: the job was another directory's.
            whole = ended.code == 0 and stage.digests() == stage.reference
            faults += [] if whole else stage.faults_again()
        finally:
            _unmount(run)
        stage.tally.add(f"{stage.name} vanished", f"operation {nth}", ended, faults)


class _Unmounting(Fault):
    """Unmounts the first folder at the nth operation."""

    def meet(self, kind: str, path: Any) -> None:
        super().meet(kind, path)
        if self.seen == self.nth:
            self.seen += 1
            _unmount(self.folders[0])


def _beat_fast() -> None:
    pipeline.job.heartbeat.BEAT_SECONDS = HEARTBEAT_S


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=False, stderr=subprocess.DEVNULL)


def can_mount(folder: Path) -> bool:
    """Return True if this process may mount a filesystem."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    if mounted:
        _unmount(folder)
    return mounted


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.disks")
    options.add_argument("--stride", type=int, default=1, help="every so many operations only")
    options.add_argument("--only", choices=("sweep", "full", "vanished"))
    options.add_argument("--job", choices=tuple(JOBS), help="this one only")
    options.add_argument("--directory", help="where to work; it is emptied at the end")
    arguments = options.parse_args(argv)
    tally, started = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disks-", dir=arguments.directory) as directory:
        torch.set_num_threads(1)
        world = make_world(Path(directory).resolve())
        mounts = can_mount(world.scratch)
        for name in (arguments.job,) if arguments.job else JOBS:
            stage = Stage(world, name, JOBS[name], tally)
            stage.measure()
            for part in (sweep, full, vanished) if mounts else (sweep,):
                if arguments.only in (None, part.__name__):
                    part(stage, arguments.stride)
    failed = tally.show()
    print(f"{time.monotonic() - started:.0f} s{'' if mounts else '; full and vanished left out: no right to mount'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
