"""Access to the stored moments of a job's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manifests.records import ArrayRecord, LedgerKey
from pipeline.driver.job_spec import trains_mixed
from pipeline.driver.ledger_keys import dense_key, gradient_key, layer_key, statistics_key
from pipeline.driver.session import Session
from pipeline.methods.method import Moment, Task


class StoredStatistics:
    """Looks up the moments of a layer by key, and drops unneeded moments."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.job = session.job

    def of_dense_pass(self, layer: int) -> Mapping[str, ArrayRecord]:
        """Return the moments of a layer that the dense pass has entered so far."""
        entry = self.session.journal.get(dense_key(layer))
        return entry.statistics if entry else {}

    def missing(self, layer: int) -> tuple[Moment, ...]:
        """Return the moments of a layer that the dense pass has not entered."""
        entered = self.of_dense_pass(layer)
        return tuple(moment for moment in self.job.layer_moments(layer) if moment.key not in entered)

    def of_backward_pass(self, layer: int) -> Mapping[str, ArrayRecord]:
        """Return the moments of gradients; none if no task needs them. Raises CorruptError if they are missing."""
        return self.session.entry(gradient_key(layer)).statistics if self.job.layer_gradients(layer) else {}

    def of_layer(self, layer: int) -> Mapping[str, ArrayRecord]:
        """Return the moments of both passes. Raises CorruptError if they are missing."""
        values = self.session.entry(dense_key(layer)).statistics if self.job.layer_moments(layer) else {}
        return {**values, **self.of_backward_pass(layer)}

    def of_task(self, task: Task) -> dict[Moment, ArrayRecord]:
        """Return the moments that a task needs."""
        entered = self.of_layer(task.layer)
        return {moment: entered[moment.key] for moment in task.moments}

    def retain(self, also: Iterable[ArrayRecord] = ()) -> None:
        """Drop the moments of finished layers, unless the job keeps them. Also drop moments that an interruption has
        left without an entry, except those in `also`. Walks of mixed inputs keep all moments to the end, because a
        resumed walk solves the finished layers again."""
        live = [*also]
        mixed = any(map(trains_mixed, self.job.tasks)) and bool(self.session.uncompressed())
        kept = self.job.keep_statistics or mixed
        for layer in range(self.job.num_layers):
            if kept or self.session.journal.get(layer_key(layer)) is None:
                keys: list[LedgerKey[Any]] = [dense_key(layer), gradient_key(layer), statistics_key(layer)]
                for key in keys:
                    entry = self.session.journal.get(key)
                    live += entry.statistics.values() if entry else ()
        self.session.cleaner.retain_statistics(tuple(live))

    def retain_only(self, layers: Iterable[int]) -> None:
        """Drop the moments of all other layers, unless they are kept."""
        if not self.job.keep_statistics:
            live = [record for layer in layers for record in self.of_layer(layer).values()]
            self.session.cleaner.retain_statistics(tuple(live))
