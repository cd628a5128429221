"""Runs commands in separate processes that can be killed, forked from a server that has imported everything.

With `inline`, commands get `--in-process`: then a kill hits driver and worker at a moment that the test chooses, and a
run takes half a second.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch

# Commands import these four when they need them: here once, before children are forked.
import lamina.modeling_lamina
import lamina.wrapper_lamina  # noqa: F401
import manifests.heal
import pipeline.evaluation.losses
import pipeline.job.stages
import pipeline.job.student_training
from pipeline.kernels.descent import Descent
from pipeline.units.units import Pair
from stores.ledger import Ledger
from tests.end_to_end.blackout import Disk
from tests.end_to_end.jobs import COMMANDS, Job, in_process
from tests.probing import probe_small_matrices
from workers.backward import BackwardRunner
from workers.forward_pass import CalibrationShard, ForwardRunner

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["__main__", __name__])
WAIT_S = 120.0


@dataclass(frozen=True)
class Hook:
    """The point at which a process kills its group, or waits: before or after the nth durable operation of a kind.

    Attributes:
        what: `commit` (a new key of the ledger), `file` (a rename or link to a final name), `remove` (of a folder),
            `unlink` (of a file), `sync` (an fsync of a file or folder), `step` (a step of training).
        match: count only operations whose ledger key or path contains this.
        after: just after the operation, instead of just before it.
        pause: create this file and wait until it is removed, instead of dying.
        disk: the folder that may lose unsynced changes with the process. Without `cut`, its next process keeps their
            record.
        cut: the seed of the losses of a power cut; None: the machine survives.
    """

    what: str
    nth: int = 1
    match: str = ""
    after: bool = False
    pause: str | None = None
    disk: str | None = None
    cut: int | None = None


class Child:
    """A command in a separate process group."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        hook: Hook | None = None,
        inline: bool = True,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """`prepare`: a function of a module, called first in the child."""
        self.log = log
        self.process: ForkServerProcess = CONTEXT.Process(
            target=_main, args=(name, list(arguments), str(log), hook, inline, prepare, dict(os.environ))
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Wait, and return the exit code, negative for a signal."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"no end after {timeout_s} s:\n{self.said}")
        return self.process.exitcode

    def kill(self) -> None:
        """Kill the whole group by SIGKILL, Ray's processes included."""
        with contextlib.suppress(ProcessLookupError):  # it has not created its group yet
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(WAIT_S)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def end_group(group: int) -> None:
    """Kill the remaining processes of a session."""
    for found in psutil.process_iter():
        try:
            if os.getsid(found.pid) == group:
                found.kill()
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue


def wait_for(path: Path, child: Child) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert child.process.is_alive(), child.said
        assert time.monotonic() < deadline, child.said
        time.sleep(0.01)


def _main(
    name: str,
    arguments: list[str],
    log: str,
    hook: Hook | None,
    inline: bool,
    prepare: Callable[[], None] | None,
    environment: dict[str, str],
) -> None:
    os.setsid()
    os.environ.update(environment)  # the server's may be older
    gc.freeze()  # what the server has imported
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    probe_small_matrices()
    if inline:
        _note_forward_work(Path(log).with_suffix(".units"))
    if hook is not None:
        _install(hook)
    if prepare is not None:
        prepare()
    raise SystemExit(COMMANDS[name]([*arguments, *(in_process(name) if inline else ())]))


def _note_forward_work(path: Path) -> None:
    """Write a line for each pass of a calibration shard through a layer, also when it recomputes lost states."""
    forward, replay, through = ForwardRunner.run, CalibrationShard._replay, BackwardRunner._through

    def note(line: str) -> None:
        with path.open("a") as file:
            file.write(line + "\n")

    def noted_forward(self: ForwardRunner, unit: Any) -> Any:
        note(unit.key)
        return forward(self, unit)

    def noted_replay(self: CalibrationShard, layer: int, *arguments: Any) -> Any:
        if self.lineage != Pair.lineage:
            note(f"replay/{self.lineage}/{layer}/{self.number}")
        return replay(self, layer, *arguments)

    def noted_through(self: BackwardRunner, unit: Any, layer: int, *arguments: Any, **options: Any) -> Any:
        note(unit.key if layer == unit.layer else f"replay/backward/{layer}/{unit.shard}")
        return through(self, unit, layer, *arguments, **options)

    ForwardRunner.run = noted_forward  # type: ignore[method-assign]
    CalibrationShard._replay = noted_replay  # type: ignore[method-assign,assignment]
    BackwardRunner._through = noted_through  # type: ignore[method-assign]


def _install(hook: Hook) -> None:
    seen = 0
    disk = None
    if hook.disk is not None:
        disk = Disk(Path(hook.disk), Path(hook.disk + ".shadow"))
        disk.watch()

    def reached(what: str, where: str, ended: bool) -> None:
        nonlocal seen
        if what != hook.what or hook.match not in where or ended is not hook.after:
            return
        seen += 1
        if seen != hook.nth:
            return
        if hook.pause is None:
            if disk is not None and hook.cut is None:
                disk.remember()
            elif disk is not None and hook.cut is not None:
                disk.cut(hook.cut)
            os.killpg(os.getpgid(0), signal.SIGKILL)
            raise AssertionError("killed")
        path = Path(hook.pause)
        path.touch()
        while path.exists():
            time.sleep(0.01)

    def around(what: str, owner: Any, attribute: str, position: int, final: Callable[[str], bool]) -> None:
        original = getattr(owner, attribute)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            where = str(arguments[position])
            if what == "sync":
                where = os.readlink(f"/proc/self/fd/{where}")
            if final(where):
                reached(what, where, ended=False)
            result = original(*arguments, **options)
            if final(where):
                reached(what, where, ended=True)
            return result

        setattr(owner, attribute, wrapped)

    commit = Ledger.commit

    def commit_new(self: Ledger, key: str, record: dict[str, Any]) -> None:
        new = self.get(key) is None
        if new:
            reached("commit", key, ended=False)
        commit(self, key, record)
        if new:
            reached("commit", key, ended=True)

    Ledger.commit = commit_new  # type: ignore[method-assign]
    around("step", Descent, "step", 1, lambda rate: True)
    around("file", os, "replace", 1, lambda path: ".partial" not in path and "lock.json" not in path)
    around("file", os, "link", 1, lambda path: ".partial" not in path)
    around("sync", os, "fsync", 0, lambda path: "lock.json" not in path)
    around("remove", shutil, "rmtree", 0, lambda path: True)
    around("unlink", os, "unlink", 0, lambda path: ".partial" not in path and "lock.json" not in path)


def small_steps() -> None:
    """Make steps of three windows in a child that heals."""
    manifests.heal.STEPS, manifests.heal.STEP_TOKENS = 1, 96


def many_checkpoints() -> None:
    """Make small steps, each with a checkpoint, in a child that heals."""
    small_steps()
    pipeline.job.student_training.CHECKPOINT_S = 0.0


def killed_again_and_again(made: Job, hook: Hook, most: int) -> Iterator[int]:
    """Run a job until it ends, at most `most` times; kill every second run, each at a later hook.

    Yield the number of each run, from 0, when it has ended.
    """
    for run in range(most):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook(hook.what, run // 2 + 1, "", hook.after))
        code = child.end()
        yield run
        if code == 0:
            return
        assert code == -signal.SIGKILL, child.said
