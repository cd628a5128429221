"""Interfaces of the driver's collaborators: the pool of workers, the journal, an observer, a cleaner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from manifests.entries import GroupReport
from manifests.records import ArrayRecord, E, LedgerKey, StagedRecord
from pipeline.units.units import Unit


class Pool(Protocol):
    """Workers that run units in any order. If a worker is lost, another runs its units."""

    @property
    def size(self) -> int:
        """The number of ready workers."""

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """The names of the ready workers, node by node."""

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""

    def wait(self) -> tuple[Unit, Any]:
        """Return the next finished unit and its result. The result of a `Collect` is None if its worker is gone.

        Raises:
            Interrupted: the job was asked to stop.
            LaminaError: the unit failed for good.
        """

    def cancel_pending(self) -> None:
        """Wait for all submitted units and discard their results, so that new units can be submitted."""

    def forget(self) -> None:
        """Make workers drop all hidden states, before those of another model with the same names. No unit may be
        pending."""


class BusyPool(Pool, Protocol):
    """A pool that measures the time and memory of its workers."""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Kind of unit -> [number of units, seconds, seconds inside matrix products]."""

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Worker -> peak bytes."""


class Journal(Protocol):
    """The driver's view of the ledger: small immutable entries by key."""

    def commit(self, key: LedgerKey[E], record: E) -> None:
        """Enter a record durably."""

    def get(self, key: LedgerKey[E]) -> E | None:
        """Return the valid record of a key, if any."""

    def retract(self, key: str) -> None:
        """Retract an entry durably."""


class Observer(Protocol):
    """Receives the progress of a job: for the display, the log, the status file."""

    def phase(self, name: str, layers: int, units_per_layer: int) -> None:
        """Report that a phase begins."""

    def unit_done(self, unit: Unit, result: Any) -> None:
        """Report a finished unit."""

    def layer_done(self, phase: str, layer: int, summary: Mapping[str, GroupReport]) -> None:
        """Report a committed layer. `summary`: the reports of a compressed layer, by group."""

    def repaired(self, reason: str, keys: Sequence[str]) -> None:
        """Report that stored data was corrupt: these entries are invalidated, and their data is recomputed."""


class Cleaner(Protocol):
    """Deletes stored data that no entry needs any more."""

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop all stored hidden states but these."""

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop these stored hidden states, which no entry names."""

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drop all stored moments but these."""

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Drop all staged layers but these."""
