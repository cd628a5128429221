"""Drops stored data of a run directory that no entry needs any more."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from manifests.records import ArrayRecord, StagedRecord
from pipeline.driver.ledger_keys import HEALED
from stores.activations import ActivationStore
from stores.background import Background
from stores.ledger import Ledger, LedgerView
from stores.run_directory import RunDirectory
from stores.statistics import StatisticsStore

LAYER = re.compile(r"(^|/)layer/\d+$")  # of the job, or of a point of a sweep
ENDED_HEALING = re.compile(rf"(^|/){HEALED}$")


class StoreCleaner:
    """Drops arrays of a run directory in a thread of their own, except those in `always`.

    The first call also searches the store for arrays that no entry names, such as those of a dead worker. So does each
    call that retains nothing. They do not search if other workers may be writing there.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        always: list[ArrayRecord],
        dropping: Background,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """`dropping`: the thread that drops arrays. `alone`: returns True if no other fiber writes hidden states."""
        self.run_dir = run_dir
        self.dropping = dropping
        self.alone = alone
        self.activations: ActivationStore = run_dir.activations
        self.statistics: StatisticsStore = run_dir.statistics
        self.always = always
        self._retained: dict[Any, dict[str, ArrayRecord]] = {}  # store -> path -> record

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop all stored hidden states but these."""
        self._retain(self.activations, records, self.always)

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop these stored hidden states, which no entry names."""
        self.dropping.submit(self.activations.drop, *records)

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop all stored moments but these."""
        self._retain(self.statistics, records, [])

    def _retain(
        self, store: ActivationStore | StatisticsStore, records: tuple[ArrayRecord, ...], always: list[ArrayRecord]
    ) -> None:
        live = {record.path: record for record in (*records, *always)}
        before = self._retained.get(store)
        if (before is None or not records) and (store is self.statistics or self.alone()):
            self.dropping.finish()
            store.sweep(live.values())
        elif dropped := [record for path, record in (before or {}).items() if path not in live]:
            self.dropping.submit(store.drop, *dropped)
        self._retained[store] = live

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Drop all staged layers but these and those that an entry names, also of another point of a sweep."""
        self.run_dir.sweep_staged((*records, *staged_layers(self.run_dir.ledger)))


class KeepingCleaner:
    """Drops nothing: what an interrupted pass of the job has stored stays."""

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop nothing."""

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop nothing."""

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop nothing."""

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Drop nothing."""


def staged_layers(ledger: Ledger) -> tuple[StagedRecord, ...]:
    """Return the staged layers that entries name, solved and healed ones, of a job or of all points of a sweep.

    `ledger`: of the run directory, or a view of a part of it.
    """
    while isinstance(ledger, LedgerView):
        ledger = ledger.whole
    keys = ledger.keys()
    solved = tuple(entry.staged for key in keys if LAYER.search(key) and (entry := ledger.get(key)))
    healings = (ledger.get(key) for key in keys if ENDED_HEALING.search(key))
    return (*solved, *(staged for healed in healings if healed for staged in healed.layers.values()))
