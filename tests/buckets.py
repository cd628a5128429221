"""An S3 server on loopback, in a process of its own; and buckets on it that nobody else uses."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stores.bucket import Bucket
from stores.disk import Disk
from stores.storage import Storage

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-of-nobody", "AWS_REGION": "us-east-1"}
PATIENCE_S = 120.0
NAME_PLACES = ("compression.json", "README.md", ".lamina.lock")  # of OUTPUT: they name the model's place


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[str]:
    """Runs within the block. Gives its URL."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _answers(port):
                assert server.poll() is None, "moto's server ended; is `pip install -e .[dev]` done?"
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def use(environment: Mapping[str, str]) -> None:
    """Opens buckets by this environment from now on, in a process of its own."""
    os.environ.update(environment)


def make_bucket(url: str) -> str:
    """A bucket of its own on the server. Gives its name."""
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    connection.close()
    return bucket


def put_inputs(address: str, model: Path, *texts: Path) -> None:
    """Copies a model to `model` in a bucket, and texts beside it."""
    bucket = Bucket(address)
    for name in Disk(model).files():
        bucket.below("model").copy(name, Disk(model), name)
    for text in texts:
        bucket.copy(text.name, Disk(text.parent), text.name)


def job_places(address: str) -> dict[str, object]:
    """Changes of a job whose files all lie in a bucket."""
    return {
        "model.source": f"{address}/model",
        "calibration.text.files": [f"{address}/text.txt"],
        "output": f"{address}/output",
        "run_dir": f"{address}/run",
    }


def digests(storage: Storage) -> dict[str, str]:
    """Digests of all files of OUTPUT that do not name a place."""
    names = (name for name in storage.files() if name not in NAME_PLACES)
    return {name: hashlib.sha256(storage.read(name)).hexdigest() for name in names}


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
