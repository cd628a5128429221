"""A pass of all shards through a layer, and the sums that come of it, whoever did which shard.

Every worker keeps one sum of each moment, and knows the shards in it. When all shards are through, these are
collected, held against their grids, added, and stored, all of it while something else is computed. They are
exact (docs/methods.md#sums-without-an-order): what matters is that every shard is in one of them, once. The shards of
a worker that is gone are done again; so is a moment that exceeds its grid, with a wider one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manifests.errors import LostInputError
from manifests.records import ArrayRecord
from pipeline.driver.scheduler import Steps
from pipeline.methods.method import Moment
from pipeline.units.sums import (
    SUMMED,
    Add,
    AddDone,
    CheckGrids,
    CheckGridsDone,
    ChooseGrids,
    ChooseGridsDone,
    Collect,
    CollectDone,
    Summed,
    Sums,
    Total,
)
from pipeline.units.units import ShardDone, Summable

Parts = Mapping[Moment, tuple[Any, ...]]  # handles


@dataclass(frozen=True)
class _Part:
    """What a worker gave away, in at most `cut` parts for each moment; `key` names the unit that has it."""

    key: str
    done: CollectDone
    cut: int

    @property
    def worker(self) -> str:
        """Who had it."""
        return self.key.rpartition("/")[2]

    def without_diagonals(self) -> _Part:
        """When they have been looked at."""
        return replace(self, done=replace(self.done, diagonals={}))


@dataclass
class _Sum:
    """Moments of some units, which share their grids.

    `collects` come first, and a `check` of what all workers gave; then `adds`, where several workers have a part, which
    nobody holds any more afterwards; then `totals`.
    """

    units: Sequence[Summable]
    grids: Mapping[Moment, Any]
    parts: list[_Part]
    store: bool = True
    collects: list[Collect] = field(default_factory=list)
    check: list[CheckGrids] = field(default_factory=list)  # one, when all shards are in the parts
    adds: list[Add] = field(default_factory=list)
    added: frozenset[str] = frozenset()  # keys of those that are done
    summed: dict[Moment, Summed] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)


@dataclass(frozen=True)
class Taken:
    """What a pass of all shards gave.

    Attributes:
        done: the results of the units, without samples of values, so that nobody holds those while the next are made.
        sums: what is on its way to the store (`Summing.summed`, `Summing.stored`).
        samples: key -> record of stored samples.
    """

    done: list[ShardDone]
    sums: list[_Sum]
    samples: Mapping[str, ArrayRecord]


class Summing:
    """Does the units of all shards through a layer and adds their moments."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def choose(self, moments: Sequence[Moment], units: Sequence[Summable]) -> list[ChooseGrids]:
        """What chooses the grids of the sums of these units, if there will be any, is begun."""
        values = tuple(moment for moment in moments if moment.kind in SUMMED)
        choosing = [ChooseGrids(replace(units[0], moments=values))] if values else []
        self.steps.begin(choosing)
        return choosing

    def chosen(self, choosing: Sequence[ChooseGrids]) -> Mapping[Moment, Any]:
        """The grids, when they are chosen."""
        found: list[ChooseGridsDone] = self.steps.results(choosing)
        return {moment: grid for done in found for moment, grid in done.grids.items()}

    def take(
        self,
        moments: Sequence[Moment],
        units: Sequence[Summable],
        store: bool = True,
        grids: Mapping[Moment, Any] | None = None,
    ) -> Taken:
        """Does the units of all shards. What they have summed is being given away, to be added and stored, when this
        returns: `given` waits for the first of these. `grids`: where they are chosen already."""
        samples = tuple(moment for moment in moments if moment.kind == "sample")
        grids = self.chosen(self.choose(moments, units)) if grids is None else grids
        if not grids:
            done = self.steps.do(units)
            return Taken(_stripped(done), [], self._samples(samples, units, done))
        passed = self._new_pass(grids)
        units = [replace(unit, sums=passed) for unit in units]
        done = self.steps.do(units)
        alone = [unit.for_sums_alone(tuple(grids), passed) for unit in units]  # what may have to be done again
        made = _Sum(alone, grids, [], store)
        self._collect(made, done)
        # Whoever does a shard again for its samples need not, and must not, add it again.
        again = [replace(unit, moments=samples, sums=None) for unit in units]
        return Taken(_stripped(done), [made], self._samples(samples, again, done))

    def given(self, taken: Taken) -> None:
        """Waits until nothing of it is with the workers any more, and within its grids."""
        taken.sums[:] = [found for made in taken.sums for found in self._given(made)]

    def summed(self, taken: Taken) -> dict[str, Summed]:
        """The moments over all shards, by key, as they are before they are stored."""
        found: dict[str, Summed] = {}
        self.given(taken)
        for made in taken.sums:
            self._until(made, self._added)
            found |= {moment.key: summed for moment, summed in made.summed.items()}
        return found

    def stored(self, taken: Taken) -> dict[str, ArrayRecord]:
        """The moments over all shards: key -> record of what is stored. What is lost on the way is summed again."""
        records = dict(taken.samples)
        self.given(taken)
        for made in taken.sums:
            found: list[ArrayRecord] = self._until(made, self._written)
            records |= {total.moment.key: record for total, record in zip(made.totals, found, strict=True)}
        return records

    def _collect(self, made: _Sum, done: Sequence[ShardDone]) -> None:
        """Has the workers give away what they summed, which is checked and added if nothing of it is amiss."""
        cut = max(1, self.steps.pool.size)
        made.collects = _collects(made.units, done, cut)

        def check(found: Sequence[CollectDone | None]) -> None:
            made.parts = _parts(made.collects, found, cut)
            self.steps.let_go(made.collects)
            if not _missing(made.units, made.parts):
                check = _check(made.units, made.grids, made.parts)
                made.check = [replace(check, diagonals={})]  # asked for by its key; nobody holds the rest
                self.steps.begin([check], add)

        def add(checked: Sequence[CheckGridsDone]) -> None:
            if not checked[0].wider:
                made.parts = [part.without_diagonals() for part in made.parts]
                self._begin(made)

        self.steps.begin(made.collects, check)

    def _given(self, made: _Sum) -> list[_Sum]:
        """These sums, when they are being added; what went with a worker or exceeds its grid is summed again first."""
        if not made.collects:
            return [made]
        self.steps.results(made.collects)
        check, parts = made.check, made.parts
        made.collects, made.check = [], []
        try:
            checked: list[CheckGridsDone] = self.steps.results(check)
            if checked and not checked[0].wider:
                return [made]
        except LostInputError as error:
            self.steps.settle(check)
            parts = self._made_again(made.units, made.grids, parts, error)
        if missing := _missing(made.units, parts):
            again = self._for_sums_alone(missing, made.grids)
            parts = parts + self._collected(again, self.steps.do(again), parts[0].cut if parts else None)
        sums = self._within_grids(made.units, parts)
        for found in sums:
            found.store = made.store
            self._begin(found)
        return sums

    def _until(self, made: _Sum, reached: Callable[[_Sum], Any]) -> Any:
        while True:
            try:
                return reached(made)
            except LostInputError as error:
                self.steps.settle([*made.adds, *made.totals])
                made.added, made.adds, made.totals = made.added | {add.key for add in made.adds}, [], []
                lost = not made.added.isdisjoint(error.producers)
                made.parts = self._made_again(made.units, made.grids, made.parts, error, lost)
                self._begin(made)

    def _added(self, made: _Sum) -> None:
        while made.adds:
            adds = list(made.adds)
            self.steps.results(adds)
            made.added |= {add.key for add in adds}
            made.adds, made.parts = made.adds[len(adds) :], []

    def _written(self, made: _Sum) -> list[Any]:
        self._added(made)
        return self.steps.results(made.totals)

    def _begin(self, made: _Sum) -> None:
        """Adds what several workers have summed, on each node first; nobody waits for it yet."""
        made.summed, nodes = {}, dict[str, list[_Part]]()
        for part in made.parts:
            nodes.setdefault(part.done.node, []).append(part)
        if len(nodes) == 1:
            return self._add(made, {"": made.parts}, lambda added: self._store(made, added[""]))

        def across(added: Mapping[str, Parts]) -> None:
            given = [_Part("", CollectDone(partials, {}, ()), 0) for partials in added.values()]
            self._add(made, {"": given}, lambda all_added: self._store(made, all_added[""]))

        self._add(made, nodes, across)

    def _add(self, made: _Sum, groups: Mapping[str, list[_Part]], then: Callable[[Mapping[str, Parts]], None]) -> None:
        """Adds the sums of each group, part by part; what only one worker has is as it is."""
        lineage, layer = made.units[0].lineage, made.units[0].layer
        adds = [
            Add(lineage, layer, moment, number, same, node, tuple(part.worker for part in given if node))
            for node, given in groups.items()
            for moment in made.grids
            if len(given) > 1
            for number, same in enumerate(zip(*(part.done.partials[moment] for part in given), strict=True))
        ]
        known = {node: given[0].done.partials for node, given in groups.items() if len(given) == 1}

        def added(done: Sequence[AddDone]) -> None:
            found: dict[str, dict[Moment, tuple[Any, ...]]] = {
                node: dict.fromkeys(made.grids, ()) for node in groups if node not in known
            }
            for add, each in zip(adds, done, strict=True):
                found[add.node][add.moment] += (each.part,)
            then({**known, **found})

        made.adds += adds
        if adds:
            self.steps.begin(adds, added)
        else:
            added(())

    def _store(self, made: _Sum, parts: Parts) -> None:
        """Begins to store the sums, if they are to be, which nobody waits for yet either."""
        made.summed = {moment: Summed(grid, parts[moment]) for moment, grid in made.grids.items()}
        first = made.units[0]
        if made.store:
            made.totals = [Total(first.lineage, first.layer, moment, summed) for moment, summed in made.summed.items()]
            self.steps.begin(made.totals)

    def _samples(
        self, samples: tuple[Moment, ...], units: Sequence[Summable], done: list[ShardDone]
    ) -> dict[str, ArrayRecord]:
        return self.steps.reduced(units[0].lineage, units[0].layer, samples, units, done) if samples else {}

    def _new_pass(self, grids: Mapping[Moment, Any]) -> Sums:
        # As no other driver of these workers calls one: they may still have a pass that was given up.
        return Sums(f"pass-{uuid.uuid4().hex}", grids)

    def _within_grids(self, units: Sequence[Summable], parts: list[_Part]) -> list[_Sum]:
        """The sums of these units; those that exceed their grids are taken again, alone, with wider ones."""
        assert units[0].sums is not None
        grids = units[0].sums.grids
        try:
            checked: CheckGridsDone = self.steps.do([_check(units, grids, parts)])[0]
        except LostInputError as error:
            return self._within_grids(units, self._made_again(units, grids, parts, error))
        wider, parts = checked.wider, [part.without_diagonals() for part in parts]
        kept = {moment: grid for moment, grid in grids.items() if moment not in wider}
        found = [_Sum(units, kept, parts)] if kept else []
        if wider:
            again = self._for_sums_alone(units, wider)
            found += self._within_grids(again, self._collected(again, self.steps.do(again)))
        return found

    def _made_again(
        self,
        units: Sequence[Summable],
        grids: Mapping[Moment, Any],
        parts: list[_Part],
        error: LostInputError,
        known: bool = False,
    ) -> list[_Part]:
        """The parts, with those that are lost summed again. `known`: that something else is made again, too."""
        left = [part for part in parts if part.key not in error.producers]
        if len(left) == len(parts) and not known:
            raise error
        self.steps.repairs.invalidate(error)
        if not (missing := _missing(units, left)):
            return left
        again = self._for_sums_alone(missing, grids)
        return left + self._collected(again, self.steps.do(again), left[0].cut if left else None)

    def _collected(self, units: Sequence[Summable], done: Sequence[ShardDone], cut: int | None = None) -> list[_Part]:
        """What the workers have summed of these units; those of workers that are gone meanwhile are done again."""
        assert units[0].sums is not None
        grids, parts = units[0].sums.grids, list[_Part]()
        cut = max(1, self.steps.pool.size) if cut is None else cut
        while True:
            collects = _collects(units, done, cut)
            parts += _parts(collects, self.steps.do(collects), cut)
            if not (units := _missing(units, parts)):
                return parts
            units = self._for_sums_alone(units, grids)
            done = self.steps.do(units)

    def _for_sums_alone(self, units: Sequence[Summable], grids: Mapping[Moment, Any]) -> list[Summable]:
        """The same shards in a new pass, for these moments and nothing else."""
        passed = self._new_pass(grids)
        return [unit.for_sums_alone(tuple(grids), passed) for unit in units]


def _collects(units: Sequence[Summable], done: Sequence[ShardDone], cut: int) -> list[Collect]:
    """From everybody who did one of these units."""
    first, passed = units[0], units[0].sums
    assert passed is not None
    workers = dict.fromkeys(result.worker for result in done)
    return [Collect(first.lineage, first.layer, each, passed.name, tuple(passed.grids), cut) for each in workers]


def _parts(collects: Sequence[Collect], found: Sequence[CollectDone | None], cut: int) -> list[_Part]:
    """What there was to have; nothing from workers that are gone."""
    given = zip(collects, found, strict=True)
    return [_Part(unit.key, done, cut) for unit, done in given if done is not None and done.shards]


def _missing(units: Sequence[Summable], parts: Sequence[_Part]) -> list[Summable]:
    there = [shard for part in parts for shard in part.done.shards]
    assert len(there) == len(set(there)), "a shard is added once"
    return [unit for unit in units if unit.shard not in there]


def _check(units: Sequence[Summable], grids: Mapping[Moment, Any], parts: Sequence[_Part]) -> CheckGrids:
    diagonals = {moment: tuple(part.done.diagonals[moment] for part in parts) for moment in grids}
    return CheckGrids(units[0].lineage, units[0].layer, grids, diagonals)


def _stripped(done: Sequence[ShardDone]) -> list[ShardDone]:
    return [replace(result, partials={}) for result in done]
