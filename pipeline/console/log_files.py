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
RAY = logging.getLogger("lamina.ray")  # messages that `workers.cluster.log_message` passes on
WHERE = ("phase", "layer", "shard", "unit")


class _Json(logging.Formatter):
    """Formats a record as JSON: `time` (Unix), `level`, `run`, the job's state (None if unknown), `message`."""

    def __init__(self, run: str, state: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self.run = run
        self.state = state

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        state = self.state()
        fields = {"time": record.created, "level": record.levelname, "run": self.run}
        return json.dumps(fields | {name: state.get(name) for name in WHERE} | {"message": record.getMessage()})


class _LogFile(logging.StreamHandler["Appender | _LazyFile"]):
    """A handler that reports once when nothing more can be written; logging would print a traceback for every line."""

    failed = False

    def __init__(self, path: str, file: Appender | _LazyFile) -> None:
        super().__init__(file)
        self.path = path

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report the first error on stderr."""
        error = sys.exc_info()[1]
        if not self.failed:
            print(f"log {self.path}: {error}; the job continues without this log", file=sys.stderr)
        self.failed = True

    def close(self) -> None:
        """Close the file, and report the error if its buffer cannot be written."""
        super().close()
        try:
            self.stream.close()
        except (OSError, StorageError) as error:
            if not self.failed:
                print(f"log {self.path}: {reason(error)}", file=sys.stderr)


class _LazyFile:
    """A file that is created when its first line is written."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self.file: Appender | None = None

    def write(self, text: str) -> None:
        """Write a text."""
        if self.file is None:
            self.file = self.storage.appender(self.name)
            LOG.info("Ray's own messages: %s", self.storage.at(self.name))
        self.file.write(text)

    def flush(self) -> None:
        """Write the buffer."""
        if self.file is not None:
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def open_log(directory: Place, run: str, state: Callable[[], Mapping[str, Any]]) -> str:
    """Start the log files of this run, and return the path of the first: lines for people. The second (`.jsonl`) has
    the same lines as JSON, the third (`.ray.txt`) Ray's own messages, if there are any. Messages of `JobObserver.say`
    and all warnings are logged.

    `run`: the name of the job; `state`: returns its phase, layer, shard and unit. Raises StorageError.
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
    RAY.handlers = [_LogFile(storage.at(f"{name}.ray.txt"), _LazyFile(storage, f"{name}.ray.txt"))]
    RAY.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    STORES.handlers = [*handlers, logging.StreamHandler()]  # messages about damaged entries and dead lock owners
    return storage.at(f"{name}.log")


def close_log() -> None:
    """Close the log files of this run."""
    for handler in (*LOG.handlers, *RAY.handlers):
        handler.close()
    for logger in (LOG, STORES, RAY):
        logger.handlers = []
    LOG.propagate = True
