"""Staged layers held against their digests while others are made, each as soon as it is entered."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from manifests.entries import LayerEntry
from manifests.errors import CorruptError
from manifests.records import E, Key, StagedRecord
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import layer_key
from stores.checkpoint import verify_shard
from stores.storage import Place, open_storage
from stores.threads import THREADS


class LayerChecks:
    """A journal that has every compressed layer which it is given, or holds already, checked in threads meanwhile.

    Use in a `with` block: at its end, checks that have not begun never do.
    """

    def __init__(self, journal: Journal, run_dir: Place, num_layers: int) -> None:
        self.journal = journal
        self.run_dir = open_storage(run_dir)
        self.keys = [layer_key(layer) for layer in range(num_layers)]
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="digest")
        self.begun: dict[str, Future[str | None]] = {}  # by path: what is made anew has another
        for key in self.keys:
            self._check(self.journal.get(key))

    def commit(self, key: Key[E], record: E) -> None:
        """See `pipeline.driver.interfaces.Journal`."""
        self.journal.commit(key, record)
        if key in self.keys:
            self._check(record)

    def get(self, key: Key[E]) -> E | None:
        """See `pipeline.driver.interfaces.Journal`."""
        return self.journal.get(key)

    def retract(self, key: str) -> None:
        """See `pipeline.driver.interfaces.Journal`."""
        self.journal.retract(key)

    def damaged(self) -> dict[str, str]:
        """Ledger key -> fault of every staged layer that is not what was committed. Their entries are retracted."""
        faults: dict[str, str] = {}
        for key in self.keys:
            entry = self.journal.get(key)
            fault = self.begun[entry.staged.path].result() if entry else None
            if fault is not None:
                self.retract(key)
                faults[key] = fault
        return faults

    def _check(self, entry: Any) -> None:
        if isinstance(entry, LayerEntry):
            self.begun[entry.staged.path] = self.threads.submit(self._fault, entry.staged)

    def _fault(self, staged: StagedRecord) -> str | None:
        """Why a staged layer is not what was committed."""
        try:
            verify_shard(self.run_dir, staged.path, staged)
        except CorruptError as error:
            return str(error)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.threads.shutdown(cancel_futures=True)
