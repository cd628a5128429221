"""Starts an S3 server on loopback, in a separate process, and creates a new bucket for each test."""

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
from tests.ports import free_port

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-of-nobody", "AWS_REGION": "us-east-1"}
PATIENCE_S = 120.0
NAME_PLACES = ("compression.json", "README.md", ".lamina.lock")  # of OUTPUT: they name the model's place


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server while the block runs; yield its URL."""
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
    """Make this process open buckets by this environment."""
    os.environ.update(environment)


def make_bucket(url: str) -> str:
    """Create a new bucket on the server. Return its name."""
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("PUT", f"/{bucket}")
    assert connection.getresponse().status == 200
    connection.close()
    return bucket


def put_inputs(address: str, model: Path, *texts: Path) -> None:
    """Copy a model to `model` in a bucket, and texts beside it."""
    bucket = Bucket(address)
    for name in Disk(model).files():
        bucket.below("model").copy(name, Disk(model), name)
    for text in texts:
        bucket.copy(text.name, Disk(text.parent), text.name)


def job_places(address: str) -> dict[str, object]:
    """Return the manifest fields of a job whose files are all in a bucket."""
    return {
        "model.source": f"{address}/model",
        "calibration.text.files": [f"{address}/text.txt"],
        "output": f"{address}/output",
        "run_dir": f"{address}/run",
    }


def digests(storage: Storage) -> dict[str, str]:
    """Return the digests of OUTPUT's files, without those that name an address."""
    names = (name for name in storage.files() if name not in NAME_PLACES)
    return {name: hashlib.sha256(storage.read(name)).hexdigest() for name in names}


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
