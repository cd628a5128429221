"""The backward pass through the layers, from the inputs of each that the dense pass stored.

docs/methods.md#gradient-moments.

Gradients are treated like hidden states: each belongs to a shard, stays on its worker, and is committed every
`resume.every` layers. The stored inputs of a layer are dropped when the gradients below it are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from manifests.entries import GradientEntry
from manifests.records import ArrayRecord, GradientRecord
from pipeline.driver.in_flight import LayersInFlight
from pipeline.driver.ledger_keys import dense_key, gradient_key
from pipeline.driver.reduction import PassResult, Reductions
from pipeline.driver.scheduler import TaskStream
from pipeline.driver.session import Session
from pipeline.methods.registry import layer_gradients
from pipeline.units.units import Backward


class GradientPass:
    """Computes and enters the moments of gradients that tasks need."""

    def __init__(self, session: Session) -> None:
        self.job = session.job
        self.session = session
        self.reductions = Reductions(session)

    def run(self) -> TaskStream[None]:
        """Runs the pass, from the last committed gradients."""
        pending = self._pending()
        if not pending:
            return
        self.session.observer.phase("gradient", len(pending), len(self.job.gradient_shards))
        in_flight = LayersInFlight(self.session, partial(self._enter, pending[0]))
        for layer in reversed(pending):
            emit = layer > pending[0] and self.job.gradient == "model"
            store = emit and self.job.is_boundary(layer)
            units = partial(self._units, layer, emit=emit, store=store)
            yield from in_flight.run(layer, layer_gradients(self.job.tasks, layer), units, stores=store)
        yield from in_flight.finish()
        self.session.cleaner.retain_activations(())

    def _enter(self, first: int, layer: int, result: PassResult) -> TaskStream[Sequence[ArrayRecord] | None]:
        """Enters one layer of the pass, which ends at layer `first`. Returns the stored hidden states that the rest of
        the pass still needs, or None if none can be dropped."""
        statistics = yield from self.reductions.stored(result)
        activations = tuple(shard.activation for shard in result.done if shard.activation)
        entry = GradientEntry(
            statistics=cast("dict[str, GradientRecord]", statistics),
            activations=activations or None,
        )
        self.session.enter(gradient_key(layer), entry)
        self.session.observer.layer_done("gradient", layer, {})
        can_drop = activations or self.job.gradient == "local"
        return (*activations, *self.stored_inputs(range(first, layer))) if can_drop else None

    def span(self) -> range:
        """Returns the layers whose inputs the pass has yet to read; none if it is done or not needed."""
        pending = self._pending()
        return range(pending[0], self._base(pending[-1])) if pending else range(0)

    def stored_inputs(self, layers: range) -> list[ArrayRecord]:
        """Returns the records of those layers' stored inputs that the dense pass has entered so far."""
        entries = [self.session.journal.get(dense_key(layer)) for layer in layers]
        return [record for entry in entries if entry for record in entry.inputs or () if record]

    def _pending(self) -> list[int]:
        """Returns the layers that the pass has not entered yet, ascending."""
        return [layer for layer in self.job.gradient_layers() if not self._is_entered(layer)]

    def _is_entered(self, layer: int) -> bool:
        entry = self.session.journal.get(gradient_key(layer))
        moments = layer_gradients(self.job.tasks, layer)
        return entry is not None and all(moment.key in entry.statistics for moment in moments)

    def _base(self, layer: int) -> int:
        """Returns the nearest layer above `layer` with committed gradients at its inputs, or one past the last layer:
        the head."""
        if self.job.gradient == "local":
            return layer + 1
        above = range(layer + 1, self.job.num_layers)
        return next((base for base in above if self._gradients(base) is not None), self.job.num_layers)

    def _gradients(self, layer: int) -> Sequence[ArrayRecord] | None:
        entry = self.session.journal.get(gradient_key(layer))
        return entry.activations if entry else None

    def _units(self, layer: int, *, emit: bool, store: bool) -> list[Backward]:
        """Returns the units that run all shards with gradient samples back through a layer, in shard order, from the
        latest committed gradients."""
        base = self._base(layer)
        gradients = self._gradients(base) if self.job.gradient == "model" else None
        inputs = [self.session.entry(dense_key(above)).inputs or () for above in range(layer, base)]
        return [
            Backward(
                layer=layer,
                shard=shard,
                inputs=tuple(_stored(records[shard]) for records in inputs),
                moments=layer_gradients(self.job.tasks, layer),
                probe=self.job.gradient == "local",
                emit=emit,
                store=store,
                base_record=gradients[place] if gradients else None,
                ahead=layer - 1 if emit else None,
            )
            for place, shard in enumerate(self.job.gradient_shards)
        ]


def _stored(record: ArrayRecord | None) -> ArrayRecord:
    assert record is not None, "the dense pass stores the inputs of every shard of the backward pass"
    return record
