"""The walk of `propagate: compressed`: the statistics of each layer come from hidden states of the compressed model.

A layer's outputs are computed from the factors in memory while these are written. Order of durability: a layer's
statistics are entered before the layer, and the layer before its outputs.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from manifests.entries import LayerEntry, StatisticsEntry
from manifests.errors import LostInputError
from manifests.records import ArrayRecord, StagedLayer
from pipeline.driver.forward_units import joined
from pipeline.driver.job_spec import RanksOf, staged_layer
from pipeline.driver.ledger_keys import statistics_key
from pipeline.driver.reduction import LayerPass, run_layer
from pipeline.driver.scheduler import Coroutine, Fiber
from pipeline.driver.session import Session, layer_entry, solve_units, write_units
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.units.sums import Summed
from pipeline.units.units import ShardDone, SolveDone, Unwritten, Write


class _Outputs(NamedTuple):
    """The fiber that computes a layer's outputs. `solves`: keys of the units whose factors in memory it uses."""

    fiber: Fiber[list[ShardDone]]
    solves: frozenset[str]


class CompressedWalk:
    """Solves and enters every claimed layer, in order."""

    def __init__(self, session: Session, stored: StoredStatistics, ranks: RanksOf) -> None:
        self.job = session.job
        self.session = session
        self.stored = stored
        self.ranks = ranks

    def run(self) -> Coroutine[None]:
        """Run the walk, from the last committed hidden states."""
        pending = self.session.uncompressed()
        if not pending:
            return
        last = pending[-1]
        base = self.session.forwards.last_committed("compressed", pending[0])
        self.session.observer.phase("walk", last + 1 - base, 2 * self.job.shards)
        for layer in range(base, last + 1):
            outputs = None
            if layer in pending:
                entry, outputs = yield from self._compress(layer, base, emit=layer < last)
                self.session.commit_layer(layer, entry)
                if not self.job.keep_statistics:
                    self.session.cleaner.retain_statistics(())
            if layer < last:
                base = yield from self._propagate(layer, base, outputs)

    def _compress(self, layer: int, base: int, *, emit: bool) -> Coroutine[tuple[LayerEntry, _Outputs | None]]:
        """Compute a layer's moments, solve its groups and write the layer. Kept moments are entered.

        `emit`: also start to compute the layer's outputs. Return the entry to commit, and these outputs.
        """
        statistics, summed = yield from self._sum_moments(layer, base)
        solves = solve_units(self.job, layer, statistics, self.ranks)
        solutions: list[SolveDone] = yield solves
        writes = partial(write_units, layer, solves)
        writing = self.session.scheduler.spawn(self.session.build_on(solutions, solves, writes))
        outputs = None
        if emit:
            unwritten = _unwritten(writes(solutions)[0], solutions)
            passing = self.session.scheduler.spawn(self._pass(layer, base, unwritten))
            outputs = _Outputs(passing, frozenset(solve.key for solve in solves))
        (record,) = yield writing
        if summed and self.job.keep_statistics:
            yield from self._enter_moments(layer, statistics, summed)
        return layer_entry(layer, list(zip(solves, solutions, strict=True)), record), outputs

    def _sum_moments(
        self, layer: int, base: int
    ) -> Coroutine[tuple[dict[str, ArrayRecord | Summed], LayerPass | None]]:
        """Compute the moments of a layer. Kept moments are stored in the background.

        Return the moments by key, and the pass that summed the last of them; None if they were entered before.
        """
        moments = self.job.layer_moments(layer)
        entered = self.session.journal.get(statistics_key(layer))
        statistics: dict[str, ArrayRecord | Summed] = {**self.stored.of_backward_pass(layer)}
        if entered is not None:
            return {**statistics, **entered.statistics}, None
        result = None
        for part in self.job.parts(layer, moments) if moments else ():
            units = self.session.forwards.units(
                "compressed", layer, None, part.moments, base, part=part.number, emit=False
            )
            store = not part.last or self.job.keep_statistics
            result = yield from run_layer(self.session, part.moments, units, store=store)
            if not part.last:
                statistics |= yield from result.stored()
            else:
                statistics |= {**result.samples, **(yield from result.summed())}
        return statistics, result

    def _enter_moments(
        self, layer: int, statistics: Mapping[str, ArrayRecord | Summed], summed: LayerPass
    ) -> Coroutine[None]:
        """Wait until the moments of a pass are stored, and enter them with those of earlier parts of the layer."""
        moments = yield from summed.stored()
        claimed = {moment.key for moment in self.job.layer_moments(layer)}
        moments |= {key: each for key, each in statistics.items() if isinstance(each, ArrayRecord) and key in claimed}
        self.session.enter(statistics_key(layer), StatisticsEntry(statistics=moments))

    def _pass(self, layer: int, base: int, staged: StagedLayer | Unwritten | None) -> Coroutine[list[ShardDone]]:
        """Run all shards through a layer with its compressed weights, part by part."""
        store = self.job.is_boundary(layer + 1)
        results: list[list[ShardDone]] = []
        for part in self.job.parts(layer, (), staged):
            units = self.session.forwards.units(
                "compressed", layer, staged, (), base, part=part.number, store=store and part.last
            )
            results.append((yield units))
        return joined(results)

    def _pass_entered(self, layer: int, base: int) -> Coroutine[list[ShardDone]]:
        """Run all shards through a layer as it is entered: compressed, or dense if it is not claimed."""
        return (yield from self._pass(layer, base, staged_layer(self.session.journal, layer)))

    def _propagate(self, layer: int, base: int, outputs: _Outputs | None) -> Coroutine[int]:
        """Wait for a layer's outputs, and commit them at a boundary. Return the last layer with committed inputs.

        `outputs`: of a layer that was just solved; None: compute them from the entered layer.
        """
        try:
            results = (yield outputs.fiber) if outputs else (yield from self._pass_entered(layer, base))
        except LostInputError as error:
            if outputs is None or outputs.solves.isdisjoint(error.producers):
                raise
            self.session.repairs.invalidate(error)
            results = yield from self._pass_entered(layer, base)
        if not self.job.is_boundary(layer + 1):
            return base
        self.session.commit_inputs(layer + 1, results)
        return layer + 1


def _unwritten(write: Write, solutions: Sequence[SolveDone]) -> Unwritten:
    rounded = {path: scheme for solution in solutions for path, scheme in solution.rounded.items()}
    return Unwritten(uuid.uuid4().hex, write, rounded)
