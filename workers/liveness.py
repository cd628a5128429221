"""Checks that the Ray cluster of this process is still running.

Ray's core ends the driver's process with exit code 1, without raising an exception: about ten seconds after the raylet
of its node has died, and when the GCS, on Ray's head node, has not answered for 60 s. These checks notice it earlier,
so that the command can report the reason.
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
CHECK_SECONDS = 1.0
PATIENCE_SECONDS = 45.0  # within this time the head may be restarted
GONE = (errno.ECONNREFUSED, errno.ENOENT)  # no process listens at the socket, or its folder was removed
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame; its fourth byte is the type


class RayWatch:
    """Checks the two processes that a driver needs: the raylet of its node and the head of the cluster."""

    def __init__(self, raylet: str, head: str, logs: str, note: Callable[[str], None]) -> None:
        """`raylet`: path of its socket; `head`: HOST:PORT; `logs`: folder of Ray's logs; `note`: writes to our log."""
        self.raylet = raylet
        self.connection: socket.socket | None = None  # to the raylet, which closes it when it ends
        self.head = head
        self.logs = logs
        self.note = note
        self.checked_at, self.answered_at = -math.inf, time.monotonic()
        self.is_answering = True

    def check(self) -> None:
        """Check both, at most once a second. Raise WorkerError if either has ended for good."""
        if time.monotonic() - self.checked_at < CHECK_SECONDS:
            return
        if not self._raylet_lives():
            raise WorkerError(
                "Ray has ended on this machine: its raylet is gone (killed, perhaps for lack of memory; raylet.out in "
                f"{self.logs} may say why), and its workers with it; fix the cause and run the same command again"
            )
        host, _, port = self.head.rpartition(":")
        self._note_head(fault_at(host.strip("[]"), int(port)))
        self.checked_at = time.monotonic()

    def close(self) -> None:
        """Close the connection to the raylet."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _raylet_lives(self) -> bool:
        if self.connection is not None and _is_open(self.connection):
            return True
        self.close()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(ANSWER_SECONDS)
        try:
            self.connection.connect(self.raylet)
        except OSError as error:  # a busy raylet is alive
            self.close()
            return error.errno not in GONE
        self.connection.setblocking(False)
        return True

    def _note_head(self, fault: OSError | None) -> None:
        if fault is None:
            if not self.is_answering:
                self.note(f"Ray's head at {self.head} answers again")
            self.answered_at, self.is_answering = time.monotonic(), True
            return
        silent_s = time.monotonic() - self.answered_at
        if silent_s > PATIENCE_SECONDS:
            raise WorkerError(
                f"Ray's head at {self.head} has not answered for {silent_s:.0f} s ({fault}): it was ended, or its "
                "machine is gone; start the cluster again, then run the same command again"
            )
        if self.is_answering:
            self.note(
                f"Ray's head at {self.head} does not answer ({fault}): no worker can start; waiting for it for "
                f"{PATIENCE_SECONDS:.0f} s"
            )
        self.is_answering = False


def _is_open(connection: socket.socket) -> bool:
    """Return True unless the other side has closed the connection."""
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except OSError as error:
        return isinstance(error, BlockingIOError)


def fault_at(host: str, port: int) -> OSError | None:
    """Return why no gRPC server, such as Ray's, answers at an address; None if one does.

    The server must answer the preface of HTTP/2 with its settings. Ray's own client cannot be used, because it aborts
    the process if that ends before a server answers.
    """
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None  # the server answers only clients with a certificate
            connection.sendall(HTTP2_PREFACE + HTTP2_SETTINGS)
            answer = connection.recv(len(HTTP2_SETTINGS))
    except OSError as error:
        return error
    return None if answer[3:4] == HTTP2_SETTINGS[3:4] else ConnectionError("the server is not Ray")
