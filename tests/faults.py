"""A proxy on loopback that disturbs requests to an S3 server: errors, no answer, a lost or a truncated answer."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.ports import serving

Fault = str  # "500", "503"; "silent": neither done nor answered; "lost": done, not answered; "cut": half an answer;
# "late": done, not answered before the client gives up; "slow": the second half of the answer is delayed
LOST = ("lost", "late", "cut")  # done by the server, unknown to the client
SLOW_DOWN = (
    "<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


class Proxy:
    """Forwards requests to `server`. `spoil(method, path, nth)` returns the fault of the nth request, or None."""

    def __init__(self, server: str) -> None:
        self.server = server.removeprefix("http://")
        self.spoil: Callable[[str, str, int], Fault | None] = lambda method, path, nth: None
        self.requests: list[tuple[str, str, str | None, int]] = []  # method, path, fault, bytes answered
        self.lock = threading.Lock()
        self.pause_s = 2.0  # longer than the client waits
        self.slow_s = 0.1

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run the proxy while the block runs; yield its URL."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """Report nothing: tests kill clients."""

        with serving(Server(("127.0.0.1", 0), Handler)) as address:
            yield f"http://{address}"

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self.lock:
            fault = self.spoil(request.command, request.path, len(self.requests))
            at = len(self.requests)
            self.requests.append((request.command, request.path, fault, 0))
        if fault in ("500", "503"):
            content = SLOW_DOWN.encode()
            request.send_response(int(fault))
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(b"" if request.command == "HEAD" else content)
            return
        if fault == "silent":
            request.close_connection = True
            return
        connection = http.client.HTTPConnection(self.server, timeout=60)
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.requests[at] = (*self.requests[at][:3], len(content))
        if fault in ("lost", "late"):
            time.sleep(self.pause_s if fault == "late" else 0.0)
            request.close_connection = True
            return
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else str(len(content))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        half = len(content) // 2
        if fault == "slow":
            request.wfile.write(content[:half])
            request.wfile.flush()
            time.sleep(self.slow_s)
        request.wfile.write(content[:half] if fault == "cut" else content[half if fault == "slow" else 0 :])
        request.close_connection = fault == "cut"
