"""The backward pass through the layers. It reads the inputs of each layer, which the dense pass has stored.

docs/methods.md#gradient-moments.

Gradients are treated like hidden states: each belongs to a shard, stays on its worker, and is committed every
`resume.every` layers. The stored inputs of a layer are dropped when the gradients below it are committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from manifests.entries import GradientEntry
from manifests.records import ArrayRecord, GradientRecord
from pipeline.driver.in_flight import LayersInFlight
from pipeline.driver.ledger_keys import dense_key, gradient_key
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.methods.method import Moment
from pipeline.units.units import Backward, ShardDone


class GradientPass:
    """Computes and enters the moments of gradients that tasks need."""

    def __init__(self, session: Session) -> None:
        self.job = session.job
        self.session = session

    def run(self) -> Coroutine[None]:
        """Run the pass, from the last committed gradients."""
        pending = self._pending()
        if not pending:
            return
        self.session.observer.phase("gradient", len(pending), len(self.job.gradient_shards))
        in_flight = LayersInFlight(self.session, partial(self._enter, pending[0]))
        for layer in reversed(pending):
            emit = layer > pending[0] and self.job.gradient == "model"
            store = emit and self.job.is_boundary(layer)
            parts = self.job.parts(layer, self.job.layer_gradients(layer))
            for part in parts if len(parts) > 1 and self._reads_outputs(layer) else ():
                yield self._units(layer, (), part=part.number, forth=True)
            for part in reversed(parts):
                ends = store and part.first
                units = partial(
                    self._units, layer, part.moments, part=part.number, emit=emit and part.first, store=ends
                )
                yield from in_flight.run(layer, part.moments, units, stores=ends, last=part.first)
        yield from in_flight.finish()
        self.session.cleaner.retain_activations(())

    def _enter(
        self, first: int, layer: int, done: list[ShardDone], statistics: Mapping[str, ArrayRecord]
    ) -> Sequence[ArrayRecord] | None:
        """Enter a layer of a pass that ends at layer `first`. Return the stored hidden states that the rest of the pass
        still needs, or None if none can be dropped."""
        activations = tuple(shard.activation for shard in done if shard.activation)
        entry = GradientEntry(
            statistics=cast("Mapping[str, GradientRecord]", statistics),
            activations=activations or None,
        )
        self.session.enter(gradient_key(layer), entry)
        self.session.observer.layer_done("gradient", layer, {})
        can_drop = activations or self.job.gradient == "local"
        return (*activations, *self.stored_inputs(range(first, layer))) if can_drop else None

    def span(self) -> range:
        """Return the layers whose inputs the pass has yet to read; none if it is done or not needed."""
        pending = self._pending()
        return range(pending[0], self._base(pending[-1])) if pending else range(0)

    def stored_inputs(self, layers: range) -> list[ArrayRecord]:
        """Return the records of those layers' stored inputs that the dense pass has entered so far."""
        entries = [self.session.journal.get(dense_key(layer)) for layer in layers]
        return [record for entry in entries if entry for record in entry.inputs or () if record]

    def _reads_outputs(self, layer: int) -> bool:
        """Return True if the gradients at a layer's output follow from the values there."""
        return self.job.gradient == "local" or self._base(layer) == layer + 1 == self.job.num_layers

    def _pending(self) -> list[int]:
        """Return the layers that the pass has not entered yet, ascending."""
        return [layer for layer in self.job.gradient_layers() if not self._is_entered(layer)]

    def _is_entered(self, layer: int) -> bool:
        entry = self.session.journal.get(gradient_key(layer))
        moments = self.job.layer_gradients(layer)
        return entry is not None and all(moment.key in entry.statistics for moment in moments)

    def _base(self, layer: int) -> int:
        """Return the nearest layer above `layer` with committed gradients at its inputs, or one past the last layer:
        the head."""
        if self.job.gradient == "local":
            return layer + 1
        above = range(layer + 1, self.job.num_layers)
        return next((base for base in above if self._gradients(base) is not None), self.job.num_layers)

    def _gradients(self, layer: int) -> Sequence[ArrayRecord] | None:
        entry = self.session.journal.get(gradient_key(layer))
        return entry.activations if entry else None

    def _units(
        self,
        layer: int,
        moments: tuple[Moment, ...],
        *,
        part: int | None,
        emit: bool = False,
        store: bool = False,
        forth: bool = False,
    ) -> list[Backward]:
        """Return the units that run all shards with gradient samples back through a layer or a part of it, in shard
        order, from the latest committed gradients."""
        base = self._base(layer)
        gradients = self._gradients(base) if self.job.gradient == "model" else None
        inputs = [self.session.entry(dense_key(above)).inputs or () for above in range(layer, base)]
        return [
            Backward(
                layer=layer,
                shard=shard,
                inputs=tuple(_stored(records[shard]) for records in inputs),
                moments=moments,
                probe=self.job.gradient == "local",
                emit=emit,
                store=store,
                base_record=gradients[place] if gradients else None,
                part=part,
                forth=forth,
                ahead=layer - 1 if emit else None,
            )
            for place, shard in enumerate(self.job.gradient_shards)
        ]


def _stored(record: ArrayRecord | None) -> ArrayRecord:
    assert record is not None, "the dense pass stores the inputs of every shard of the backward pass"
    return record
