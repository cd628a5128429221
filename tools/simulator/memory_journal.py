"""A ledger in memory, whose entries are JSON as on disk."""

from __future__ import annotations

import functools
import json
from typing import Any

from manifests.entries import KINDS
from manifests.records import E, LedgerKey, Record


class MemoryJournal:
    """Implements `pipeline.driver.interfaces.Journal`. `entries`: key -> JSON."""

    def __init__(self, entries: dict[str, str] | None = None) -> None:
        self.entries = {} if entries is None else entries

    def commit(self, key: LedgerKey[E], record: E) -> None:
        """Enter a record."""
        assert isinstance(record, Record)
        self.entries[key] = json.dumps(record.as_json())

    def get(self, key: LedgerKey[E]) -> E | None:
        """Return the record of a key, if any."""
        text = self.entries.get(key)
        return None if text is None else _entry(key, text)

    def retract(self, key: str) -> None:
        """Retract an entry."""
        self.entries.pop(key, None)


@functools.lru_cache(maxsize=10_000)
def _entry(key: str, text: str) -> Any:
    kind = next(KINDS[part] for part in key.split("/") if part in KINDS)
    return kind.validate_python(json.loads(text))
