"""Whether the Ray that this process is connected to still lives.

Ray's core ends the process of a driver without a word to Python, with exit code 1: some ten seconds after the raylet of
its node has died, and when the GCS, Ray's head, has not answered for 60 s. Who looks here meanwhile can say so.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections.abc import Callable

from manifests.errors import WorkerError

ANSWER_SECONDS = 1.0  # how soon a signal is noticed
LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 45.0  # with the head: it may be started again
GONE = (errno.ECONNREFUSED, errno.ENOENT)  # a socket that nobody listens at any more, or that went with its folder
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame; its fourth byte is the type


class RayWatch:
    """Looks at the processes without which no driver lives: the raylet of its own node, and the head of the cluster."""

    def __init__(self, raylet: str, head: str, logs: str, note: Callable[[str], None]) -> None:
        """`raylet`: its socket, a path; `head`: HOST:PORT; `logs`: the folder of Ray's; `note` takes lines for ours."""
        self.raylet = raylet
        self.line: socket.socket | None = None  # to the raylet, which says nothing, until it ends
        self.head = head
        self.logs = logs
        self.note = note
        self.looked_at, self.answered_at = -math.inf, time.monotonic()
        self.is_answering = True

    def check(self) -> None:
        """Looks, once in a second at most. Raises WorkerError when either is gone for good."""
        if time.monotonic() - self.looked_at < LOOK_SECONDS:
            return
        if not self._raylet_lives():
            raise WorkerError(
                "Ray has ended on this machine: its raylet is gone (killed, perhaps for want of memory; raylet.out in "
                f"{self.logs} may say why), and its workers with it; see to it and run the same command again to go on"
            )
        host, _, port = self.head.rpartition(":")
        self._account(fault_at(host.strip("[]"), int(port)))
        self.looked_at = time.monotonic()

    def close(self) -> None:
        """Ends its connection."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def _raylet_lives(self) -> bool:
        if self.line is not None and _is_open(self.line):
            return True
        self.close()
        self.line = socket.socket(socket.AF_UNIX)
        self.line.settimeout(ANSWER_SECONDS)
        try:
            self.line.connect(self.raylet)
        except OSError as error:  # a busy one lives
            self.close()
            return error.errno not in GONE
        self.line.setblocking(False)
        return True

    def _account(self, fault: OSError | None) -> None:
        if fault is None:
            if not self.is_answering:
                self.note(f"Ray's head at {self.head} answers again")
            self.answered_at, self.is_answering = time.monotonic(), True
            return
        silent_s = time.monotonic() - self.answered_at
        if silent_s > PATIENCE_SECONDS:
            raise WorkerError(
                f"Ray's head at {self.head} has not answered for {silent_s:.0f} s ({fault}): it was ended, or its "
                "machine is gone; start the cluster again, then run the same command again to go on"
            )
        if self.is_answering:
            self.note(
                f"Ray's head at {self.head} does not answer ({fault}): no worker can start; waiting for it for "
                f"{PATIENCE_SECONDS:.0f} s"
            )
        self.is_answering = False


def _is_open(line: socket.socket) -> bool:
    """Whether the other side has not hung up."""
    try:
        return line.recv(1, socket.MSG_PEEK) != b""
    except OSError as error:
        return isinstance(error, BlockingIOError)


def fault_at(host: str, port: int) -> OSError | None:
    """Why there is no gRPC server, as Ray's is one: it answers the preface of HTTP/2 with its settings at once.

    Ray's own client would not do: where nothing answers, it aborts the process that ends meanwhile.
    """
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None  # speaks only to those who have a certificate
            connection.sendall(HTTP2_PREFACE + HTTP2_SETTINGS)
            answer = connection.recv(len(HTTP2_SETTINGS))
    except OSError as error:
        return error
    return None if answer[3:4] == HTTP2_SETTINGS[3:4] else ConnectionError("what answers is no Ray")
