"""Interfaces of the driver's collaborators: the pool of workers, the journal, an observer, a cleaner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from manifests.entries import GroupReport
from manifests.records import ArrayRecord, E, Key, StagedRecord
from pipeline.units.units import Unit


class Pool(Protocol):
    """Workers that do units in any order. Another worker does the units of one that is lost."""

    @property
    def size(self) -> int:
        """The number of workers that are ready."""

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """The names of the workers that are ready, node by node."""

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""

    def wait(self) -> tuple[Unit, Any]:
        """Returns the next finished unit and its result; None as that of a `Collect` whose worker is gone.

        Raises:
            Interrupted: the job was asked to stop.
            LaminaError: the unit failed for good.
        """

    def cancel_pending(self) -> None:
        """Waits for everything submitted and discards the results, so that other units can be submitted afresh."""

    def forget(self) -> None:
        """Makes workers drop all hidden states: another model's will have the same names. Nothing is pending."""


class BusyPool(Pool, Protocol):
    """A pool that counts the time and memory of its workers."""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Kind of unit -> [units, seconds, of these inside products]."""

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Worker -> peak bytes."""


class Journal(Protocol):
    """The ledger as the driver sees it: small immutable entries by key."""

    def commit(self, key: Key[E], record: E) -> None:
        """Durably enters a record."""

    def get(self, key: Key[E]) -> E | None:
        """Returns the valid record of a key, if any."""

    def retract(self, key: str) -> None:
        """Durably takes an entry back."""


class Observer(Protocol):
    """Receives the progress of a job: for the display, the log, the status file."""

    def phase(self, name: str, layers: int, units_per_layer: int) -> None:
        """A phase begins."""

    def unit_done(self, unit: Unit, result: Any) -> None:
        """A unit is finished."""

    def layer_done(self, phase: str, layer: int, summary: Mapping[str, GroupReport]) -> None:
        """A layer is committed. `summary`: of a compressed layer, by group."""

    def repaired(self, reason: str, keys: Sequence[str]) -> None:
        """Stored data was corrupt; these entries are invalidated and their work is recomputed."""


class Cleaner(Protocol):
    """Drops stored data that no entry will need again."""

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops all stored hidden states but these."""

    def drop_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops these stored hidden states, which no entry names."""

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """Drops all stored moments but these."""

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """Drops all staged layers but these."""
