"""The driver's collaborators, and the steps that its phases share: committing entries, solving and writing layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manifests.entries import ActivationsEntry, GroupReport, LayerEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, E, FormSpec, LedgerKey, RefinedFigures, StagedRecord
from pipeline.driver.forward_units import ForwardUnits, stored_outputs
from pipeline.driver.interfaces import Cleaner, Journal
from pipeline.driver.job_spec import Job, RanksOf, staged_layer
from pipeline.driver.ledger_keys import activations_key, curves_key, layer_key
from pipeline.driver.recovery import Repairs, computed_keys
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.methods.method import Task
from pipeline.methods.registry import layers_of
from pipeline.units.sums import Summed
from pipeline.units.units import ShardDone, Solve, SolveDone, Unit, Write


class Session:
    """A job and the collaborators of its driver.

    Attributes:
        forwards: builds the units of forward passes.
        repairs: invalidates the entries of damaged or lost data.
    """

    def __init__(self, job: Job, scheduler: Scheduler, journal: Journal, cleaner: Cleaner) -> None:
        self.job = job
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.observer = scheduler.observer
        self.journal = journal
        self.cleaner = cleaner
        self.forwards = ForwardUnits(job, journal)
        self.repairs = Repairs(journal, computed_keys(job.num_layers), self.observer)

    def enter(self, key: LedgerKey[E], record: E) -> None:
        """Commit an entry."""
        self.journal.commit(key, record)
        self.repairs.progress()

    def commit_layer(self, layer: int, entry: LayerEntry) -> None:
        """Commit a compressed layer, and report it. All walks commit their layers here."""
        self.journal.commit(layer_key(layer), entry)
        self.repairs.progress()
        self.observer.layer_done("compress", layer, entry.groups)

    def commit_inputs(self, layer: int, results: Sequence[ShardDone]) -> None:
        """Commit the stored inputs of a layer of the compressed model, and drop earlier ones. `results`: of all shards
        at the layer before."""
        activations = stored_outputs(results)
        self.enter(activations_key(layer), ActivationsEntry(activations=activations))
        self.cleaner.retain_activations(activations)

    def entry(self, key: LedgerKey[E]) -> E:
        """Read an entry that must exist. Raises CorruptError if it is missing or damaged."""
        entry = self.journal.get(key)
        if entry is None:
            raise CorruptError(
                f"ledger of RUN_DIR: {key} is missing or damaged although later entries build on it; was a mount lost?",
                key,
            )
        return entry

    def uncompressed(self) -> list[int]:
        """Return the claimed layers that are not entered, ascending."""
        return [layer for layer in layers_of(self.job.tasks) if staged_layer(self.journal, layer) is None]

    def hint_of(self, task: Task) -> str:
        """Return the hint that a task's curve gives to its solve; empty if there is no curve."""
        entry = self.journal.get(curves_key(task.layer))
        curve = entry.curves.get(task.key) if entry else None
        return curve.hint if curve else ""

    def batch(self, pending: list[int]) -> tuple[list[int], list[int]]:
        """Split layers into a batch of one layer per worker, and the rest."""
        count = max(1, self.pool.size)  # 0 while the only worker is being replaced
        return pending[:count], pending[count:]

    def build_on(
        self, results: list[Any], producers: Sequence[Unit], consumers: Callable[[list[Any]], Sequence[Unit]]
    ) -> Coroutine[list[Any]]:
        """Run the units that `consumers` builds from the `results` of `producers`. Return their results.

        Results that were lost with a worker are recomputed and replaced in `results`. Raises LostInputError if anything
        else is lost.
        """
        while True:
            try:
                built: list[Any] = yield consumers(results)
                return built
            except LostInputError as error:
                lost = [place for place, unit in enumerate(producers) if unit.key in error.producers]
                if not lost:
                    raise
                self.repairs.invalidate(error)
                recomputed = yield [producers[place] for place in lost]
                for place, result in zip(lost, recomputed, strict=True):
                    results[place] = result


def solve_units(
    job: Job,
    layer: int,
    statistics: Mapping[str, ArrayRecord | Summed],
    ranks: RanksOf,
    hint: Callable[[Task], str] = lambda _: "",
) -> list[Solve]:
    """Return the units that solve the groups of a layer. `statistics`: by the keys of moments. `hint`: the hint of a
    task's curve."""
    return [
        Solve(
            task,
            ranks[task.key],
            {moment: statistics[moment.key] for moment in task.moments},
            hint=hint(task),
            parts=job.factor_parts(task),
            rounds=job.rounds,
        )
        for task in job.layer_tasks(layer)
    ]


def write_unit(layer: int, solved: Sequence[tuple[Solve, SolveDone]], of: str = "") -> Write:
    """Return the unit that writes a layer with these groups. `of`: as in `Write`."""
    forms: dict[str, FormSpec] = {}
    for _, solution in solved:
        forms.update(solution.forms)
    roles = tuple(role for solve, _ in solved for role in solve.task.roles)
    return Write(layer, tuple(handle for _, solution in solved for handle in solution.handles), roles, forms, of)


def write_units(layer: int, solves: Sequence[Solve], solutions: Sequence[SolveDone]) -> list[Write]:
    """Return `write_unit` as a list of one, for `Session.build_on`."""
    return [write_unit(layer, list(zip(solves, solutions, strict=True)))]


def layer_entry(
    layer: int,
    solved: Sequence[tuple[Solve, SolveDone]],
    record: StagedRecord,
    refined: RefinedFigures | None = None,
) -> LayerEntry:
    """Return the ledger entry of a compressed layer."""
    groups = {solve.task.name: _report(solve, solution) for solve, solution in solved}
    rounded = {path: scheme for _, solution in solved for path, scheme in solution.rounded.items()}
    forms = write_unit(layer, solved).forms
    return LayerEntry(staged=record, forms=forms, groups=groups, rounded=rounded, refined=refined)


def _report(solve: Solve, solution: SolveDone) -> GroupReport:
    return GroupReport(**{"method": solve.task.method, "ranks": dict(solve.ranks), **solution.report})
