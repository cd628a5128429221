"""Recovery from damaged or lost data: invalidates the entries that name it, so that it is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manifests.entries import GradientEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import Key, Record
from pipeline.driver.interfaces import Journal, Observer
from pipeline.driver.ledger_keys import activations_key, dense_key, gradient_key, layer_key, statistics_key

REPAIRS = 3


def computed_keys(num_layers: int) -> list[Key[Any]]:
    """Keys of all entries of the driver that name stored data."""
    kinds: list[Callable[[int], Key[Any]]] = [
        dense_key,
        gradient_key,
        statistics_key,
        activations_key,
        layer_key,
    ]
    return [kind(layer) for kind in kinds for layer in range(num_layers + 1)]


class Repairs:
    """Invalidates entries, and counts how often, so that data that stays damaged ends the job."""

    def __init__(self, journal: Journal, keys: Sequence[Key[Any]], observer: Observer) -> None:
        """`keys`: of all entries that may name damaged data."""
        self.journal = journal
        self.observer = observer
        self.counts: Counter[str] = Counter()  # by entry; "": what was lost since the last commit
        self.keys = keys

    def progress(self) -> None:
        """Notes that something was committed: earlier losses no longer count."""
        del self.counts[""]

    def invalidate(self, error: CorruptError | LostInputError) -> None:
        """Retracts every entry that names the corrupt data, so that it is recomputed; none names lost data.

        Raises the error itself when no entry names the data, or after `REPAIRS` times in the same place.
        """
        path = error.path if isinstance(error, CorruptError) else ""
        named = [key for key in self.keys if path and (entry := self.journal.get(key)) and _names(entry, path)]
        if isinstance(error, CorruptError) and not named:
            raise error
        places: list[str] = [*named] or [""]
        self.counts.update(places)
        if any(self.counts[place] > REPAIRS for place in places):
            raise error
        self.observer.repaired(str(error), named)
        for key in named:
            entry = self.journal.get(key)
            if key.startswith("gradient/"):
                self._invalidate_gradients(key, entry, path)
            elif _names(getattr(entry, "activations", None), path):
                self._forget_activations("dense" if key.startswith("dense/") else "activations")
            elif _names(getattr(entry, "inputs", None), path):
                self._strip(key, "inputs")
            else:
                self.journal.retract(key)

    def _invalidate_gradients(self, key: str, entry: GradientEntry | None, path: str) -> None:
        """Retracts the damaged moments of a layer; and the inputs of all layers, parts of which were dropped
        already."""
        if entry is None or not _names(entry.activations, path):
            self.journal.retract(key)
        for other in self.keys:
            if other.startswith("gradient/"):
                self._strip(other, "activations")
            elif other.startswith("dense/"):
                self._strip(other, "inputs")

    def _forget_activations(self, kind: str) -> None:
        """Retracts all hidden states of a lineage: older ones were dropped when newer ones were entered."""
        for key in self.keys:
            if key.startswith(f"{kind}/") and self.journal.get(key) is not None:
                if kind == "activations":
                    self.journal.retract(key)
                else:
                    self._strip(key, "activations")

    def _strip(self, key: Key[Any], field: str) -> None:
        """Enters an entry again without a field, if it has one."""
        entry = self.journal.get(key)
        if entry is not None and getattr(entry, field, None) is not None:
            self.journal.commit(key, entry.model_copy(update={field: None}))


def _names(entry: Any, path: str) -> bool:
    """Whether a record somewhere in an entry has this path."""
    if isinstance(entry, Record):
        return getattr(entry, "path", None) == path or any(_names(value, path) for _, value in entry)
    parts = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, tuple) else ()
    return any(_names(part, path) for part in parts)
