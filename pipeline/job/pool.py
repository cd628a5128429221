"""Workers for one stage of a job, ended with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from manifests.schema import Workers
from pipeline.console.progress import JobObserver
from workers.config import WorkerConfig
from workers.pool import RayPool


@contextmanager
def worker_pool(
    setup: WorkerConfig, workers: Workers, stop: threading.Event, observer: JobObserver
) -> Iterator[RayPool]:
    """As many workers as are wanted and have something to do. Raises WorkerError when they cannot start."""
    if workers.max > setup.shards:
        observer.say(
            f"workers.max: {workers.max} is more than the {setup.shards} shards; the rest would be idle",
            logging.WARNING,
        )
    pool = RayPool(setup, workers, stop, observer.say)
    try:
        yield pool
    finally:
        pool.close()
