"""The pass over the dense model before ranks are chosen: importance, and all statistics with `propagate: dense`.

While the sums of a layer are reduced and stored, shards pass the next layer. A layer is entered when its moments are
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from manifests.records import ArrayRecord
from pipeline.driver.backward_pass import GradientPass
from pipeline.driver.forward_units import dense_entry
from pipeline.driver.in_flight import LayersInFlight
from pipeline.driver.job_spec import LayerPart
from pipeline.driver.layer_reading import LayerReading, Weights
from pipeline.driver.ledger_keys import dense_key
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.units.units import Forward, ShardDone


class DensePass:
    """Passes the layers that have no entry yet, or lack moments or stored inputs.

    Attributes:
        with_moments: sum the moments that are not stored.
        inputs: the layers whose inputs are stored for the backward pass.
    """

    def __init__(self, session: Session, stored: StoredStatistics, gradients: GradientPass, with_moments: bool) -> None:
        self.job = session.job
        self.session = session
        self.stored = stored
        self.gradients = gradients
        self.with_moments = with_moments
        self.inputs = gradients.span()
        self.phase = "statistics" if with_moments else "importance"

    def run(self) -> Coroutine[None]:
        """Run the pass, from the last committed hidden states."""
        last = self.job.num_layers - 1
        missing = [layer for layer in range(last + 1) if not self._is_entered(layer)]
        if not missing:
            return
        units = len(self.job.dense_shards()) * sum(len(self.job.parts(layer, ())) for layer in missing)
        self.session.observer.phase(self.phase, len(missing), max(1, units // len(missing)))
        in_flight = LayersInFlight(self.session, self._enter)
        reading = LayerReading(self.session, last)
        for layer in missing:
            weights = yield from reading.weights(layer)
            for part in self.job.parts(layer, self.stored.missing(layer) if self.with_moments else ()):
                store = part.last and self.job.is_boundary(layer + 1) and layer < last
                units_of = partial(self._units, layer, part, weights, emit=layer < last, store=store)
                yield from in_flight.run(layer, part.moments, units_of, stores=store, last=part.last)
        yield from in_flight.finish()
        self.session.cleaner.retain_activations(tuple(self.gradients.stored_inputs(self.inputs)))

    def _units(self, layer: int, part: LayerPart, weights: Weights, *, emit: bool, store: bool) -> list[Forward]:
        """Return the units of all shards, from the latest committed inputs."""
        forwards = self.session.forwards
        return forwards.units(
            "dense", layer, None, part.moments, forwards.last_committed("dense", layer),
            part=part.number, emit=emit, store=store, keep=part.first and layer in self.inputs, weights=weights,
        )  # fmt: skip

    def _enter(
        self, layer: int, done: list[ShardDone], statistics: Mapping[str, ArrayRecord]
    ) -> Sequence[ArrayRecord] | None:
        """Enter a layer. Return the hidden states that are still needed, or None if none can be dropped: the last
        committed ones, and those that the backward pass will need."""
        statistics = {**self.stored.of_dense_pass(layer), **statistics}
        entry = dense_entry(done, statistics, inputs=layer in self.inputs)
        self.session.enter(dense_key(layer), entry)
        self.session.observer.layer_done(self.phase, layer, {})
        return (*entry.activations, *self.gradients.stored_inputs(self.inputs)) if entry.activations else None

    def _is_entered(self, layer: int) -> bool:
        entry = self.session.journal.get(dense_key(layer))
        if entry is None or (self.with_moments and self.stored.missing(layer)):
            return False
        return entry.inputs is not None or layer not in self.inputs
