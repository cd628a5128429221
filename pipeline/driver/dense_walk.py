"""A dense pass during which layers are solved from their sums in memory.

It serves jobs whose ranks do not depend on calibration text. Moments that are kept are stored in the background.
Layers are solved in batches of one layer per worker, so that every worker has work between two layers of the pass. A
batch starts when the previous one is solved, which limits the sums in memory.

Order of durability: hidden states are kept until every layer computed from them is entered, or its moments are. Kept
moments are entered before their layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from manifests.records import ArrayRecord
from pipeline.driver.forward_units import dense_entry, joined
from pipeline.driver.job_spec import LayerPart, RanksOf
from pipeline.driver.layer_reading import LayerReading
from pipeline.driver.layer_solving import PassQueue
from pipeline.driver.ledger_keys import dense_key
from pipeline.driver.reduction import LayerPass, choose_grids, run_layer
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session, solve_units
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.method import Moment
from pipeline.units.sums import Summed
from pipeline.units.units import Forward


def layers_behind(workers: int) -> int:
    """Return how many layers the pass may be ahead of the entered ones. The sums of two layers are leaving the
    workers. For each worker, one more layer is being added, one solved and one written."""
    return 2 + 3 * max(1, workers)


class DenseWalk:
    """Solves and enters the claimed layers whose moments are not stored."""

    def __init__(self, session: Session, stored: StoredStatistics, ranks: RanksOf) -> None:
        self.job = session.job
        self.session = session
        self.stored = stored
        self.ranks = ranks
        self.forwards = session.forwards
        self.queue = PassQueue(session)
        self.base = 0  # the last layer whose inputs are committed
        self.waiting: list[int] = []  # layers that need the pass
        self.collecting: deque[tuple[int, LayerPass]] = deque()  # layers whose sums are leaving the workers
        self.adding: list[tuple[int, LayerPass]] = []  # layers whose sums have left the workers
        self.storing: deque[tuple[int, LayerPass]] = deque()  # layers whose sums are being stored
        self.samples: dict[int, Mapping[str, ArrayRecord]] = {}  # stored samples without a ledger entry

    def run(self) -> Coroutine[None]:
        """Run the pass, from the last committed hidden states."""
        self.waiting = [layer for layer in self.session.uncompressed() if self.stored.missing(layer)]
        if not self.waiting:
            return
        last, waiting = self.waiting[-1], frozenset(self.waiting)
        self.base = self.forwards.last_committed("dense", self.waiting[0])
        self.session.observer.phase("statistics", last + 1 - self.base, self.job.shards)
        reading = LayerReading(self.session, last)
        for layer in range(self.base, last + 1):
            moments = self.stored.missing(layer) if layer in waiting else ()
            store = layer < last and (layer + 1) % self._every() == 0
            weights = yield from reading.weights(layer)
            units = partial(
                self.forwards.units, "dense", layer, None,
                base=self.base, emit=layer < last, weights=weights,
            )  # fmt: skip
            parts = self.job.parts(layer, moments)
            whole = units(moments, store=store) if len(parts) == 1 else []
            choosing = choose_grids(self.session, moments if whole else (), whole)
            yield from self._finish_sums(layer)
            yield from self._enter_written()
            if len(self.adding) >= max(1, self.session.pool.size):
                yield from self._enter_written(solving=0, writing=len(self.adding))
                yield from self._solve()
            if whole:
                grids, keep = (yield choosing), self.job.keep_statistics
                result = yield from run_layer(self.session, moments, whole, store=keep, grids=grids)
            else:
                result = yield from self._pass_parts(parts, units, store)
            self._enter_pass(layer, result, moments, store)
        yield from self._solve_last()
        yield from self._enter_written(solving=0, writing=0)
        while self.storing:
            yield from self._enter_stored()

    def _pass_parts(
        self, parts: Sequence[LayerPart], units: Callable[..., list[Forward]], store: bool
    ) -> Coroutine[LayerPass]:
        """Pass a layer slice by slice. The moments of each slice are stored during the next one, even if they are not
        kept."""
        while self.collecting:  # a worker holds the sums of two passes at most
            yield from self._collect_one()
        results: list[LayerPass] = []
        records: dict[str, ArrayRecord] = {}
        for part in parts:
            passing = units(part.moments, part=part.number, store=store and part.last)
            results.append((yield from run_layer(self.session, part.moments, passing)))
            for result in results[-2:-1]:
                records |= yield from result.stored()
        records |= yield from results[-1].stored()
        return LayerPass(joined([result.done for result in results]), records)

    def _every(self) -> int:
        """Return the number of layers between two commits of hidden states. Without kept moments, a resumed pass
        starts at the oldest unfinished layer, so that more frequent commits would be useless."""
        behind = 1 if self.job.keep_statistics else layers_behind(self.session.pool.size)
        return self.job.every * -(-behind // self.job.every)

    # -- the pass ----------------------------------------------------------------------------------------------------

    def _enter_pass(self, layer: int, result: LayerPass, moments: tuple[Moment, ...], store: bool) -> None:
        """Enter the pass of all shards through a layer, if it commits hidden states or keeps no moments. Kept moments
        are entered by `_enter_stored`."""
        if moments:
            self.collecting.append((layer, result))
        keep = self.job.keep_statistics and bool(moments)
        if keep:
            self.storing.append((layer, result))
        elif moments:
            self.samples[layer] = result.samples
        if store or not keep:
            self.session.enter(
                dense_key(layer), dense_entry(result.done, self.stored.of_dense_pass(layer), inputs=False)
            )
        if store:
            self.base = layer + 1
            self._retain_inputs()
        if not keep:
            self.session.observer.layer_done("statistics", layer, {})

    def _enter_stored(self) -> Coroutine[None]:
        """Wait until the kept moments of the oldest layer are stored, and enter them."""
        layer, result = self.storing.popleft()
        moments = yield from result.stored()
        statistics = {**self.stored.of_dense_pass(layer), **moments}
        self.session.enter(dense_key(layer), dense_entry(result.done, statistics, inputs=False))
        self._finish(layer)
        self.session.observer.layer_done("statistics", layer, {})

    def _finish(self, layer: int) -> None:
        """Mark a layer as finished: it needs the pass no longer."""
        self.waiting.remove(layer)
        self._retain_inputs()

    def _retain_inputs(self) -> None:
        """Drop stored hidden states from which a resumed pass would not start."""
        first = min([self.base, *self.waiting[:1]])
        needed = range(self.forwards.last_committed("dense", first), self.base + 1)
        records = [self.forwards.activations("dense", layer) for layer in needed]
        self.session.cleaner.retain_activations(tuple(record for of_layer in records for record in of_layer or ()))

    # -- solving -----------------------------------------------------------------------------------------------------

    def _finish_sums(self, layer: int) -> Coroutine[None]:
        """Collect sums and enter stored moments of earlier layers, before the shards pass this one."""
        while len(self.collecting) > 1:  # a worker holds the sums of two layers at most
            yield from self._collect_one()
        # Where hidden states are committed, wait for the moments of all earlier layers; elsewhere some may be pending.
        while len(self.storing) > (0 if layer == self.base else 1 + self.session.pool.size):
            yield from self._enter_stored()

    def _solve_last(self) -> Coroutine[None]:
        """Start to solve the last layers of the pass."""
        while self.collecting:
            yield from self._collect_one()
        yield from self._solve()
        groups = self.queue.groups // max(1, len(self.queue.solving))
        self.session.observer.phase("compress", len(self.queue), max(1, groups))

    def _collect_one(self) -> Coroutine[None]:
        layer, result = self.collecting.popleft()
        yield from result.collected()
        self.adding.append((layer, result))

    def _solve(self) -> Coroutine[None]:
        """Start to solve the layers whose sums are collected."""
        layers = []
        for layer, result in self.adding:
            summed = yield from result.summed()
            entered = self.stored.of_dense_pass(layer)
            statistics: dict[str, ArrayRecord | Summed] = {**entered, **result.samples, **summed}
            layers.append(solve_units(self.job, layer, statistics, self.ranks))
        self.adding = []
        self.queue.begin(layers)

    def _enter_written(self, solving: float = inf, writing: float = inf) -> Coroutine[None]:
        """Enter written layers, each after its kept moments, until few are solved and written (`PassQueue`)."""
        while written := (yield from self.queue.next_written(solving, writing)):
            layer, entry = written
            while self.storing and self.storing[0][0] <= layer:
                yield from self._enter_stored()
            self.session.commit_layer(layer, entry)
            if not self.job.keep_statistics:
                self._finish(layer)
                del self.samples[layer]
                self.stored.retain([record for samples in self.samples.values() for record in samples.values()])
