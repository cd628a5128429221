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
from pipeline.driver.job_spec import Job, RanksOf, staged_layer
from pipeline.driver.layer_reading import LayerReading
from pipeline.driver.layer_solving import LayersInHand, Solved
from pipeline.driver.ledger_keys import dense_key
from pipeline.driver.reduction import PassResult, Reductions
from pipeline.driver.scheduler import TaskStream
from pipeline.driver.session import Session, solve_units
from pipeline.methods.method import Moment
from pipeline.methods.registry import layer_moments, layers_of
from pipeline.units.sums import Summed


def layers_behind(workers: int) -> int:
    """The largest number of passed layers that are not entered: two that leave the workers, and for each worker one
    that is added, one that is solved and one that is written."""
    return 2 + 3 * max(1, workers)


class DenseWalk:
    """Solves and enters every claimed layer whose moments are not stored yet."""

    def __init__(
        self,
        job: Job,
        session: Session,
        retain_statistics: Callable[[Iterable[ArrayRecord]], None],
    ) -> None:
        """`retain_statistics`: drops stored moments, except those of unfinished layers and those in its argument."""
        self.job = job
        self.session = session
        self.reductions = Reductions(session)
        self.retain_statistics = retain_statistics
        self.forwards = ForwardPass(job, session.journal)
        self.in_hand = LayersInHand(session, self._enter_layer)
        self.base = 0  # the last layer whose inputs are committed
        self.asking: list[int] = []  # layers that the pass has to be run for
        self.collecting: deque[tuple[int, PassResult]] = deque()  # layers whose sums leave the workers
        self.adding: list[tuple[int, PassResult]] = []  # layers whose sums are being added, or are
        self.storing: deque[tuple[int, PassResult]] = deque()  # layers whose sums are being stored
        self.samples: dict[int, Mapping[str, ArrayRecord]] = {}  # stored, and named by no entry

    def run(self, ranks: RanksOf) -> TaskStream[None]:
        """Runs the pass from where the journal says it was left."""
        journal, claimed = self.session.journal, layers_of(self.job.tasks)
        self.asking = [layer for layer in claimed if not staged_layer(journal, layer) and self._missing(layer)]
        if not self.asking:
            return
        last, asking = self.asking[-1], frozenset(self.asking)
        self.base = self.forwards.last_committed("dense", self.asking[0])
        self.session.observer.phase("statistics", last + 1 - self.base, self.job.shards)
        reading = LayerReading(self.session, last)
        for layer in range(self.base, last + 1):
            moments = self._missing(layer) if layer in asking else ()
            store = layer < last and (layer + 1) % self._every() == 0
            weights = yield from reading.weights(layer)
            units = self.forwards.units(
                "dense", layer, None, moments, self.base,
                cosine=True, emit=layer < last, store=store, weights=weights,
            )  # fmt: skip
            choosing = self.reductions.choose(moments, units)
            yield from self._advance(layer, ranks)
            grids = yield choosing
            result = yield from self.reductions.run(moments, units, self.job.keep_statistics, grids)
            self._enter_pass(layer, result, moments, store)
        yield from self._end(ranks)

    def _every(self) -> int:
        """The number of layers between two commits of hidden states. Where moments are not kept, a resumed pass starts
        at the oldest unfinished layer, so that more frequent commits would only take room."""
        behind = 1 if self.job.keep_statistics else layers_behind(self.session.pool.size)
        return self.job.every * -(-behind // self.job.every)

    def _missing(self, layer: int) -> tuple[Moment, ...]:
        """The moments of a layer that are not entered."""
        return tuple(
            moment for moment in layer_moments(self.job.tasks, layer) if moment.key not in self._entered(layer)
        )

    def _entered(self, layer: int) -> Mapping[str, ArrayRecord]:
        entry = self.session.journal.get(dense_key(layer))
        return entry.statistics if entry else {}

    # -- the pass ----------------------------------------------------------------------------------------------------

    def _enter_pass(self, layer: int, result: PassResult, moments: tuple[Moment, ...], store: bool) -> None:
        """Enters the pass of all shards through a layer, without moments that are yet to be stored."""
        if moments:
            self.collecting.append((layer, result))
        keep = self.job.keep_statistics and bool(moments)
        if keep:
            self.storing.append((layer, result))
        elif moments:
            self.samples[layer] = result.samples
        if store or not keep:
            self.session.enter(dense_key(layer), dense_entry(result.done, self._entered(layer), inputs=False))
        if store:
            self.base = layer + 1
            self._retain_inputs()
        if not keep:
            self.session.observer.layer_done("statistics", layer, {})

    def _enter_stored(self) -> TaskStream[None]:
        """Enters the moments of the first layer that are to be kept, when they are stored."""
        layer, result = self.storing.popleft()
        moments = yield from self.reductions.stored(result)
        statistics = {**self._entered(layer), **moments}
        self.session.enter(dense_key(layer), dense_entry(result.done, statistics, inputs=False))
        self._answer(layer)
        self.session.observer.layer_done("statistics", layer, {})

    def _answer(self, layer: int) -> None:
        """Marks a layer as finished with the pass."""
        self.asking.remove(layer)
        self._retain_inputs()

    def _retain_inputs(self) -> None:
        """Drops stored hidden states of layers before the one where a resumed pass would start."""
        first = min([self.base, *self.asking[:1]])
        needed = range(self.forwards.last_committed("dense", first), self.base + 1)
        kept = [self.forwards.activations("dense", layer) for layer in needed]
        self.session.cleaner.retain_activations(tuple(record for records in kept for record in records or ()))

    # -- solving -----------------------------------------------------------------------------------------------------

    def _advance(self, layer: int, ranks: RanksOf) -> TaskStream[None]:
        """Enters, solves and writes earlier layers, before the shards of this one are waited for."""
        while len(self.collecting) > 1:  # a worker has the sums of two layers, no more
            yield from self._collect_one()
        # At a commit of hidden states all earlier moments are entered first; otherwise layers may be written while
        # sums are being stored.
        while len(self.storing) > (0 if layer == self.base else 1 + self.session.pool.size):
            yield from self._enter_stored()
        yield from self.in_hand.advance()
        if len(self.adding) >= max(1, self.session.pool.size):
            yield from self.in_hand.advance(solving=0, writing=len(self.adding))
            yield from self._solve(ranks)

    def _end(self, ranks: RanksOf) -> TaskStream[None]:
        while self.collecting:
            yield from self._collect_one()
        yield from self._solve(ranks)
        groups = self.in_hand.groups // max(1, len(self.in_hand.solving))
        self.session.observer.phase("compress", len(self.in_hand), max(1, groups))
        yield from self.in_hand.advance(solving=0, writing=0)
        while self.storing:
            yield from self._enter_stored()

    def _collect_one(self) -> TaskStream[None]:
        layer, result = self.collecting.popleft()
        yield from self.reductions.collected(result)
        self.adding.append((layer, result))

    def _solve(self, ranks: RanksOf) -> TaskStream[None]:
        """Starts to solve the layers whose sums are collected."""
        layers = []
        for layer, result in self.adding:
            summed = yield from self.reductions.summed(result)
            statistics: dict[str, ArrayRecord | Summed] = {**self._entered(layer), **result.samples, **summed}
            layers.append(solve_units(self.job.tasks, layer, statistics, ranks))
        self.adding = []
        self.in_hand.begin(layers)

    def _enter_layer(self, layer: int, solved: Solved, record: StagedRecord) -> TaskStream[None]:
        while self.storing and self.storing[0][0] <= layer:
            yield from self._enter_stored()
        self.session.enter_layer(layer, solved, record)
        if not self.job.keep_statistics:
            self._answer(layer)
            del self.samples[layer]
            self.retain_statistics([record for samples in self.samples.values() for record in samples.values()])
