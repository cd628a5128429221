"""The run's lock: one holder, dead owners followed, living ones named."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InUseError, StorageError
from stores import lock
from stores.disk import Disk
from stores.lock import RunLock, read_lock
from tests.memory_storage import Memory

ROOT = Path(__file__).resolve().parents[2]
KilledAnywhere = Callable[..., int]
HOLD = """
import sys, time
from manifests.errors import InUseError
from stores.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = RunLock(*sys.argv[1].rsplit("/", 1))
    lock.acquire()
except InUseError as error:
    print("refused:", error, flush=True)
    sys.exit(2)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
lock.release()
"""


def start(path: Path, hold_s: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(hold_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def note(path: Path, **changes: Any) -> None:
    """Rewrites the owner's note, as another host would have."""
    file = path.with_name(path.name + ".json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_second_acquire_in_one_process_fails(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        with pytest.raises(InUseError, match="already"):
            lock.acquire()
        with pytest.raises(InUseError, match=f"host {socket.gethostname()}, pid {os.getpid()}"):
            RunLock(tmp_path).acquire()
        lock.beat({"layer": 1})
    with RunLock(tmp_path):
        pass


@pytest.mark.slow
def test_of_many_racing_processes_one_wins(tmp_path: Path) -> None:
    racers = [start(tmp_path / "lock", 1.0) for _ in range(4)]
    assert [read_line(racer) for racer in racers] == ["ready\n"] * 4
    for racer in racers:
        go(racer)
    outputs = [racer.communicate(timeout=30)[0] for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [0, 2, 2, 2]
    winner = next(racer for racer in racers if racer.returncode == 0)
    refusals = [output for output in outputs if output.startswith("refused")]
    assert all("wait for it, or stop it first" in refusal for refusal in refusals)
    assert any(f"pid {winner.pid}" in refusal for refusal in refusals)


def test_a_dead_owner_is_followed(tmp_path: Path, said: list[str]) -> None:
    with start(tmp_path / "lock", 60) as owner:
        go(owner)
        assert (read_line(owner), read_line(owner)) == ("ready\n", "held\n")
        alive = read_lock(tmp_path)
        assert alive is not None
        assert (alive["alive"], alive["pid"]) == (True, owner.pid)
        with pytest.raises(InUseError, match=f"pid {owner.pid}"):
            RunLock(tmp_path).acquire()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    dead = read_lock(tmp_path)
    assert dead is not None
    assert (dead["alive"], dead["released"]) == (False, None)
    with RunLock(tmp_path):
        assert f"pid {owner.pid}" in "\n".join(said)
        assert "is dead" in "\n".join(said)


def test_a_released_lock_is_taken_in_silence(tmp_path: Path, said: list[str]) -> None:
    with RunLock(tmp_path):
        pass
    note(tmp_path / "lock", host="elsewhere")
    with RunLock(tmp_path):
        assert said == []


@pytest.mark.parametrize("everywhere", [False, True])
def test_where_a_hold_reaches_all_hosts_no_note_is_watched(
    everywhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a disk may be one of a network whose locks others do not see; elsewhere who has the name has the lock."""
    storage = Memory() if everywhere else Disk(tmp_path)
    owner = {"host": "elsewhere", "pid": 7, "released": None, "heartbeat": time.time() - 3600}
    storage.replace("lock.json", json.dumps(owner).encode())
    watched: list[float] = []
    monkeypatch.setattr(lock, "WATCH_S", 0.1)
    monkeypatch.setattr(time, "sleep", watched.append)
    with RunLock(storage):
        assert bool(watched) == (not everywhere)


def test_another_host_with_a_fresh_heartbeat_is_respected(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_S", 0.1)
    path = tmp_path / "lock"
    with RunLock(path.parent):
        pass
    note(path, host="elsewhere", pid=7, released=None, heartbeat=time.time() - 50)
    owner = read_lock(path.parent)
    assert owner is not None
    assert owner["alive"]
    with pytest.raises(InUseError, match=r"host elsewhere, pid 7 .* heartbeat 50 s ago"):
        RunLock(path.parent).acquire()
    note(path, heartbeat=time.time() + 50)  # by a clock that is ahead
    with pytest.raises(InUseError, match=r"heartbeat 0 s ago"):
        RunLock(path.parent).acquire()
    note(path, heartbeat=time.time() - 61)
    owner = read_lock(path.parent)
    assert owner is not None
    assert not owner["alive"]
    with RunLock(path.parent):
        assert "taking over" in "\n".join(said)


@pytest.mark.parametrize(("renewed", "lives"), [({}, True), ({"released": 1.0}, False)])
def test_another_host_whose_clock_is_behind_is_respected(
    renewed: dict[str, Any], lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beats, or ends, while it is watched."""
    path = tmp_path / "lock"
    with RunLock(tmp_path):
        pass
    old = time.time() - 3600
    note(path, host="elsewhere", pid=7, released=None, heartbeat=old)
    monkeypatch.setattr(time, "sleep", lambda _: note(path, heartbeat=old + 3, **renewed))
    if not lives:
        with RunLock(tmp_path):
            return
    with pytest.raises(InUseError, match="host elsewhere, pid 7"):
        RunLock(tmp_path).acquire()


def test_a_lock_lost_to_another_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with RunLock(path.parent) as lock:
        note(path, token="another", host="elsewhere")
        with pytest.raises(InUseError, match="lock was lost: held by host elsewhere"):
            lock.beat({})
    assert json.loads((tmp_path / "lock.json").read_text())["host"] == "elsewhere"  # release touched nothing
    assert json.loads((tmp_path / "lock.json").read_text())["released"] is None


def test_a_removed_lock_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with RunLock(path.parent) as lock:
        path.unlink()
        with pytest.raises(InUseError, match="the lock was lost: it was removed"):
            lock.beat({})
        with RunLock(path.parent) as second:
            second.beat({})
            with pytest.raises(InUseError, match="lost"):
                lock.beat({})
        assert read_lock(path.parent) is not None


def test_the_note(tmp_path: Path) -> None:
    assert read_lock(tmp_path) is None
    before = time.time()
    with RunLock(tmp_path) as lock:
        lock.beat({"layer": 3, "of": 80})
        owner = read_lock(tmp_path)
        assert owner is not None
        assert owner["alive"]
        assert owner["progress"] == {"layer": 3, "of": 80}
        assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
        assert before <= owner["started"] <= owner["heartbeat"] <= time.time()
        assert owner["heartbeat_age_s"] < 10
    after = read_lock(tmp_path)
    assert after is not None
    assert not after["alive"]
    with pytest.raises(InUseError):
        lock.beat({})
    lock.release()


def test_reading_does_not_stand_in_the_way(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        pass
    for _ in range(20):
        read_lock(tmp_path)
        with RunLock(tmp_path):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", '{"heartbeat": null}'])
def test_a_torn_note_leaves_the_decision_to_the_kernel(tmp_path: Path, text: str) -> None:
    with RunLock(tmp_path):
        (tmp_path / "lock.json").write_text(text)
        with pytest.raises(InUseError, match="left no note"):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="choose a directory on another"):
        RunLock(tmp_path).acquire()


def test_killed_anywhere_it_can_be_taken_again(killed_anywhere: KilledAnywhere) -> None:
    def act(directory: Path) -> None:
        with RunLock(directory / "run") as lock:
            lock.beat({"layer": 1})

    def check(directory: Path) -> None:
        with RunLock(directory / "run") as lock:
            lock.beat({"layer": 2})

    assert killed_anywhere(act, check) >= 8


def test_a_temporary_lock_leaves_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, temporary=True)
    with lock:
        waiting = os.open(tmp_path / "lock", os.O_RDWR)
        assert sorted(os.listdir(tmp_path)) == ["lock", "lock.json"]
    assert os.listdir(tmp_path) == []
    fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who had opened the removed one does not hold the next
    with RunLock(tmp_path, temporary=True) as second:
        second.beat({})
        lock.release()
        second.check()
    os.close(waiting)


def test_a_temporary_lock_that_was_lost_is_left_to_its_owner(tmp_path: Path) -> None:
    with RunLock(tmp_path, temporary=True):
        note(tmp_path / "lock", token="another", host="elsewhere")
    assert sorted(os.listdir(tmp_path)) == ["lock", "lock.json"]


def test_killed_anywhere_a_temporary_lock_can_be_taken_again(killed_anywhere: KilledAnywhere) -> None:
    def act(directory: Path) -> None:
        with RunLock(directory, temporary=True) as lock:
            lock.beat({"layer": 1})

    def check(directory: Path) -> None:
        with RunLock(directory, temporary=True) as lock:
            lock.beat({"layer": 2})
        assert all(name.endswith(".partial") for name in os.listdir(directory))

    assert killed_anywhere(act, check) >= 8
