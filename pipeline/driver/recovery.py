"""Recovery from damaged or lost data: invalidates the entries that name it, so that it is recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manifests.errors import CorruptError, LostInputError
from manifests.records import LedgerKey, Record
from pipeline.driver.interfaces import Journal, Observer
from pipeline.driver.ledger_dependencies import dependents, fields_of, kind_of
from pipeline.driver.ledger_keys import activations_key, dense_key, gradient_key, layer_key, statistics_key

REPAIRS = 3


def computed_keys(num_layers: int) -> list[LedgerKey[Any]]:
    """Return the keys of all entries of the driver that name stored data."""
    kinds = (dense_key, gradient_key, statistics_key, activations_key, layer_key)
    return [key_of(layer) for key_of in kinds for layer in range(num_layers + 1)]


class Repairs:
    """Invalidates entries of damaged data, and ends the job when the same data is damaged repeatedly."""

    def __init__(self, journal: Journal, keys: Sequence[LedgerKey[Any]], observer: Observer) -> None:
        """`keys`: the keys of all entries that may name damaged data."""
        self.journal = journal
        self.observer = observer
        self.counts: Counter[str] = Counter()  # repairs of each entry; "": losses since the last commit
        self.keys = keys

    def progress(self) -> None:
        """Reset the count of losses after a commit."""
        del self.counts[""]

    def invalidate(self, error: CorruptError | LostInputError) -> None:
        """Retract every entry that names corrupt data. Lost data has no entries.

        Raises the error itself if no entry names the corrupt data, or after `REPAIRS` times in the same place.
        """
        path = error.path if isinstance(error, CorruptError) else ""
        entries = {key: entry for key in self.keys if path and (entry := self.journal.get(key)) and _names(entry, path)}
        if isinstance(error, CorruptError) and not entries:
            raise error
        places: list[str] = [*entries] or [""]
        self.counts.update(places)
        if any(self.counts[place] > REPAIRS for place in places):
            raise error
        self.observer.repaired(str(error), [*entries])
        for key, entry in entries.items():
            self._invalidate(key, entry, path)

    def _invalidate(self, key: LedgerKey[Any], entry: Record, path: str) -> None:
        """Retract the damaged part of an entry, and everything that has to be recomputed with it."""
        field = next((field for field in fields_of(key) if _names(getattr(entry, field), path)), "")
        name = f"{kind_of(key)}.{field}" if field else kind_of(key)
        invalid = dependents([name], "damaged")
        if name not in invalid:
            self._remove(key, field)
        for other in self.keys:
            for each in invalid:
                kind, _, part = each.partition(".")
                if kind_of(other) == kind:
                    self._remove(other, part)

    def _remove(self, key: LedgerKey[Any], field: str) -> None:
        """Retract an entry, or enter it again without one of its fields."""
        entry = self.journal.get(key)
        if entry is None:
            return
        if not field:
            self.journal.retract(key)
        elif getattr(entry, field) is not None:
            self.journal.commit(key, entry.model_copy(update={field: None}))


def _names(entry: Any, path: str) -> bool:
    """Return True if a record somewhere in an entry has this path."""
    if isinstance(entry, Record):
        return getattr(entry, "path", None) == path or any(_names(value, path) for _, value in entry)
    parts = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, tuple) else ()
    return any(_names(part, path) for part in parts)
