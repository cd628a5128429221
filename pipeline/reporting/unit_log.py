"""Writes a JSON line for each finished unit to a file beside the log, which `report` draws."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from manifests.errors import StorageError, reason
from stores.storage import Place, open_storage

LOG = logging.getLogger("lamina")
SUFFIX = ".units.jsonl"


class Traced(Protocol):
    """A pool that calls `trace` with every finished unit: `unit`, `kind`, `layer`, `shard`, `worker`, `ended` (Unix
    time by the driver's clock), `seconds`, `compute_seconds`, `peak_bytes`, `tokens`, `error`."""

    trace: Callable[[dict[str, Any]], None]


@contextmanager
def units_logged(pool: Traced, logs: Place, run: str) -> Iterator[None]:
    """Log every unit of the block to a new file in `logs`. A failed write is a warning and ends the logging.

    `run`: the name of the job in each line.
    """
    storage, name = open_storage(logs), f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
    try:
        file = storage.appender(name)
    except OSError as error:
        LOG.warning("units are not logged: %s: %s", storage.at(name), error.strerror)
        yield
        return

    def write(line: dict[str, Any]) -> None:
        try:
            file.write(json.dumps({"run": run, **line}) + "\n")
        except (OSError, StorageError) as error:
            LOG.warning("units are not logged any more: %s: %s", storage.at(name), reason(error))
            pool.trace = _ignore

    pool.trace = write
    try:
        yield
    finally:
        pool.trace = _ignore
        with suppress(OSError, StorageError):  # from the last buffered lines
            file.close()


def _ignore(_: dict[str, Any]) -> None:
    pass
