"""A dense pass in which layers are solved from their sums in memory, while it goes on.

For jobs whose ranks follow nothing of the calibration text. Moments are stored where they are to be kept, which nobody
waits for. As many layers as there are workers are begun at a time, so that each worker has its part of them between two
layers of the pass; the next when these are solved, which bounds the sums that are in memory.

Order of durability: hidden states stay until all layers whose moments came of them are entered, or these moments are.
A layer's moments, where they are kept, are entered before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from manifests.records import ArrayRecord, StagedRecord
from pipeline.driver.forward_pass import ForwardPass, dense_entry
from pipeline.driver.interfaces import Cleaner
from pipeline.driver.job_spec import Job, RanksOf, staged_layer
from pipeline.driver.layer_reading import LayerReading
from pipeline.driver.layer_solving import LayersInHand, Solved
from pipeline.driver.ledger_keys import dense_key
from pipeline.driver.reduction import Summing, Taken
from pipeline.driver.scheduler import Steps, solve_units
from pipeline.methods.method import Moment
from pipeline.methods.registry import layer_moments, layers_of
from pipeline.units.sums import Summed
from pipeline.units.units import Solve


def layers_behind(workers: int) -> int:
    """At most so many layers of the pass are not entered: two on their way from the workers, and for each worker one
    that is summed, one that is solved and one that is written."""
    return 2 + 3 * max(1, workers)


class DenseWalk:
    """Solves and enters every claimed layer whose moments are not stored yet."""

    def __init__(
        self,
        job: Job,
        steps: Steps,
        cleaner: Cleaner,
        summing: Summing,
        retain_statistics: Callable[[Iterable[ArrayRecord]], None],
    ) -> None:
        """`retain_statistics`: drops all stored moments but those that layers wait for, and those that it is given."""
        self.job = job
        self.steps = steps
        self.cleaner = cleaner
        self.summing = summing
        self.retain_statistics = retain_statistics
        self.forwards = ForwardPass(job, steps.journal)
        self.in_hand = LayersInHand(steps, self._enter_layer)
        self.base = 0  # the last layer whose inputs are committed
        self.asking: list[int] = []  # layers that the pass must be gone through again for
        self.given: deque[tuple[int, Taken]] = deque()  # whose sums are on their way from the workers
        self.summed: list[tuple[int, Taken]] = []  # whose sums are being added, or are
        self.stored: deque[tuple[int, Taken]] = deque()  # whose sums are on their way to the store
        self.samples: dict[int, Mapping[str, ArrayRecord]] = {}  # stored, and named by no entry

    def run(self, ranks: RanksOf) -> None:
        """Goes on where the journal says it was left."""
        journal, claimed = self.steps.journal, layers_of(self.job.tasks)
        self.asking = [layer for layer in claimed if not staged_layer(journal, layer) and self._missing(layer)]
        if not self.asking:
            return
        last, asking = self.asking[-1], frozenset(self.asking)
        self.base = self.forwards.last_committed("dense", self.asking[0])
        self.steps.observer.phase("statistics", last + 1 - self.base, self.job.shards)
        reading = LayerReading(self.steps, last)
        for layer in range(self.base, last + 1):
            moments = self._missing(layer) if layer in asking else ()
            store = layer < last and (layer + 1) % self._every() == 0
            units = self.forwards.units(
                "dense", layer, None, moments, self.base,
                cosine=True, emit=layer < last, store=store, weights=reading.weights(layer),
            )  # fmt: skip
            choosing = self.summing.choose(moments, units)
            self._go_on(layer, ranks)
            grids = self.summing.chosen(choosing)
            taken = self.summing.take(moments, units, self.job.keep_statistics, grids)
            self._pass(layer, taken, moments, store)
        self._end(ranks)

    def _every(self) -> int:
        """Layers between two commits of hidden states. Where moments are not kept, it is the factors of what comes of
        them that are waited for: later commits within so many layers would only take room."""
        behind = 1 if self.job.keep_statistics else layers_behind(self.steps.pool.size)
        return self.job.every * -(-behind // self.job.every)

    def _missing(self, layer: int) -> tuple[Moment, ...]:
        """The moments of a layer that are not entered."""
        return tuple(moment for moment in layer_moments(self.job.tasks, layer) if moment.key not in self._found(layer))

    def _found(self, layer: int) -> Mapping[str, ArrayRecord]:
        entry = self.steps.journal.get(dense_key(layer))
        return entry.statistics if entry else {}

    # -- the pass ----------------------------------------------------------------------------------------------------

    def _pass(self, layer: int, taken: Taken, moments: tuple[Moment, ...], store: bool) -> None:
        """All shards are through a layer."""
        if moments:
            self.given.append((layer, taken))
        keep = self.job.keep_statistics and bool(moments)
        if keep:
            self.stored.append((layer, taken))
        elif moments:
            self.samples[layer] = taken.samples
        if store or not keep:
            self.steps.enter(dense_key(layer), dense_entry(taken.done, self._found(layer), inputs=False))
        if store:
            self.base = layer + 1
            self._retain_inputs()
        if not keep:
            self.steps.observer.layer_done("statistics", layer, {})

    def _enter_stored(self) -> None:
        """Enters the moments of the first layer that are to be kept, when they are stored."""
        layer, taken = self.stored.popleft()
        statistics = {**self._found(layer), **self.summing.stored(taken)}
        self.steps.enter(dense_key(layer), dense_entry(taken.done, statistics, inputs=False))
        self._answer(layer)
        self.steps.observer.layer_done("statistics", layer, {})

    def _answer(self, layer: int) -> None:
        """Nobody needs the pass for this layer any more."""
        self.asking.remove(layer)
        self._retain_inputs()

    def _retain_inputs(self) -> None:
        """Drops all stored hidden states but those that enter the last layer at which the pass, or one that begins
        again, may begin, and later ones."""
        first = min([self.base, *self.asking[:1]])
        needed = range(self.forwards.last_committed("dense", first), self.base + 1)
        kept = [self.forwards.activations("dense", layer) for layer in needed]
        self.cleaner.retain_activations(tuple(record for records in kept for record in records or ()))

    # -- what is made of it ------------------------------------------------------------------------------------------

    def _go_on(self, layer: int, ranks: RanksOf) -> None:
        """What is due between two layers of the pass, before the shards of this one are waited for."""
        while len(self.given) > 1:  # a worker has the sums of two layers, no more
            self._take_given()
        # Before what leaves a layer is gone on from, all before it is entered; else layers that are written may come
        # between sums and their store.
        while len(self.stored) > (0 if layer == self.base else 1 + self.steps.pool.size):
            self._enter_stored()
        self.in_hand.go_on()
        if len(self.summed) >= max(1, self.steps.pool.size):
            self.in_hand.go_on(solving=0, writing=len(self.summed))
            self._solve(ranks)

    def _end(self, ranks: RanksOf) -> None:
        while self.given:
            self._take_given()
        self._solve(ranks)
        groups = sum(len(units) for units in self.in_hand.solving) // max(1, len(self.in_hand.solving))
        self.steps.observer.phase("compress", len(self.in_hand), max(1, groups))
        self.in_hand.go_on(solving=0, writing=0)
        while self.stored:
            self._enter_stored()

    def _take_given(self) -> None:
        layer, taken = self.given.popleft()
        self.summing.given(taken)
        self.summed.append((layer, taken))

    def _solve(self, ranks: RanksOf) -> None:
        """Begins the layers whose sums are there."""
        self.in_hand.begin([self._solves(layer, taken, ranks) for layer, taken in self.summed])
        self.summed = []

    def _solves(self, layer: int, taken: Taken, ranks: RanksOf) -> list[Solve]:
        known = {**self._found(layer), **taken.samples}
        statistics: dict[str, ArrayRecord | Summed] = {**known, **self.summing.summed(taken)}
        return solve_units(self.job.tasks, layer, statistics, ranks)

    def _enter_layer(self, layer: int, solved: Solved, record: StagedRecord) -> None:
        while self.stored and self.stored[0][0] <= layer:
            self._enter_stored()
        self.steps.enter_layer(layer, solved, record)
        if not self.job.keep_statistics:
            self._answer(layer)
            del self.samples[layer]
            self.retain_statistics([record for found in self.samples.values() for record in found.values()])
