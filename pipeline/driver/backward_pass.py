"""The backward pass: the layers in reverse, each from what the dense pass stored of its inputs.

docs/methods.md#gradient-moments.

A gradient travels back as a hidden state travels forth: it belongs to a shard, stays with its worker, and is committed
every `resume.every` layers. The inputs of a layer are dropped when the gradient that has passed it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from manifests.entries import GradientEntry
from manifests.records import ArrayRecord, GradientRecord
from pipeline.driver.in_flight import UnderWay
from pipeline.driver.interfaces import Cleaner
from pipeline.driver.job_spec import Job
from pipeline.driver.ledger_keys import dense_key, gradient_key
from pipeline.driver.reduction import Summing, Taken
from pipeline.driver.scheduler import Steps
from pipeline.methods.registry import layer_gradients
from pipeline.units.units import Backward


class GradientPass:
    """Enters the moments of gradients of every layer that a task asks for."""

    def __init__(self, job: Job, steps: Steps, cleaner: Cleaner) -> None:
        self.job = job
        self.steps = steps
        self.cleaner = cleaner
        self.summing = Summing(steps)

    def run(self) -> None:
        """Goes back from where the journal says it was left."""
        pending = self._pending()
        if not pending:
            return
        self.steps.observer.phase("gradient", len(pending), len(self.job.gradient_shards))
        under_way = UnderWay(self.summing, self.cleaner, partial(self._enter, pending[0]))
        for layer in reversed(pending):
            emit = layer > pending[0] and self.job.gradient == "model"
            store = emit and self.job.is_boundary(layer)
            wanted = layer_gradients(self.job.tasks, layer)
            units = partial(self._units, layer, emit=emit, store=store)
            under_way.take(layer, wanted, units, stores=store)
        under_way.finish()
        self.cleaner.retain_activations(())

    def _enter(self, first: int, layer: int, taken: Taken) -> Sequence[ArrayRecord] | None:
        """Enters a layer of the pass that ends at the `first`; what the rest needs, if that is less now."""
        statistics = self.summing.stored(taken)
        activations = tuple(result.activation for result in taken.done if result.activation)
        entry = GradientEntry(
            statistics=cast("dict[str, GradientRecord]", statistics),
            activations=activations or None,
        )
        self.steps.enter(gradient_key(layer), entry)
        self.steps.observer.layer_done("gradient", layer, {})
        passed = activations or self.job.gradient == "local"
        return (*activations, *self.stored_inputs(range(first, layer))) if passed else None

    def span(self) -> range:
        """The layers whose inputs the pass has yet to read; empty when it is done, or when nobody asks for it."""
        pending = self._pending()
        return range(pending[0], self._base(pending[-1])) if pending else range(0)

    def stored_inputs(self, layers: range) -> list[ArrayRecord]:
        """The records of the stored inputs of some layers, where the dense pass has been there."""
        entries = [self.steps.journal.get(dense_key(layer)) for layer in layers]
        return [record for entry in entries if entry for record in entry.inputs or () if record]

    def _pending(self) -> list[int]:
        """The layers that the pass has yet to enter, ascending."""
        return [layer for layer in self.job.gradient_layers() if not self._is_done(layer)]

    def _is_done(self, layer: int) -> bool:
        entry = self.steps.journal.get(gradient_key(layer))
        wanted = layer_gradients(self.job.tasks, layer)
        return entry is not None and all(moment.key in entry.statistics for moment in wanted)

    def _inputs(self, layer: int) -> Sequence[ArrayRecord | None]:
        """Records of the stored inputs of a layer, by calibration shard."""
        return self.steps.entry(dense_key(layer)).inputs or ()

    def _base(self, layer: int) -> int:
        """The nearest layer above `layer` with committed gradients at its inputs; one past the last: the head."""
        if self.job.gradient == "local":
            return layer + 1
        above = range(layer + 1, self.job.num_layers)
        return next((base for base in above if self._gradients(base) is not None), self.job.num_layers)

    def _gradients(self, layer: int) -> Sequence[ArrayRecord] | None:
        entry = self.steps.journal.get(gradient_key(layer))
        return entry.activations if entry else None

    def _units(self, layer: int, *, emit: bool, store: bool) -> list[Backward]:
        """All shards that hold samples of the pass back through a layer, in shard order, from the gradients that are
        committed by now."""
        base = self._base(layer)
        gradients = self._gradients(base) if self.job.gradient == "model" else None
        inputs = [self._inputs(above) for above in range(layer, base)]
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
