"""The log of a run in its run directory: lines for people, and the same as JSON for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from manifests.errors import StorageError, reason
from stores.durable import storage_errors
from stores.storage import Appender, Place, Storage, open_storage

LOG = logging.getLogger("lamina")
STORES = logging.getLogger("stores")
RAY = logging.getLogger("lamina.ray")  # what `workers.ray_messages` passes on
WHERE = ("phase", "layer", "shard", "unit")


class _Json(logging.Formatter):
    """`time` (Unix), `level`, `run`, what the job is at (None where that says nothing), `message`."""

    def __init__(self, run: str, state: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self.run = run
        self.state = state

    def format(self, record: logging.LogRecord) -> str:
        state = self.state()
        told = {"time": record.created, "level": record.levelname, "run": self.run}
        return json.dumps(told | {name: state.get(name) for name in WHERE} | {"message": record.getMessage()})


class _LogFile(logging.StreamHandler["Appender | _FirstWritten"]):
    """Says once when nothing more can be written; logging itself would print a traceback for every line."""

    failed = False

    def __init__(self, path: str, file: Appender | _FirstWritten) -> None:
        super().__init__(file)
        self.path = path

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if not self.failed:
            print(f"log {self.path}: {error}; the job goes on without", file=sys.stderr)
        self.failed = True

    def close(self) -> None:
        super().close()
        try:
            self.stream.close()
        except (OSError, StorageError) as error:  # what was buffered is written here
            if not self.failed:
                print(f"log {self.path}: {reason(error)}", file=sys.stderr)


class _FirstWritten:
    """A file that appears with its first line."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self.file: Appender | None = None

    def write(self, text: str) -> None:
        if self.file is None:
            self.file = self.storage.appender(self.name)
            LOG.info("Ray's own messages: %s", self.storage.at(self.name))
        self.file.write(text)

    def flush(self) -> None:
        if self.file is not None:
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def open_log(directory: Place, run: str, state: Callable[[], Mapping[str, Any]]) -> str:
    """Starts the log files of this run: everything `JobObserver.say` says and all warnings go there, as lines for
    people and, in a file beside (`.jsonl`), as JSON. Returns the path of the first. Ray's own messages get a third
    file (`.ray.txt`), if there are any.

    `run`: what the job is called; `state`: what it is at. Raises StorageError.
    """
    close_log()
    storage, name = open_storage(directory), f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    handlers: list[logging.Handler] = []
    for suffix, form in (
        (".log", logging.Formatter("%(asctime)s %(levelname)s %(message)s")),
        (".jsonl", _Json(run, state)),
    ):
        path = storage.at(name + suffix)
        with storage_errors("writing", path):
            handlers.append(_LogFile(path, storage.appender(name + suffix)))
        handlers[-1].setFormatter(form)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    LOG.handlers = handlers
    RAY.propagate = False
    RAY.handlers = [_LogFile(storage.at(f"{name}.ray.txt"), _FirstWritten(storage, f"{name}.ray.txt"))]
    RAY.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    STORES.handlers = [*handlers, logging.StreamHandler()]  # damaged entries, a lock taken over
    return storage.at(f"{name}.log")


def close_log() -> None:
    """Ends the log file of this run, if there is one."""
    for handler in (*LOG.handlers, *RAY.handlers):
        handler.close()
    LOG.handlers = STORES.handlers = RAY.handlers = []
