"""The walk of `propagate: compressed`: the statistics of each layer come from hidden states of the compressed model.

A layer's outputs are computed from the factors in memory while these are written. Order of durability: a layer's
statistics are entered before the layer, and the layer before its outputs.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from manifests.entries import ActivationsEntry, StatisticsEntry
from manifests.errors import LostInputError
from manifests.records import ArrayRecord, StagedLayer
from pipeline.driver.forward_units import joined
from pipeline.driver.job_spec import LayerPart, RanksOf, staged_layer
from pipeline.driver.ledger_keys import activations_key, statistics_key
from pipeline.driver.reduction import LayerPass, Reductions
from pipeline.driver.scheduler import Coroutine, Fiber
from pipeline.driver.session import Session, solve_units, write_units
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.units.sums import Summed
from pipeline.units.units import ShardDone, Solve, SolveDone, Unwritten, Write


class _Outputs(NamedTuple):
    """The fiber that computes a layer's outputs. `solves`: keys of the units whose factors it uses."""

    fiber: Fiber[list[Any]] | None
    solves: frozenset[str] = frozenset()


class CompressedWalk:
    """Solves and enters every claimed layer, in order."""

    def __init__(self, session: Session, stored: StoredStatistics) -> None:
        self.job = session.job
        self.session = session
        self.stored = stored
        self.reductions = Reductions(session)

    def run(self, ranks: RanksOf) -> Coroutine[None]:
        """Run the walk, from the last committed hidden states."""
        pending = self.session.uncompressed()
        if not pending:
            return
        last = pending[-1]
        base = self.session.forwards.last_committed("compressed", pending[0])
        self.session.observer.phase("walk", last + 1 - base, 2 * self.job.shards)
        for layer in range(base, last + 1):
            if layer in pending:
                outputs = yield from self._compress(layer, base, ranks, emit=layer < last)
                if not self.job.keep_statistics:
                    self.session.cleaner.retain_statistics(())
            elif layer < last:
                outputs = self._outputs(layer, base, staged_layer(self.session.journal, layer))
            if layer < last:
                base = yield from self._propagate(layer, base, outputs)

    def _compress(self, layer: int, base: int, ranks: RanksOf, *, emit: bool) -> Coroutine[_Outputs]:
        """Compute a layer's moments and compress the layer. Kept moments are stored in the background.

        `emit`: also start to compute the layer's outputs.
        """
        moments, result = self.job.layer_moments(layer), None
        entered = self.session.journal.get(statistics_key(layer))
        statistics: dict[str, ArrayRecord | Summed] = {**self.stored.of_backward_pass(layer)}
        if entered is not None:
            statistics |= entered.statistics
        elif moments:
            *earlier, last = self.job.parts(layer, moments)
            for part in earlier:
                statistics |= yield from self.reductions.stored(
                    (yield from self._sum_moments(layer, part, base, store=True))
                )
            result = yield from self._sum_moments(layer, last, base, store=self.job.keep_statistics)
            statistics |= {**result.samples, **(yield from self.reductions.summed(result))}
        return (yield from self._solve(layer, base, statistics, ranks, result, emit))

    def _sum_moments(self, layer: int, part: LayerPart, base: int, *, store: bool) -> Coroutine[LayerPass]:
        """Run all shards through a part of a layer and sum its moments."""
        units = self.session.forwards.units("compressed", layer, None, part.moments, base, part=part.number, emit=False)
        return (yield from self.reductions.run(part.moments, units, store))

    def _solve(
        self,
        layer: int,
        base: int,
        statistics: Mapping[str, ArrayRecord | Summed],
        ranks: RanksOf,
        result: LayerPass | None,
        emit: bool,
    ) -> Coroutine[_Outputs]:
        """Solve every group of a layer, then write and enter the layer. Kept moments of `result` are entered
        first."""
        solves = solve_units(self.job, layer, statistics, ranks)
        writes = partial(write_units, layer, solves)
        solutions: list[SolveDone] = yield solves
        writing = self.session.scheduler.spawn(self.session.build_on(solutions, solves, writes))
        outputs = _Outputs(None)
        if emit:
            outputs = self._outputs(layer, base, _unwritten(writes(solutions)[0], solutions), solves)
        (record,) = yield writing
        if result and self.job.keep_statistics:
            moments = yield from self.reductions.stored(result)
            earlier = {key: record for key, record in statistics.items() if isinstance(record, ArrayRecord)}
            claimed = {moment.key for moment in self.job.layer_moments(layer)}
            moments |= {key: record for key, record in earlier.items() if key in claimed}
            self.session.enter(statistics_key(layer), StatisticsEntry(statistics=moments))
        self.session.enter_layer(layer, list(zip(solves, solutions, strict=True)), record)
        return outputs

    def _outputs(
        self, layer: int, base: int, staged: StagedLayer | Unwritten | None, solves: Sequence[Solve] = ()
    ) -> _Outputs:
        """Start to compute a layer's outputs with its compressed weights."""
        store = self.job.is_boundary(layer + 1)
        passing = self.session.scheduler.spawn(self._passed(layer, base, staged, store))
        return _Outputs(passing, frozenset(solve.key for solve in solves))

    def _passed(
        self, layer: int, base: int, staged: StagedLayer | Unwritten | None, store: bool
    ) -> Coroutine[list[ShardDone]]:
        """Run all shards through a layer with its compressed weights, part by part."""
        results: list[list[ShardDone]] = []
        for part in self.job.parts(layer, (), staged):
            units = self.session.forwards.units(
                "compressed", layer, staged, (), base, part=part.number, store=store and part.last
            )
            results.append((yield units))
        return joined(results)

    def _propagate(self, layer: int, base: int, outputs: _Outputs) -> Coroutine[int]:
        """Wait for a layer's outputs, and commit them at a boundary. Return the last layer with committed inputs."""
        try:
            results = yield outputs.fiber
        except LostInputError as error:
            if outputs.solves.isdisjoint(error.producers):
                raise
            self.session.repairs.invalidate(error)
            from_disk = self._outputs(layer, base, staged_layer(self.session.journal, layer))  # it is written by now
            results = yield from_disk.fiber
        if not self.job.is_boundary(layer + 1):
            return base
        activations = tuple(result.activation for result in results)
        self.session.enter(activations_key(layer + 1), ActivationsEntry(activations=activations))
        self.session.cleaner.retain_activations(activations)
        return layer + 1


def _unwritten(write: Write, solutions: Sequence[SolveDone]) -> Unwritten:
    rounded = {path: scheme for solution in solutions for path, scheme in solution.rounded.items()}
    return Unwritten(uuid.uuid4().hex, write, rounded)
