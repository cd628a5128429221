"""A Ray that has ended is noticed, and said, before Ray's core ends the process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from manifests.errors import WorkerError
from tests.ports import free_port
from workers import liveness
from workers.liveness import RayWatch


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CHECK_SECONDS", 0.0)


@contextlib.contextmanager
def raylet(path: Path) -> Iterator[socket.socket]:
    """Listens, and takes nobody's connection."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(4)
        yield listening


@contextlib.contextmanager
def head(port: int = 0) -> Iterator[str]:
    """Speaks HTTP/2, as the GCS does."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def notes() -> list[str]:
    return []


def watching(path: Path, address: str, notes: list[str]) -> contextlib.closing[RayWatch]:
    return contextlib.closing(RayWatch(str(path), address, "/tmp/ray/session/logs", notes.append))


@pytest.mark.parametrize("socket_stays", [True, False])
def test_a_raylet_that_died(socket_stays: bool, tmp_path: Path, notes: list[str]) -> None:
    path = tmp_path / "raylet"
    with head() as address, watching(path, address, notes) as watch:
        with raylet(path):
            watch.check()
            watch.check()
        if not socket_stays:
            os.unlink(path)
        with pytest.raises(WorkerError, match=r"raylet is gone .*raylet.out in /tmp/ray/session/logs.*run the same"):
            watch.check()
    assert notes == []


def test_a_raylet_that_hangs_up_lives(tmp_path: Path, notes: list[str]) -> None:
    """It may not keep a connection that says nothing."""
    path = tmp_path / "raylet"
    with head() as address, raylet(path) as listening, watching(path, address, notes) as watch:
        for _ in range(3):
            watch.check()
            listening.accept()[0].close()
        watch.check()


def test_one_connection_is_kept(tmp_path: Path, notes: list[str]) -> None:
    """Ray writes a line in its log for each that ends."""
    path = tmp_path / "raylet"
    with head() as address, raylet(path) as listening, watching(path, address, notes) as watch:
        for _ in range(3):
            watch.check()
        listening.accept()[0].close()
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_head_that_died(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "raylet"
    with raylet(path), head() as address, watching(path, address, notes) as watch:
        watch.check()
        port = int(address.rpartition(":")[2])
        watch.head = f"127.0.0.1:{free_port()}"
        watch.check()
        watch.check()
        assert len(notes) == 1
        assert "no worker can start; waiting for it for 45 s" in notes[0]
        watch.head = f"127.0.0.1:{port}"
        watch.check()
        assert notes[1:] == [f"Ray's head at {address} answers again"]
        watch.head = f"127.0.0.1:{free_port()}"
        watch.check()
        monkeypatch.setattr(liveness, "PATIENCE_SECONDS", 0.0)
        with pytest.raises(WorkerError, match=r"has not answered for \d+ s .*run the same command again"):
            watch.check()
