"""The walk of `propagate: compressed`: statistics of each layer are taken behind the compressed ones before it.

A layer's outputs are made from its factors in memory while these are written. Order of durability: a layer's
statistics are entered before it, and it is entered before the hidden states that leave it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from manifests.entries import ActivationsEntry, StatisticsEntry
from manifests.errors import LostInputError
from manifests.records import ArrayRecord, StagedLayer
from pipeline.driver.forward_pass import ForwardPass
from pipeline.driver.interfaces import Cleaner
from pipeline.driver.job_spec import Job, RanksOf, staged_layer
from pipeline.driver.ledger_keys import activations_key, statistics_key
from pipeline.driver.reduction import Summing
from pipeline.driver.scheduler import Steps, solve_units, write_units
from pipeline.methods.registry import layer_moments, layers_of
from pipeline.units.sums import Summed
from pipeline.units.units import Forward, Solve, SolveDone, Unwritten, Write


class _Onward(NamedTuple):
    """Units under way that give a layer's outputs, and the keys of the solves whose factors they go through."""

    units: Sequence[Forward]
    solves: frozenset[str] = frozenset()


class CompressedWalk:
    """Solves and enters every claimed layer, in order."""

    def __init__(
        self,
        job: Job,
        steps: Steps,
        cleaner: Cleaner,
        summing: Summing,
        gradient_statistics: Callable[[int], Mapping[str, ArrayRecord]],
    ) -> None:
        self.job = job
        self.steps = steps
        self.cleaner = cleaner
        self.summing = summing
        self.gradient_statistics = gradient_statistics
        self.forwards = ForwardPass(job, steps.journal)

    def run(self, ranks: RanksOf) -> None:
        """Goes on where the journal says it was left."""
        journal = self.steps.journal
        pending = [layer for layer in layers_of(self.job.tasks) if not staged_layer(journal, layer)]
        if not pending:
            return
        last = pending[-1]
        base = self.forwards.last_committed("compressed", pending[0])
        self.steps.observer.phase("walk", last + 1 - base, 2 * self.job.shards)
        for layer in range(base, last + 1):
            if layer in pending:
                onward = self._compress(layer, base, ranks, emit=layer < last)
                if not self.job.keep_statistics:
                    self.cleaner.retain_statistics(())
            elif layer < last:
                onward = self._begun(layer, base, staged_layer(journal, layer))
            if layer < last:
                base = self._propagate(layer, base, onward)
                del onward  # which names the layer's factors: gone before the next one's moments are made

    def _compress(self, layer: int, base: int, ranks: RanksOf, *, emit: bool) -> _Onward:
        """Takes a layer's moments and compresses it from these; they are stored meanwhile, if they are to outlive it.

        With `emit` its outputs are begun.
        """
        moments, gradients = layer_moments(self.job.tasks, layer), self.gradient_statistics(layer)
        entered = self.steps.journal.get(statistics_key(layer))
        if entered is not None or not moments:
            known = entered.statistics if entered else {}
            return self._solve(layer, base, {**known, **gradients}, ranks, lambda: None, emit)
        units = self.forwards.units("compressed", layer, None, moments, base, emit=False)
        taken = self.summing.take(moments, units, self.job.keep_statistics)

        def enter() -> None:
            if self.job.keep_statistics:
                self.steps.enter(statistics_key(layer), StatisticsEntry(statistics=self.summing.stored(taken)))

        statistics: dict[str, ArrayRecord | Summed] = {**taken.samples, **self.summing.summed(taken), **gradients}
        return self._solve(layer, base, statistics, ranks, enter, emit)

    def _solve(
        self,
        layer: int,
        base: int,
        statistics: Mapping[str, ArrayRecord | Summed],
        ranks: RanksOf,
        enter: Callable[[], None],
        emit: bool,
    ) -> _Onward:
        """Solves every group of a layer, then writes and enters it; before that, `enter` enters something else."""
        solves = solve_units(self.job.tasks, layer, statistics, ranks)
        writes = partial(write_units, layer, solves)
        solutions: list[SolveDone] = self.steps.do(solves)
        self.steps.begin(writes(solutions))
        onward = _Onward(())
        if emit:
            onward = self._begun(layer, base, _unwritten(writes(solutions)[0], solutions), solves)
        (record,) = self.steps.build_on(solutions, solves, writes, begun=True)
        enter()
        self.steps.enter_layer(layer, list(zip(solves, solutions, strict=True)), record)
        return onward

    def _begun(
        self, layer: int, base: int, staged: StagedLayer | Unwritten | None, solves: Sequence[Solve] = ()
    ) -> _Onward:
        """What gives a layer's outputs, by the weights it now has, is submitted."""
        store = self.job.is_boundary(layer + 1)
        units = self.forwards.units("compressed", layer, staged, (), base, store=store)
        self.steps.begin(units)
        return _Onward(units, frozenset(solve.key for solve in solves))

    def _propagate(self, layer: int, base: int, onward: _Onward) -> int:
        """The outputs become the inputs of the next layer. The last layer whose inputs are committed."""
        try:
            done = self.steps.results(onward.units)
        except LostInputError as error:
            if onward.solves.isdisjoint(error.producers):
                raise
            self.steps.settle(onward.units)  # the layer is written by now
            self.steps.repairs.invalidate(error)
            done = self.steps.results(self._begun(layer, base, staged_layer(self.steps.journal, layer)).units)
        if not self.job.is_boundary(layer + 1):
            return base
        activations = tuple(result.activation for result in done)
        self.steps.enter(activations_key(layer + 1), ActivationsEntry(activations=activations))
        self.cleaner.retain_activations(activations)
        return layer + 1


def _unwritten(write: Write, solutions: Sequence[SolveDone]) -> Unwritten:
    rounded = {path: scheme for solution in solutions for path, scheme in solution.rounded.items()}
    return Unwritten(uuid.uuid4().hex, write, rounded)
