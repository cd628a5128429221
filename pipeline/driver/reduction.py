"""Reduces the moments of a layer: from the sums of single workers to one committed record of each moment.

Every worker keeps one sum of each moment, and the list of shards in it. When all shards have passed the layer, the sums
are collected, checked against their grids, added and stored in the background. The sums are exact
(docs/methods.md#sums-without-an-order), so that their order does not matter, as long as every shard is in exactly one
of them. The shards of a lost worker are run again. If a moment exceeds its grid, all shards are run again for it, with
a wider grid.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manifests.errors import LostInputError
from manifests.records import ArrayRecord
from pipeline.driver.scheduler import UNTIL_WANTED, Coroutine, Fiber, Reached, batch
from pipeline.driver.session import Session
from pipeline.methods.method import Moment
from pipeline.units.sums import (
    SUMMED,
    Add,
    CheckGrids,
    ChooseGrids,
    ChooseGridsDone,
    Collect,
    CollectDone,
    Summed,
    Sums,
    Total,
)
from pipeline.units.units import Reduce, ShardDone, Summable

COLLECTED, ADDED = "collected", "added"  # stages of a reduction
Grids = Mapping[Moment, Any]  # handles
SumHandles = Mapping[Moment, tuple[Any, ...]]  # of the parts of each sum


@dataclass(frozen=True)
class _WorkerSums:
    """The collected sums of one worker. `key`: the key of its `Collect`."""

    key: str
    done: CollectDone

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return self.key.rpartition("/")[2]

    def without_diagonals(self) -> _WorkerSums:
        """Return the sums without the diagonals, which only the check of the grids needs."""
        return replace(self, done=replace(self.done, diagonals={}))


@dataclass
class _Group:
    """Moments of some units that share one set of grids.

    Attributes:
        collected: the collected sums; empty once they are added.
        added: keys of the finished `Add` units.
        summed: the moments over all shards.
    """

    units: Sequence[Summable]
    grids: Grids
    collected: list[_WorkerSums]
    added: frozenset[str] = frozenset()
    summed: dict[Moment, Summed] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerPass:
    """The results of a pass of all shards through a layer.

    Attributes:
        done: the results of the units, without samples of values, which would stay in memory during the next pass.
        samples: key -> record of stored samples.
        reduction: the fiber that adds and stores the moments, and returns their records by key; None without moments.
        groups: the groups of the reduction, filled when it reaches `COLLECTED`.
    """

    done: list[ShardDone]
    samples: Mapping[str, ArrayRecord]
    reduction: Fiber[dict[str, ArrayRecord]] | None = None
    groups: list[_Group] = field(default_factory=list)

    def collected(self) -> Coroutine[None]:
        """Wait until the sums have left the workers and are within their grids."""
        if self.reduction:
            yield self.reduction.stage(COLLECTED)

    def summed(self) -> Coroutine[dict[str, Summed]]:
        """Wait for the moments over all shards, by key, before they are stored."""
        if self.reduction:
            yield self.reduction.stage(ADDED)
        return {moment.key: summed for group in self.groups for moment, summed in group.summed.items()}

    def stored(self) -> Coroutine[dict[str, ArrayRecord]]:
        """Wait for the records of the stored moments over all shards, by key. Lost results are recomputed."""
        moments = (yield self.reduction) if self.reduction else {}
        return {**self.samples, **moments}


def choose_grids(session: Session, moments: Sequence[Moment], units: Sequence[Summable]) -> Fiber[Grids]:
    """Start to choose the grids for the sums of these units; none if there is nothing to sum."""
    values = tuple(moment for moment in moments if moment.kind in SUMMED)
    choosing = [ChooseGrids(replace(units[0], moments=values))] if values else []
    return session.scheduler.spawn(_chosen(choosing))


def run_layer(
    session: Session,
    moments: Sequence[Moment],
    units: Sequence[Summable],
    *,
    store: bool = True,
    grids: Grids | None = None,
) -> Coroutine[LayerPass]:
    """Run the units of all shards through a layer, and start to reduce their sums.

    `store`: store the reduced moments. `grids`: the grids, if already chosen.
    """
    samples = tuple(moment for moment in moments if moment.kind == "sample")
    grids = (yield choose_grids(session, moments, units)) if grids is None else grids
    if not grids:
        done: list[ShardDone] = yield units
        return LayerPass(_stripped(done), (yield from _store_samples(session, samples, units, done)))
    sums = _new_sums(grids)
    units = [replace(unit, sums=sums) for unit in units]
    done = yield units
    rerun = [unit.for_sums_only(tuple(grids), sums) for unit in units]  # for shards whose sums are lost
    groups: list[_Group] = []
    reduction = session.scheduler.spawn(_Reduction(session, store).run(rerun, _workers(done), grids, groups))
    # A shard that is run again for its samples must not be added again.
    without_sums = [replace(unit, moments=samples, sums=None) for unit in units]
    records = yield from _store_samples(session, samples, without_sums, done)
    return LayerPass(_stripped(done), records, reduction, groups)


class _Reduction:
    """The reduction of the moments of one pass, from the sums of workers to records.

    Attributes:
        parts: the largest number of parts of each sum, which are added side by side.
    """

    def __init__(self, session: Session, store: bool) -> None:
        self.session = session
        self.store = store
        self.parts = max(1, session.pool.size)

    def run(
        self, units: Sequence[Summable], workers: Sequence[str], grids: Grids, groups: list[_Group]
    ) -> Coroutine[dict[str, ArrayRecord]]:
        """Collect, check, add and store the moments, and fill `groups`. Lost shards are run again once the main fiber
        waits."""
        collected = yield from self._collect(units, workers)
        if missing := _missing(units, collected):
            yield UNTIL_WANTED
            collected += yield from self._sum_again(missing, grids)
        groups += yield from self._within_grids(units, grids, collected)
        del collected
        yield Reached(COLLECTED)
        finishing = [self.session.scheduler.spawn(self._finish(group)) for group in groups]
        for fiber in finishing:
            yield fiber.stage(ADDED)
        yield Reached(ADDED)
        records: dict[str, ArrayRecord] = {}
        for fiber in finishing:
            records |= yield fiber
        return records

    def _within_grids(
        self, units: Sequence[Summable], grids: Grids, collected: list[_WorkerSums]
    ) -> Coroutine[list[_Group]]:
        """Check sums against their grids. Moments that exceed theirs are summed again, on their own, with wider
        grids."""
        try:
            (checked,) = yield [_check(units, grids, collected)]
        except LostInputError as error:
            yield UNTIL_WANTED
            collected = yield from self._replaced(units, grids, collected, error)
            groups: list[_Group] = yield from self._within_grids(units, grids, collected)
            return groups
        wider: Grids = checked.wider
        kept = {moment: grid for moment, grid in grids.items() if moment not in wider}
        groups = [_Group(units, kept, [each.without_diagonals() for each in collected])] if kept else []
        if wider:
            yield UNTIL_WANTED
            collected = yield from self._sum_again(units, wider)
            groups += yield from self._within_grids(units, wider, collected)
        return groups

    def _finish(self, group: _Group) -> Coroutine[dict[str, ArrayRecord]]:
        """Add and store the moments of a group."""
        first = group.units[0]
        while True:
            try:
                yield from self._add(group)
                yield Reached(ADDED)
                totals = [Total(first.lineage, first.layer, *summed) for summed in group.summed.items() if self.store]
                records = yield totals
                return {total.moment.key: record for total, record in zip(totals, records, strict=True)}
            except LostInputError as error:
                yield UNTIL_WANTED
                lost = not group.added.isdisjoint(error.producers)
                group.collected = yield from self._replaced(group.units, group.grids, group.collected, error, lost)

    def _add(self, group: _Group) -> Coroutine[None]:
        """Add the sums of all workers, within each node first."""
        nodes: dict[str, list[_WorkerSums]] = {}
        for each in group.collected:
            nodes.setdefault(each.done.node, []).append(each)
        if len(nodes) > 1:
            added = yield from self._add_each(group, nodes)
            collected = [_WorkerSums("", CollectDone(partials, {}, ())) for partials in added.values()]
        else:
            collected = group.collected
        whole = yield from self._add_each(group, {"": collected})
        tokens = {moment: sum(each.done.tokens[moment] for each in group.collected) for moment in group.grids}
        group.collected = []
        group.summed = {moment: Summed(grid, whole[""][moment], tokens[moment]) for moment, grid in group.grids.items()}

    def _add_each(self, group: _Group, nodes: Mapping[str, list[_WorkerSums]]) -> Coroutine[dict[str, SumHandles]]:
        """Add the sums of each node, part by part. A single sum is returned unchanged."""
        lineage, layer = group.units[0].lineage, group.units[0].layer
        adds = [
            Add(lineage, layer, moment, number, same, node, tuple(each.worker for each in collected if node))
            for node, collected in nodes.items()
            for moment in group.grids
            if len(collected) > 1
            for number, same in enumerate(zip(*(each.done.partials[moment] for each in collected), strict=True))
        ]
        sums: dict[str, dict[Moment, tuple[Any, ...]]] = {node: dict.fromkeys(group.grids, ()) for node in nodes}
        for add, done in zip(adds, (yield adds), strict=True):
            sums[add.node][add.moment] += (done.part,)
        group.added |= {add.key for add in adds}
        return {
            node: collected[0].done.partials if len(collected) == 1 else sums[node] for node, collected in nodes.items()
        }

    # -- lost sums --------------------------------------------------------------------------------------------------

    def _replaced(
        self,
        units: Sequence[Summable],
        grids: Grids,
        collected: list[_WorkerSums],
        error: LostInputError,
        known: bool = False,
    ) -> Coroutine[list[_WorkerSums]]:
        """Return the collected sums, with lost ones summed again.

        Raises the error if it names none of them, unless the loss is `known` and repaired elsewhere.
        """
        remaining = [each for each in collected if each.key not in error.producers]
        if len(remaining) == len(collected) and not known:
            raise error
        self.session.repairs.invalidate(error)
        if missing := _missing(units, remaining):
            remaining += yield from self._sum_again(missing, grids)
        return remaining

    def _sum_again(self, units: Sequence[Summable], grids: Grids) -> Coroutine[list[_WorkerSums]]:
        """Run some shards again for their sums only, and collect these. Repeat it for the shards of lost workers."""
        collected: list[_WorkerSums] = []
        while units:
            sums = _new_sums(grids)
            units = [unit.for_sums_only(tuple(grids), sums) for unit in units]
            done = yield units
            collected += yield from self._collect(units, _workers(done))
            units = _missing(units, collected)
        return collected

    def _collect(self, units: Sequence[Summable], workers: Sequence[str]) -> Coroutine[list[_WorkerSums]]:
        """Collect the sums of the workers that still exist."""
        first, sums = units[0], units[0].sums
        assert sums is not None
        collects = [
            Collect(first.lineage, first.layer, worker, sums.name, tuple(sums.grids), self.parts, first.part)
            for worker in workers
        ]
        results = zip(collects, (yield collects), strict=True)
        return [_WorkerSums(unit.key, done) for unit, done in results if done is not None and done.shards]


def _store_samples(
    session: Session, samples: Sequence[Moment], units: Sequence[Summable], done: list[ShardDone]
) -> Coroutine[dict[str, ArrayRecord]]:
    """Store the samples of values in the results of the units of all shards, in shard order: key -> record."""
    if not samples:
        return {}
    lineage, layer = units[0].lineage, units[0].layer

    def reduce_units(results: Sequence[ShardDone]) -> list[Reduce]:
        """Return the units that store the samples."""
        return [
            Reduce(lineage, layer, moment, tuple(result.partials[moment] for result in results)) for moment in samples
        ]

    records = yield from session.build_on(done, units, reduce_units)
    return {moment.key: record for moment, record in zip(samples, records, strict=True)}


def _chosen(choosing: Sequence[ChooseGrids]) -> Coroutine[Grids]:
    results: list[ChooseGridsDone] = yield from batch(choosing)
    return {moment: grid for done in results for moment, grid in done.grids.items()}


def _new_sums(grids: Grids) -> Sums:
    """Return sums with a unique name: workers may still hold the sums of an abandoned pass."""
    return Sums(f"pass-{uuid.uuid4().hex}", grids)


def _workers(done: Sequence[ShardDone]) -> tuple[str, ...]:
    """Return the distinct workers of some results."""
    return tuple(dict.fromkeys(result.worker for result in done))


def _missing(units: Sequence[Summable], collected: Sequence[_WorkerSums]) -> list[Summable]:
    """Return the units whose shards are in none of the sums."""
    present = [shard for each in collected for shard in each.done.shards]
    assert len(present) == len(set(present)), "a shard is added once"
    return [unit for unit in units if unit.shard not in present]


def _check(units: Sequence[Summable], grids: Grids, collected: Sequence[_WorkerSums]) -> CheckGrids:
    diagonals = {moment: tuple(each.done.diagonals[moment] for each in collected) for moment in grids}
    return CheckGrids(units[0].lineage, units[0].layer, grids, diagonals, units[0].part)


def _stripped(done: Sequence[ShardDone]) -> list[ShardDone]:
    return [replace(result, partials={}) for result in done]
