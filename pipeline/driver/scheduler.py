"""Does units and enters what came of them: what every phase of the driver is made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from manifests.entries import GroupReport, LayerEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, E, FormSpec, Key, StagedRecord
from pipeline.driver.interfaces import Journal, Observer, Pool
from pipeline.driver.job_spec import RanksOf
from pipeline.driver.ledger_keys import layer_key
from pipeline.driver.recovery import Repairs
from pipeline.methods.method import Moment, Task
from pipeline.units.sums import Summed
from pipeline.units.units import Lineage, Reduce, ShardDone, Solve, SolveDone, Unit, Write

T = TypeVar("T")
# Gives units that are due and is sent their results, in their order, until it returns; none are due: not yet.
Course = Generator[Sequence[Unit], list[Any], T]


def follow(course: Course[T], do: Callable[[Sequence[Unit]], list[Any]]) -> T:
    """What a course returns, whose units `do` does. Raises what either raises."""
    try:
        units = next(course)
        while True:
            units = course.send(do(units))
    except StopIteration as end:
        found: T = end.value
        return found


def do_units(pool: Pool, units: Sequence[Unit], observer: Observer) -> list[Any]:
    """Submits units and waits for all of them. Results in the order of the units."""
    results: dict[str, Any] = {}
    for unit in units:
        pool.submit(unit)
    while len(results) < len(units):
        unit, result = pool.wait()
        results[unit.key] = result
        observer.unit_done(unit, result)
    return [results[unit.key] for unit in units]


class Steps:
    """A pool and a journal, and what is lost between two units mended."""

    def __init__(self, pool: Pool, journal: Journal, observer: Observer, repairs: Repairs) -> None:
        self.pool = pool
        self.journal = journal
        self.observer = observer
        self.repairs = repairs
        self.begun: set[str] = set()  # keys of the units whose results nobody has asked for yet
        self.found: dict[str, Any] = {}
        self.lost: dict[str, LostInputError] = {}  # what a unit raised that was not waited for just then
        self.following: dict[tuple[str, ...], Callable[[list[Any]], None]] = {}

    def do(self, units: Sequence[Unit]) -> list[Any]:
        """Submits units and waits for all of them. Results in the order of the units."""
        self.begin(units)
        return self.results(units)

    def begin(self, units: Sequence[Unit], then: Callable[[list[Any]], None] | None = None) -> None:
        """Submits units whose results are asked for later, by `results`; `then` is called when all have theirs."""
        if then is not None:
            self.following[tuple(unit.key for unit in units)] = then
        for unit in units:
            self.begun.add(unit.key)
            self.pool.submit(unit)

    def results(self, units: Sequence[Unit]) -> list[Any]:
        """Waits for units that were begun. Results in their order. Raises what one of them raised."""
        missing = {unit.key for unit in units} - self.found.keys()
        while missing:
            for key in missing & self.lost.keys():
                self.begun.discard(key)
                raise self.lost.pop(key)
            missing.discard(self._next())
        self.begun -= {unit.key for unit in units}
        return [self.found.pop(unit.key) for unit in units]

    def there(self, units: Sequence[Unit]) -> bool:
        """Whether `results` would wait for nothing."""
        keys = {unit.key for unit in units}
        return keys <= self.found.keys() or not keys.isdisjoint(self.lost)

    def let_go(self, units: Sequence[Unit]) -> None:
        """Holds no more of what came of units that were begun: their results are None."""
        self.found.update(dict.fromkeys(unit.key for unit in units))

    def settle(self, units: Sequence[Unit]) -> None:
        """Waits for those of some units that were begun, and forgets what came of them."""
        keys = {unit.key for unit in units}
        self.following = {names: then for names, then in self.following.items() if not keys & set(names)}
        for unit in units:
            if unit.key in self.begun:
                with suppress(LostInputError):
                    self.results([unit])

    def cancel(self) -> None:
        """Waits for everything begun, and forgets it."""
        self.pool.cancel_pending()
        for known in (self.begun, self.found, self.lost, self.following):
            known.clear()

    def _next(self) -> str:
        """Waits for a unit: its key."""
        try:
            unit, result = self.pool.wait()
        except LostInputError as error:
            if error.unit not in self.begun:
                raise
            self.lost[error.unit] = error
            return ""
        self.found[unit.key] = result
        self.observer.unit_done(unit, result)
        for keys in [keys for keys in self.following if unit.key in keys and self.found.keys() >= set(keys)]:
            self.following.pop(keys)([self.found[key] for key in keys])
        return unit.key

    def do_both(
        self, producers: Sequence[Unit], consumers: Callable[[list[Any]], Sequence[Unit]]
    ) -> tuple[list[Any], list[Any]]:
        """Results of some units, and of those that build on them. What is lost in between is done again, no more."""
        made = self.do(producers)
        return made, self.build_on(made, producers, consumers)

    def build_on(
        self,
        made: list[Any],
        producers: Sequence[Unit],
        consumers: Callable[[list[Any]], Sequence[Unit]],
        begun: bool = False,
    ) -> list[Any]:
        """Results of the units that build on what `producers` have `made`; there, what is lost is replaced.

        `begun`: these units are under way.
        """
        while True:
            try:
                return self.results(consumers(made)) if begun else self.do(consumers(made))
            except LostInputError as error:
                lost = [place for place, unit in enumerate(producers) if unit.key in error.producers]
                if not lost:
                    raise
                self.settle(consumers(made))
                begun = False
                self.repairs.invalidate(error)
                for place, result in zip(lost, self.do([producers[place] for place in lost]), strict=True):
                    made[place] = result

    def reduced(
        self, lineage: Lineage, layer: int, samples: Sequence[Moment], units: Sequence[Unit], done: list[ShardDone]
    ) -> dict[str, ArrayRecord]:
        """The samples of values that the units of all shards have left behind, in shard order: key -> record."""

        def reduces(done: Sequence[ShardDone]) -> list[Unit]:
            return [
                Reduce(lineage, layer, moment, tuple(result.partials[moment] for result in done)) for moment in samples
            ]

        records = self.build_on(done, units, reduces)
        return {moment.key: record for moment, record in zip(samples, records, strict=True)}

    def enter(self, key: Key[E], record: E) -> None:
        """Commits an entry."""
        self.journal.commit(key, record)
        self.repairs.progress()

    def enter_layer(self, layer: int, solved: Sequence[tuple[Solve, SolveDone]], record: StagedRecord) -> None:
        """Commits a compressed layer."""
        entry = layer_entry(layer, solved, record)
        self.enter(layer_key(layer), entry)
        self.observer.layer_done("compress", layer, entry.groups)

    def entry(self, key: Key[E]) -> E:
        """An entry that must be there. Raises CorruptError."""
        entry = self.journal.get(key)
        if entry is None:
            raise CorruptError(
                f"ledger of RUN_DIR: {key} is missing or damaged although later entries build on it; was a mount lost?",
                key,
            )
        return entry

    def batch(self, pending: list[int]) -> tuple[list[int], list[int]]:
        """As many layers as there are workers, and the rest."""
        count = max(1, self.pool.size)  # 0 while the only worker is being replaced
        return pending[:count], pending[count:]


def solve_units(
    tasks: Sequence[Task],
    layer: int,
    statistics: Mapping[str, ArrayRecord | Summed],
    ranks: RanksOf,
    told: Callable[[Task], str] = lambda _: "",
) -> list[Solve]:
    """Solves every group of a layer. `statistics`: by the keys of moments. `told`: by curves of these."""
    return [
        Solve(task, ranks[task.key], {moment: statistics[moment.key] for moment in task.moments}, told=told(task))
        for task in tasks
        if task.layer == layer
    ]


def write_unit(layer: int, parts: Sequence[tuple[Solve, SolveDone]], of: str = "") -> Write:
    """Writes a layer of which these groups are solved. `of`: as `Write` has it."""
    forms: dict[str, FormSpec] = {}
    for _, solution in parts:
        forms.update(solution.forms)
    roles = tuple(role for solve, _ in parts for role in solve.task.roles)
    return Write(layer, tuple(solution.factors for _, solution in parts), roles, forms, of)


def write_units(layer: int, solves: Sequence[Solve], solutions: Sequence[SolveDone]) -> list[Write]:
    """The one unit that writes a layer of which these groups are solved."""
    return [write_unit(layer, list(zip(solves, solutions, strict=True)))]


def layer_entry(layer: int, solved: Sequence[tuple[Solve, SolveDone]], record: StagedRecord) -> LayerEntry:
    """What is entered of a compressed layer."""
    groups = {solve.task.name: _report(solve, done) for solve, done in solved}
    rounded = {path: scheme for _, done in solved for path, scheme in done.rounded.items()}
    return LayerEntry(staged=record, forms=write_unit(layer, solved).forms, groups=groups, rounded=rounded)


def _report(solve: Solve, solution: SolveDone) -> GroupReport:
    return GroupReport(**{"method": solve.task.method, "ranks": dict(solve.ranks), **solution.report})
