"""Background verification of staged layers: each is checked when it is committed, while others are computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from manifests.entries import LayerEntry
from manifests.errors import CorruptError
from manifests.records import E, LedgerKey, StagedRecord
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import layer_key
from stores.checkpoint import verify_shard
from stores.storage import Place, open_storage
from stores.threads import THREADS


class LayerChecks(Journal):
    """A journal that verifies the digest of every compressed layer in background threads.

    Layers that were committed earlier are also verified. Use in a `with` block, whose end cancels pending checks.
    """

    def __init__(self, journal: Journal, run_dir: Place, num_layers: int) -> None:
        self.journal = journal
        self.run_dir = open_storage(run_dir)
        self.keys = [layer_key(layer) for layer in range(num_layers)]
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="digest")
        self.checks: dict[str, Future[str | None]] = {}  # by path; a layer that is solved again has a new path
        for key in self.keys:
            self._check(self.journal.get(key))

    def commit(self, key: LedgerKey[E], record: E) -> None:
        self.journal.commit(key, record)
        if key in self.keys:
            self._check(record)

    def get(self, key: LedgerKey[E]) -> E | None:
        return self.journal.get(key)

    def retract(self, key: str) -> None:
        self.journal.retract(key)

    def damaged(self) -> dict[str, str]:
        """Wait for the checks. Retract the entries of damaged layers, and return their faults by ledger key."""
        faults: dict[str, str] = {}
        for key in self.keys:
            entry = self.journal.get(key)
            fault = self.checks[entry.staged.path].result() if entry else None
            if fault is not None:
                self.retract(key)
                faults[key] = fault
        return faults

    def _check(self, entry: Any) -> None:
        if isinstance(entry, LayerEntry):
            self.checks[entry.staged.path] = self.threads.submit(self._fault, entry.staged)

    def _fault(self, staged: StagedRecord) -> str | None:
        try:
            verify_shard(self.run_dir, staged.path, staged)
        except CorruptError as error:
            return str(error)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)
