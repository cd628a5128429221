"""Runs a command in a child process, so that each end of it is reported in a line, with a documented exit code.

Native code ends a process without an exception: Ray's core does when its raylet is gone, a failed check aborts, and the
system kills a process for lack of memory. The parent, which imports nothing slow, waits for the command, passes signals
on, and reports such an end: on the terminal, and in the run directory that the command is using.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import Interrupted, LaminaError, reason
from pipeline.console.signals import RESUME, STOP_SIGNALS

if TYPE_CHECKING:
    from pipeline.console.exit_status import Ending

EXIT_CODES = (0, 1, 2, Interrupted.exit_code)
WATCHED = (*STOP_SIGNALS, signal.SIGCHLD)
FROM_TERMINAL = 128  # SI_KERNEL: Ctrl-C, which all foreground processes of the terminal receive
NOTICE_SECONDS = 0.1  # within which the command receives a signal to the process group
MAX_BYTES = 65536  # of a pipe
PR_SET_PDEATHSIG = 1  # of Linux's prctl

_told: int | None = None  # in the command's process: the pipe to its parent


def supervise() -> None:
    """Return in a child process. This process waits for it, and ends with its exit code.

    Call it before any thread starts. If this process is killed, so is the child. Do nothing except on Linux.
    """
    global _told
    if sys.platform != "linux":  # others lack sigwaitinfo, and a signal for a parent's end
        return
    facts_end, tell_end = _pipe()
    noticed, notice_end = _pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the system forgets how a child ended
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    sys.stdout.flush()
    parent = os.getpid()
    child = os.fork()
    for end in (tell_end, notice_end) if child else (facts_end, noticed):
        os.close(end)
    if child:
        status, stopped_by = _await_end(child, noticed)
        os._exit(_report(status, _facts(facts_end), stopped_by))
    _end_with(parent)
    _told = tell_end
    signal.set_wakeup_fd(notice_end, warn_on_full_buffer=False)  # Python writes the number of each signal there
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    atexit.register(tell, leaves=True)


def tell(**facts: Any) -> None:
    """Tell the supervisor, if there is one, a fact about this command; it counts when this process ends.

    `code`: the command has reported its end, with this exit code. `leaves`: Python ends this process. `run`: what
    `pipeline.job.run_record` records of a run that has begun; None when its record is written.
    """
    if _told is not None:
        os.write(_told, json.dumps(facts).encode() + b"\n")


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, as if the two were one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(Interrupted.exit_code)


def _await_end(child: int, noticed: int) -> tuple[int, str | None]:
    """Pass signals on until the child ends. Return its wait status, and the name of the last signal.

    A signal that the child has received itself is not passed on, because a second one stops a job at once.
    """
    stopped_by = None
    while True:
        came = signal.sigwaitinfo(WATCHED)
        if came.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status, stopped_by
            continue
        stopped_by = signal.Signals(came.si_signo).name
        if came.si_code != FROM_TERMINAL and not _was_noticed(noticed):
            os.kill(child, came.si_signo)
            _was_noticed(noticed)


def _was_noticed(noticed: int) -> bool:
    """Wait a moment for the child's notice of a signal, and clear it. Return False if none came."""
    if not select.select([noticed], [], [], NOTICE_SECONDS)[0]:
        return False
    return bool(os.read(noticed, MAX_BYTES))


def _facts(facts_end: int) -> dict[str, Any]:
    """Return the last value that the child reported of each fact."""
    facts: dict[str, Any] = {}
    try:
        lines = os.read(facts_end, MAX_BYTES).decode().split("\n")[:-1]
    except BlockingIOError:  # nothing
        lines = []
    for line in lines:
        facts |= json.loads(line)
    return facts


def _report(status: int, facts: Mapping[str, Any], stopped_by: str | None) -> int:
    """Report an end that the command has not reported itself. Return the exit code."""
    if "code" in facts:
        return int(facts["code"])  # even if a library crashes while Python shuts down
    code = os.waitstatus_to_exitcode(status)
    if code == Interrupted.exit_code or (facts.get("leaves") and code in EXIT_CODES):
        return code
    from pipeline.console.printing import say

    ending = ending_of_process(code, stopped_by)
    try:
        say(ending.line, sys.stderr)
        if facts.get("run"):
            _record(facts["run"], ending)
    except (LaminaError, OSError) as error:
        print(f"how this run ended could not be entered: {reason(error)}", file=sys.stderr)
    return ending.exit_code


def ending_of_process(code: int, stopped_by: str | None) -> Ending:
    """Return the message and the exit code of a process that ended without a line. `code`: negative for a signal."""
    from pipeline.console.exit_status import Ending

    names = (known.name for known in signal.Signals if known == -code)
    name = next(names, f"signal {-code}") if code < 0 else None
    if stopped_by or -code in STOP_SIGNALS:
        return Ending(Interrupted.exit_code, f"stopped by {stopped_by or name}; {RESUME}")
    if name == "SIGKILL":
        cause = "was killed (SIGKILL), by a person, a scheduler, or the system for lack of memory (`dmesg` says so)"
    elif name:
        cause = f"crashed in native code ({name}); its last lines are above"
    else:
        cause = f"was ended without an error (exit code {code}) by native code, as Ray's does when its raylet is gone"
    logs = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "session_latest", "logs")
    more = f"; raylet.out in {logs} may say more" if logs.is_dir() else ""
    return Ending(1, f"the command's process {cause}{more}; fix the cause, then {RESUME}")


def _record(run: Mapping[str, Any], ending: Ending) -> None:
    """Write the record of a run's end, unless another process uses its run directory by now."""
    from stores.lock import read_lock
    from stores.run_directory import ENDED
    from stores.storage import open_storage

    storage = open_storage(run["place"])
    owner = read_lock(storage) or {}
    if owner.get("token") != run["record"]["run"]:
        return
    phase = owner["progress"].get("phase")
    entered = {
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "error": ending.message,
        "where": f"phase {phase}" if phase else None,
        "ended": time.time(),
        "seconds": time.time() - owner["started"],
    }
    storage.replace(ENDED, json.dumps({**run["record"], **entered}).encode())
