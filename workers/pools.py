"""Opens a pool of workers for one stage of a job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from manifests.importing import quick_imports
from manifests.schema import Workers
from workers.config import WorkerConfig
from workers.in_process_pool import InProcessPool

if TYPE_CHECKING:
    from workers.pool import RayPool


@contextmanager
def worker_pool(
    setup: WorkerConfig, workers: Workers, stop: threading.Event, say: Callable[..., None], in_process: bool
) -> Iterator[RayPool | InProcessPool]:
    """Open a pool of Ray workers, or of one worker in this process, and close it at the end.

    `say`: prints a line at a level of `logging`. Raises WorkerError if the workers cannot start.
    """
    if workers.max > setup.shards:
        say(
            f"workers.max: {workers.max} is more than the {setup.shards} shards; the rest would be idle",
            logging.WARNING,
        )
    pool = _pool_class(in_process)(setup, workers, stop, say)
    try:
        yield pool
    finally:
        pool.close()


def _pool_class(in_process: bool) -> type[RayPool | InProcessPool]:
    if in_process:
        return InProcessPool
    with quick_imports():
        from workers.pool import RayPool  # imports Ray, which --in-process does not need
    return RayPool
