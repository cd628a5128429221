"""Servers of tests on loopback, and their ports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer


def free_port() -> int:
    """Return an unused port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Let a server of 127.0.0.1 answer in a thread while the block runs; yield `HOST:PORT`."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
