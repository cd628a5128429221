"""What each worker did when, a line of JSON for each unit beside the log: `report` draws it, programs may read it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

LOG = logging.getLogger("lamina")
SUFFIX = ".units.jsonl"


class Traced(Protocol):
    """A pool that tells of every unit that is done: `unit`, `kind`, `worker`, `ended` (Unix time by the driver's
    clock), `seconds`, `compute_seconds`, `peak_bytes`, `tokens`, `error`."""

    trace: Callable[[dict[str, Any]], None]


@contextmanager
def units_logged(pool: Traced, logs: Path) -> Iterator[None]:
    """Within it, a file of its own in `logs` takes a line for each unit. What cannot be written ends no job."""
    path = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{SUFFIX}"
    try:
        file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed below
    except OSError as error:
        LOG.warning("units are not logged: %s: %s", path, error.strerror)
        yield
        return

    def write(line: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            LOG.warning("units are not logged any more: %s: %s", path, error.strerror)
            pool.trace = _nothing

    pool.trace = write
    try:
        yield
    finally:
        pool.trace = _nothing
        with suppress(OSError):  # what was left in the buffer
            file.close()


def _nothing(_: dict[str, Any]) -> None:
    """Takes what nobody keeps."""
