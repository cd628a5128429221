"""Renews the locks of a running job, notices when one is lost, and resizes the pool on request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from manifests.errors import InUseError, LaminaError
from stores.lock import RunLock
from stores.run_directory import RunDirectory

if TYPE_CHECKING:
    from workers.in_process_pool import InProcessPool
    from workers.pool import RayPool

LOG = logging.getLogger("lamina")
BEAT_SECONDS = 3.0
LAST_BEAT_SECONDS = 10.0  # how long a job that ends waits for a beat that hangs


class Heartbeat:
    """Renews locks every few seconds, in a thread of its own, within a `with` block.

    If another process acquires a lock, the job ends: `stop` is set, and leaving the block raises InUseError.
    """

    def __init__(
        self,
        locks: tuple[RunLock, ...],
        run_dir: RunDirectory,
        stop: threading.Event,
        progress: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`progress`: returns the state that `status` shows; called in the thread."""
        self.locks = locks
        self.run_dir = run_dir
        self.stop = stop
        self.progress = progress
        self.pool: RayPool | InProcessPool | None = None
        self.lost: InUseError | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join(LAST_BEAT_SECONDS)  # otherwise it might write its note after the locks are released
        if self.lost is not None:
            raise self.lost from error

    @contextmanager
    def attending(self, pool: RayPool | InProcessPool) -> Iterator[None]:
        """Make beats in the block report this pool, and resize it on request.

        The metrics are updated once more at the end, as all the work may happen between two beats.
        """
        self.pool = pool
        try:
            yield
        finally:
            self.pool = None
            _show(pool, self.progress())

    def beat(self) -> None:
        """Renew the locks once. Raises InUseError if another process has one, StorageError if nothing can be
        written."""
        state, pool = dict(self.progress()), self.pool
        if pool is not None:
            state |= {"workers": pool.busy(), "pool": {"ready": pool.size, "wanted": pool.wanted}}
            _show(pool, state)
        for lock in self.locks:
            lock.beat(state)
        workers = self.run_dir.requested_workers(self.locks[0].token)
        if workers is not None and pool is not None:
            pool.resize(workers)

    def _keep_beating(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            try:
                self.beat()
            except InUseError as error:
                self.lost = error
                self.stop.set()
                return
            except LaminaError as error:
                LOG.warning("heartbeat: %s", error)


def _show(pool: RayPool | InProcessPool, state: Mapping[str, Any]) -> None:
    pool.show(state.get("phase", "start"), state.get("done", 0), state.get("of", 0))
