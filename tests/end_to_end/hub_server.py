"""A hub on loopback: the API that huggingface_hub speaks, large files by redirect to another host, range requests."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class HubServer:
    """Serves the files of one model; use as a context manager. `asked`: (method, file, first and last byte or None)."""

    def __init__(self, repository: str, files: Mapping[str, bytes], ranges: bool = True) -> None:
        self.repository, self.files, self.ranges = repository, dict(files), ranges
        self.asked: list[tuple[str, str, tuple[int, int] | None]] = []
        self.sent_bytes: dict[str, int] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = self.server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the request's
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_HEAD(self) -> None:
                self._answer()

            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                path = urlsplit(self.path).path
                api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
                if path.startswith(f"{api}/tree/"):
                    self._send(200, json.dumps([hub.describe(name) for name in hub.files]).encode())
                elif path == api or path.startswith(f"{api}/revision/"):
                    siblings = [{"rfilename": name} for name in hub.files]
                    self._send(200, json.dumps({"id": hub.repository, "sha": COMMIT, "siblings": siblings}).encode())
                elif path.startswith("/storage/"):
                    self._file(path.removeprefix("/storage/"), {})
                elif path.startswith(files) and (name := path.removeprefix(files).partition("/")[2]) in hub.files:
                    about = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(hub.files[name]).hexdigest()}"'}
                    if hub.is_large(name):
                        digest = hashlib.sha256(hub.files[name]).hexdigest()
                        where = {"Location": f"http://localhost:{hub.port}/storage/{name}"}
                        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(hub.files[name]))}
                        self._send(302, b"", {**about, **where, **linked})
                    else:
                        self._file(name, about)
                else:
                    self._send(404, b"{}", {"X-Error-Code": "EntryNotFound" if files in path else "RepoNotFound"})

            def _file(self, name: str, headers: Mapping[str, str]) -> None:
                content, asked = hub.files[name], RANGE.fullmatch(self.headers.get("Range", ""))
                part = (int(asked[1]), min(int(asked[2]), len(content) - 1)) if asked and hub.ranges else None
                hub.asked.append((self.command, name, part))
                if part is None:
                    self._send(200, content, headers, name)
                else:
                    where = {"Content-Range": f"bytes {part[0]}-{part[1]}/{len(content)}"}
                    self._send(206, content[part[0] : part[1] + 1], {**headers, **where}, name)

            def _send(self, status: int, content: bytes, headers: Mapping[str, str] = {}, name: str = "") -> None:
                self.send_response(status)
                for field, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(field, value)
                self.end_headers()
                if self.command == "GET":
                    hub.sent_bytes[name] = hub.sent_bytes.get(name, 0) + len(content)
                    self.wfile.write(content)

        return Handler

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".bin", ".pth"))

    def describe(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if self.is_large(name):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry
