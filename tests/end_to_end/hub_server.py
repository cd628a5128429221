"""Serves a hub on loopback: huggingface_hub's API, redirects of large files to another host, range requests.

Uploads are as over HTTP: a PUT for each large file, then a commit that names all files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

ADDRESS = "/{repo_id}/resolve/{revision}/{filename}"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@contextmanager
def client_of(hub: HubServer, cache: Path, offline: bool = False) -> Iterator[None]:
    """Make this process's huggingface_hub use `hub` in the block, as if HF_ENDPOINT had been set from the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + ADDRESS)
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        huggingface_hub.close_session()
        yield
    huggingface_hub.close_session()


class HubServer:
    """Serves the files of one model; use as a context manager. `asked`: (method, file, first and last byte or None)."""

    def __init__(self, repository: str, files: Mapping[str, bytes], ranges: bool = True) -> None:
        self.repository, self.files, self.ranges = repository, dict(files), ranges
        self.asked: list[tuple[str, str, tuple[int, int] | None]] = []
        self.sent_bytes: dict[str, int] = {}
        self.stored: dict[str, bytes] = {}  # by sha256; a commit need not name them yet
        self.puts: list[str] = []
        self.commits = 0
        self.full_after: int | None = None  # the number of uploads that it accepts
        self.read_only = False
        self.requests = 0
        self.gone_at: int | None = None  # the request, counted from 0, from which on it does not answer
        self.does_last = False  # that request is done, although its answer is lost
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

            def parse_request(self) -> bool:
                """Count requests, and end the connection of those without an answer."""
                if not super().parse_request():
                    return False
                number, hub.requests = hub.requests, hub.requests + 1
                if hub.gone_at is None or number < hub.gone_at:
                    return True
                self.close_connection = True
                if number == hub.gone_at and hub.does_last:
                    self.wfile = io.BytesIO()
                    return True
                return False

            def do_GET(self) -> None:
                self._answer()

            def do_HEAD(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if hub.full_after is not None and len(hub.puts) >= hub.full_after:
                    self._send(403, b"no room")
                    return
                hub.puts.append(hashlib.sha256(content).hexdigest())
                hub.stored[hub.puts[-1]] = content
                self._send(200, b"")

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if hub.read_only:
                    self._send(403, b"{}")
                    return
                answer = hub.take(urlsplit(self.path).path, content)
                self._send(200 if answer is not None else 404, json.dumps(answer or {}).encode())

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
                if self.command != "HEAD":
                    hub.sent_bytes[name] = hub.sent_bytes.get(name, 0) + len(content)
                    self.wfile.write(content)

        return Handler

    def take(self, path: str, content: bytes) -> dict[str, Any] | None:
        """Return the answer to a POST; None for an unknown path."""
        api = f"/api/models/{self.repository}"
        if path == "/api/repos/create":
            return {"url": f"{self.endpoint}/{self.repository}"}
        if path == "/api/validate-yaml":
            return {"warnings": [], "errors": []}
        if path.startswith(f"{api}/preupload/"):
            asked = [file["path"] for file in json.loads(content)["files"]]
            return {"files": [self._upload_mode(name) for name in asked]}
        if path == f"/{self.repository}.git/info/lfs/objects/batch":
            return {"transfer": "basic", "objects": [self._place(found) for found in json.loads(content)["objects"]]}
        if path.startswith(f"{api}/commit/"):
            self._commit([json.loads(line) for line in content.splitlines()])
            return {"commitUrl": f"{self.endpoint}/{self.repository}/commit/{COMMIT}", "commitOid": COMMIT}
        return None

    def _upload_mode(self, name: str) -> dict[str, Any]:
        known = {"oid": hashlib.sha1(self.files[name]).hexdigest()} if name in self.files else {}
        return {"path": name, "uploadMode": "lfs" if self.is_large(name) else "regular", "shouldIgnore": False, **known}

    def _place(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        entry = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.stored:
            return entry
        return {**entry, "actions": {"upload": {"href": f"{self.endpoint}/upload/{wanted['oid']}"}}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        self.commits += 1
        for entry in (line["value"] for line in lines if line["key"] == "file"):
            self.files[entry["path"]] = base64.b64decode(entry["content"])
        for entry in (line["value"] for line in lines if line["key"] == "lfsFile"):
            self.files[entry["path"]] = self.stored[entry["oid"]]
        for entry in (line["value"] for line in lines if line["key"] == "deletedFile"):
            del self.files[entry["path"]]

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".bin", ".pth"))

    def describe(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if self.is_large(name):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry
