"""Says that a job lives, hears when it has lost its place, and passes on how many workers are asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from manifests.errors import InUseError, LaminaError
from stores.lock import RunLock
from stores.run_directory import RunDirectory

LOG = logging.getLogger("lamina")
BEAT_SECONDS = 3.0
LAST_BEAT_SECONDS = 10.0  # for which the end of a job waits for a beat that hangs


class Resizable(Protocol):
    """A pool as far as an operator sees it."""

    @property
    def size(self) -> int:
        """How many workers are ready."""
        ...

    wanted: int

    def busy(self) -> dict[str, str]:
        """Worker -> the unit it is at."""
        ...

    def resize(self, workers: int) -> None:
        """Asks for another number of workers."""
        ...

    def show(self, phase: str, done: int, units: int) -> None:
        """Tells those who watch how far a phase is."""
        ...


class Heartbeat:
    """Renews locks every few seconds, from a thread of its own, within a `with` block.

    A lock that has gone to another ends the job: `stop` is set, and leaving the block raises InUseError.
    """

    def __init__(
        self,
        locks: tuple[RunLock, ...],
        run_dir: RunDirectory,
        stop: threading.Event,
        progress: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`progress`: what `status` is to show; called from the thread."""
        self.locks = locks
        self.run_dir = run_dir
        self.stop = stop
        self.progress = progress
        self.pool: Resizable | None = None
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
        self.thread.join(LAST_BEAT_SECONDS)  # or it would write its note beside locks that were released
        if self.lost is not None:
            raise self.lost from error

    @contextmanager
    def attending(self, pool: Resizable) -> Iterator[None]:
        """Within it, the beats tell of this pool, and resize it when somebody asks. Its metrics are told of the end,
        too: all of it may lie between two beats."""
        self.pool = pool
        try:
            yield
        finally:
            self.pool = None
            _show(pool, self.progress())

    def beat(self) -> None:
        """One of them. Raises InUseError when a lock is another's now, StorageError when nothing can be written."""
        state, pool = dict(self.progress()), self.pool
        if pool is not None:
            state |= {"workers": pool.busy(), "pool": {"ready": pool.size, "wanted": pool.wanted}}
            _show(pool, state)
        for lock in self.locks:
            lock.beat(state)
        asked = self.run_dir.requested_workers(self.locks[0].token)
        if asked is not None and pool is not None:
            pool.resize(asked)

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


def _show(pool: Resizable, state: Mapping[str, Any]) -> None:
    pool.show(state.get("phase", "start"), state.get("done", 0), state.get("of", 0))
