"""A pass of all shards through a layer, and the sums that come of it, whoever did which shard.

Every worker keeps one sum of each moment, and knows the shards in it. When all shards are through, these are
collected and added. They are exact (docs/methods.md#sums-without-an-order): what matters is that every shard is in
one of them, once. The shards of a worker that is gone are done again; so is a moment that exceeds its grid, with a
wider one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manifests.errors import LostInputError
from manifests.records import ArrayRecord
from pipeline.methods.method import Moment
from pipeline.steps import Steps
from pipeline.sum_units import ChooseGrids, ChooseGridsDone, Collect, CollectDone, Sums, Total, TotalDone
from pipeline.units import Forward, ForwardDone


@dataclass(frozen=True)
class _Part:
    """What a worker gave away; `key` names the unit that has it."""

    key: str
    done: CollectDone


class Summing:
    """Does the forward units of a layer and adds their moments."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.passes = itertools.count()

    def run(self, moments: Sequence[Moment], units: Sequence[Forward]) -> tuple[list[Any], dict[str, ArrayRecord]]:
        """The results of the units of all shards, and the moments over all: key -> record of what is stored.

        The results are returned without samples of values, so that nobody holds those while the next layer's are made.
        """
        sums = tuple(moment for moment in moments if moment.kind == "value")
        samples = tuple(moment for moment in moments if moment.kind == "sample")
        if not sums:
            done = self.steps.do(units)
            return _stripped(done), self._samples(samples, units, done)
        chosen: ChooseGridsDone = self.steps.do([ChooseGrids(replace(units[0], moments=sums))])[0]
        passed = self._new_pass(chosen.grids)
        units = [replace(unit, sums=passed) for unit in units]
        done = self.steps.do(units)
        records = self._totals(units, sums, chosen.grids, self._collected(units, done))
        # Whoever does a shard again for its samples need not, and must not, add it again.
        again = [replace(unit, moments=samples, sums=None) for unit in units]
        return _stripped(done), {**records, **self._samples(samples, again, done)}

    def _samples(
        self, samples: tuple[Moment, ...], units: Sequence[Forward], done: list[ForwardDone]
    ) -> dict[str, ArrayRecord]:
        return self.steps.reduced(units[0].lineage, units[0].layer, samples, units, done, {}) if samples else {}

    def _new_pass(self, grids: Mapping[Moment, Any]) -> Sums:
        return Sums(f"pass-{next(self.passes)}", grids)

    def _totals(
        self, units: Sequence[Forward], moments: tuple[Moment, ...], grids: Mapping[Moment, Any], parts: list[_Part]
    ) -> dict[str, ArrayRecord]:
        """Records of the sums; those that exceed their grids are taken again, alone, with wider ones."""
        lineage, layer = units[0].lineage, units[0].layer
        while True:
            totals = [
                Total(lineage, layer, moment, grids[moment], tuple(part.done.partials[moment] for part in parts))
                for moment in moments
            ]
            try:
                found: list[TotalDone] = self.steps.do(totals)
                break
            except LostInputError as error:
                parts = self._made_again(units, moments, grids, parts, error)
        records = {
            moment.key: result.record
            for moment, result in zip(moments, found, strict=True)
            if result.record is not None
        }
        wider = {moment: result.wider for moment, result in zip(moments, found, strict=True) if result.record is None}
        if wider:
            again = self._for_sums_alone(units, wider)
            records |= self._totals(again, tuple(wider), wider, self._collected(again, self.steps.do(again)))
        return records

    def _made_again(
        self,
        units: Sequence[Forward],
        moments: tuple[Moment, ...],
        grids: Mapping[Moment, Any],
        parts: list[_Part],
        error: LostInputError,
    ) -> list[_Part]:
        """The parts, with those that are lost summed again."""
        left = [part for part in parts if part.key not in error.producers]
        if len(left) == len(parts):
            raise error
        self.steps.pool.cancel_pending()
        self.steps.repairs.invalidate(error)
        there = {shard for part in left for shard in part.done.shards}
        again = self._for_sums_alone(
            [unit for unit in units if unit.shard not in there], {moment: grids[moment] for moment in moments}
        )
        return left + self._collected(again, self.steps.do(again))

    def _collected(self, units: Sequence[Forward], done: Sequence[ForwardDone]) -> list[_Part]:
        """What the workers have summed of these units; those of workers that are gone meanwhile are done again."""
        assert units[0].sums is not None
        grids = units[0].sums.grids
        parts: list[_Part] = []
        while True:
            passed = units[0].sums
            assert passed is not None
            workers = dict.fromkeys(result.worker for result in done)
            collects = [
                Collect(units[0].lineage, units[0].layer, worker, passed.name, tuple(grids)) for worker in workers
            ]
            for unit, found in zip(collects, self.steps.do(collects), strict=True):
                if found is not None and found.shards:
                    parts.append(_Part(unit.key, found))
            there = [shard for part in parts for shard in part.done.shards]
            assert len(there) == len(set(there)), "a shard is added once"
            units = [unit for unit in units if unit.shard not in there]
            if not units:
                return parts
            units = self._for_sums_alone(units, grids)
            done = self.steps.do(units)

    def _for_sums_alone(self, units: Sequence[Forward], grids: Mapping[Moment, Any]) -> list[Forward]:
        """The same shards in a new pass, for these moments and nothing else."""
        passed = self._new_pass(grids)
        return [
            replace(unit, moments=tuple(grids), sums=passed, cosine=False, emit=False, store=False, keep_inputs=False)
            for unit in units
        ]


def _stripped(done: Sequence[ForwardDone]) -> list[ForwardDone]:
    return [replace(result, partials={}) for result in done]
