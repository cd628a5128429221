"""What each worker did when, a line of JSON for each unit beside the log: `report` draws it, programs may read it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from manifests.errors import StorageError
from stores.storage import Place, open_storage

LOG = logging.getLogger("lamina")
SUFFIX = ".units.jsonl"


class Traced(Protocol):
    """A pool that tells of every unit that is done: `unit`, `kind`, `layer`, `shard`, `worker`, `ended` (Unix time by
    the driver's clock), `seconds`, `compute_seconds`, `peak_bytes`, `tokens`, `error`."""

    trace: Callable[[dict[str, Any]], None]


@contextmanager
def units_logged(pool: Traced, logs: Place, run: str) -> Iterator[None]:
    """Within it, a file of its own in `logs` takes a line for each unit. What cannot be written ends no job.

    `run`: what the job is called there.
    """
    storage, name = open_storage(logs), f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
    path = storage.at(name)
    try:
        file = storage.appender(name)
    except OSError as error:
        LOG.warning("units are not logged: %s: %s", path, error.strerror)
        yield
        return

    def write(line: dict[str, Any]) -> None:
        try:
            file.write(json.dumps({"run": run, **line}) + "\n")
        except (OSError, StorageError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            LOG.warning("units are not logged any more: %s: %s", path, reason)
            pool.trace = _nothing

    pool.trace = write
    try:
        yield
    finally:
        pool.trace = _nothing
        with suppress(OSError, StorageError):  # what was left in the buffer
            file.close()


def _nothing(_: dict[str, Any]) -> None:
    """Takes what nobody keeps."""
