"""Whatever ends a command's process, the command ends with a line and an exit code of the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.console.supervision import ending_of_process
from stores.lock import RunLock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="commands are supervised on Linux only"),
]
WAIT_S = 60.0
START = """if True:
    import os, signal, sys, threading, time
    from pipeline.console.signals import exit_on_signals, interrupt_on_signals
    from pipeline.console.supervision import supervise, tell
    from pipeline.console.arguments import parser, run_command
    if "exit_on_signals" in sys.argv:
        exit_on_signals()
    supervise()
    options = parser("test", "Does nothing.").parse_known_args()[0]
    def ready():
        print("ready", flush=True)
        time.sleep(60)
"""


def started(body: str, *options: str) -> subprocess.Popen[str]:
    """Start a command that does `body`, which is supervised."""
    program = START + "\n".join(f"    {line}" for line in body.splitlines())
    command = [sys.executable, "-c", program, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def run(body: str, *options: str) -> tuple[int, str]:
    """Return the exit code of a command, and what it says."""
    process = started(body, *options)
    _, said = process.communicate(timeout=WAIT_S)
    return process.returncode, said


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("os._exit(1)", 1, "failed: the command's process was ended without an error (exit code 1) by native code"),
        ("os._exit(0)", 1, "failed: the command's process was ended without an error (exit code 0) by native code"),
        ("os.abort()", 1, "failed: the command's process crashed in native code (SIGABRT)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, "failed: the command's process crashed in native code (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "failed: the command's process was killed (SIGKILL), by a person"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 75, "interrupted: stopped by SIGTERM; run the same command again"),
        ("sys.exit(15)", 1, "failed: the command's process was ended without an error (exit code 15)"),
        (
            "sys.exit(run_command(lambda _: sys.exit(15), options))",
            1,
            "failed: a library ended the command by sys.exit",
        ),
        ("sys.exit(run_command(lambda _: 1 / 0, options))", 1, "internal error: ZeroDivisionError"),
    ],
)
def test_each_end_has_one_line_and_a_code_of_the_table(body: str, code: int, line: str) -> None:
    ended, said = run(body)
    assert ended == code, said
    assert said.startswith(line), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("sys.exit(run_command(lambda _: 0, options))", 0, ""),
        ("sys.exit(run_command(lambda _: 1, options))", 1, ""),
        ("run_command(lambda _: 0, options); os.abort()", 0, ""),  # as a library may while Python shuts down
        ("sys.exit(2)", 2, ""),
        ("raise RuntimeError('broken torch')", 1, "RuntimeError: broken torch"),
    ],
)
def test_a_reported_end_stays(body: str, code: int, said: str) -> None:
    ended, lines = run(body)
    assert (ended, lines.strip().rpartition("\n")[2]) == (code, said)


def count_signals(setup: str) -> str:
    """A command that counts its signals for a while, and fails by their number."""
    return f"""
seen = []
def count(*_):
    seen.append(1)
{setup}
print("ready", flush=True)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    time.sleep(0.05)
tell(code=100 + len(seen))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_arrives_once(number: signal.Signals, send: Callable[[int, int], None]) -> None:
    """Also if a scheduler sends it to all processes of the command: a second signal would end a job at once."""
    process = started(count_signals("for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, count)"))
    assert process.stdout is not None
    process.stdout.readline()
    send(process.pid, number)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 101


@pytest.mark.parametrize("options", [[], ["exit_on_signals"]])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_can_be_resumed(number: signal.Signals, options: list[str]) -> None:
    process = started("sys.exit(run_command(lambda _: ready(), options))", *options)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 75, said
    assert said.count("run the same command again to resume") == 1
    assert "Traceback" not in said


def test_the_command_dies_with_its_supervisor() -> None:
    process = started("ready()")
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=WAIT_S)  # until the child has closed its end, too
    deadline = time.monotonic() + WAIT_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


RUN = """
from stores.lock import RunLock
lock = RunLock({place!r})
lock.acquire()
lock.beat({{"phase": "walk"}})
tell(run={{"place": {place!r}, "record": {{"version": 1, "run": lock.token, "texts": None, "log": "x.log"}}}})
{more}
os.abort()
"""


def test_an_end_without_a_line_is_recorded(tmp_path: Path) -> None:
    assert run(RUN.format(place=str(tmp_path), more=""))[0] == 1
    record = json.loads((tmp_path / "ended.json").read_text())
    assert (record["outcome"], record["exit_code"], record["where"]) == ("failed", 1, "phase walk")
    assert record["log"] == "x.log"
    assert "crashed in native code (SIGABRT)" in record["error"]
    assert record["run"] == json.loads((tmp_path / "lock.json").read_text())["token"]


@pytest.mark.parametrize("more", ["tell(run=None)", "lock.release(); RunLock({place!r}).acquire()"])
def test_the_record_of_another_is_left_alone(more: str, tmp_path: Path) -> None:
    place = str(tmp_path)
    assert run(RUN.format(place=place, more=more.format(place=place)))[0] == 1
    assert not (tmp_path / "ended.json").exists()
    with RunLock(tmp_path):
        pass


def test_a_crash_after_a_signal_is_an_interruption() -> None:
    """Ray's core aborts when its start is cut off."""
    ending = ending_of_process(-signal.SIGABRT, "SIGTERM")
    assert (ending.exit_code, ending.message) == (75, "stopped by SIGTERM; run the same command again to resume")
