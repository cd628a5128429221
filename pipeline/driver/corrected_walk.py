"""The walk of `correct: output` and of `refine`: solves or trains each layer on hidden states of both models.

docs/methods.md#corrections, docs/methods.md#refinement.

Hidden states of the dense and of the compressed model pass a layer side by side, once for each step of the corrections.
Each step stages a draft of the layer, sums the pairs on the draft, and solves the groups of this step from the sums.
The sums are not stored. A refinement then trains the whole draft on one worker. Only the finished layer is entered; an
interrupted job repeats the unfinished layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from manifests.entries import LayerEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, RefinedFigures, StagedLayer, StagedRecord
from pipeline.driver.forward_units import stored_outputs
from pipeline.driver.job_spec import RanksOf, staged_layer
from pipeline.driver.reduction import run_layer
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session, layer_entry, write_unit
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.method import Moment, Task
from pipeline.methods.moments import OUTPUT_GRADIENT
from pipeline.units.sums import Summed
from pipeline.units.units import Pair, Refine, RefineDone, Solve, SolvedGroup, SolveDone

SolvedByTask = dict[Task, tuple[Solve, SolveDone]]
NO_PAIRS: Mapping[Task, Mapping[Moment, Summed]] = {}
DraftPaths = tuple[str, ...]  # of a layer at its steps; see `Pair.drafts`
RefinementRecords = tuple[ArrayRecord, ...]  # the data that a layer is trained on, in shard order


class Draft(NamedTuple):
    """A written layer without an entry. `solved`: its groups solved so far. `refined`: the figures of its training."""

    solved: SolvedByTask
    staged: StagedLayer
    refined: RefinedFigures | None = None


class CorrectedWalk:
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
        base = self.session.forwards.last_committed("compressed", pending[0])
        corrects = any(task.corrections for task in self.job.tasks)
        passes = max(map(len, self.job.points)) * corrects + any(task.refine for task in self.job.tasks) + 1
        self.session.observer.phase("correct", pending[-1] + 1 - base, passes * self.job.shards)
        for layer in range(base, pending[-1] + 1):
            targets: RefinementRecords = ()
            paths: DraftPaths = ()
            if layer in pending:
                entry, targets, paths = yield from self._compress(layer, base)
                self.session.commit_layer(layer, entry)
                self._drop_drafts()
            if layer < pending[-1] and (targets or self.job.is_boundary(layer + 1)):
                base = yield from self._propagate(layer, base, targets, paths)
            elif targets:
                self.session.cleaner.drop_activations(targets)

    def _compress(self, layer: int, base: int) -> Coroutine[tuple[LayerEntry, RefinementRecords, DraftPaths]]:
        """Solve, train and write a layer.

        Return the entry to commit, the targets of the training, and the paths of the drafts at the layer's steps. The
        caller drops the targets. A layer without training has no targets, a trained one no paths.
        """
        tasks = self.job.layer_tasks(layer)
        draft, paths = yield from self._solve(layer, base)
        targets: RefinementRecords = ()
        if any(task.refine for task in tasks):
            units = self._units(layer, base, len(self.job.points[layer]), None, targets=True)
            targets = stored_outputs((yield units))
            draft = yield from self._refine(layer, draft, targets)
        return self._entry(layer, draft), targets, paths

    def _entry(self, layer: int, draft: Draft) -> LayerEntry:
        """Return the ledger entry of a finished draft."""
        solved = [draft.solved[task] for task in self.job.layer_tasks(layer)]
        return layer_entry(layer, solved, draft.staged, draft.refined)

    def _solve(self, layer: int, base: int) -> Coroutine[tuple[Draft, DraftPaths]]:
        """Solve a layer, step by step. Return its last draft, and the paths of the drafts at its steps; none if it is
        trained."""
        tasks = self.job.layer_tasks(layer)
        trains = any(task.refine for task in tasks)
        draft: Draft | None = None
        paths: DraftPaths = ()
        if uncorrected := [task for task in tasks if not task.corrections]:
            draft = yield from self._write_draft(layer, uncorrected)
        for step, points in enumerate(self.job.points[layer]):
            staged = draft.staged if draft else None
            paths = () if trains else (*paths, staged.path if staged else "")
            corrected = {task: moment for task in tasks for moment in task.corrections if moment.point in points}
            if corrected:
                moments = tuple(sorted(set(corrected.values())))
                units = self._units(layer, base, step, staged, paths, moments=moments)
                with damaged_as_lost(staged):
                    result = yield from run_layer(self.session, moments, units, store=False)
                    sums = yield from result.summed()
                pairs = {task: {moment: sums[moment.key]} for task, moment in corrected.items()}
                draft = yield from self._write_draft(layer, list(corrected), draft, pairs)
        assert draft is not None, "a claimed layer has groups"
        return draft, paths

    def _write_draft(
        self,
        layer: int,
        tasks: Sequence[Task],
        before: Draft | None = None,
        pairs: Mapping[Task, Mapping[Moment, Summed]] = NO_PAIRS,
    ) -> Coroutine[Draft]:
        """Solve some groups, and write a draft of the layer with all groups solved so far."""
        solved = before.solved if before else {}
        units = []
        for task in tasks:
            statistics: dict[Moment, ArrayRecord | Summed] = {**self.stored.of_task(task), **pairs.get(task, {})}
            factors = solved[task][1].factors if task in solved else None
            units.append(Solve(task, self.ranks[task.key], statistics, factors, self.session.hint_of(task)))

        def joined(solutions: Sequence[SolveDone]) -> SolvedByTask:
            """Return all groups solved so far, with these solutions."""
            others = {task: solved[task] for task in solved if task not in tasks}
            new = {
                task: (unit, _joined(solved[task][1], solution) if task in solved else solution)
                for task, unit, solution in zip(tasks, units, solutions, strict=True)
            }
            return others | new

        solutions: list[SolveDone] = yield units
        (record,) = yield from self.session.build_on(
            solutions, units, lambda solutions: [write_unit(layer, [*joined(solutions).values()])]
        )
        return _draft(layer, record, solved | joined(solutions))

    def _refine(self, layer: int, draft: Draft, targets: RefinementRecords) -> Coroutine[Draft]:
        """Train the groups of a draft with `refine`. Return the refined layer, already written."""
        tasks = [task for task in draft.solved if task.refine]
        groups = [draft.solved[task] for task in tasks]
        unit = Refine(
            layer,
            draft.staged,
            targets,
            tuple(SolvedGroup(unit.task, unit.ranks, solution.forms, solution.report) for unit, solution in groups),
            self._output_gradient(tasks),
        )

        def joined(results: Sequence[RefineDone]) -> SolvedByTask:
            """Return all groups of the layer, with the refined ones."""
            new = zip(tasks, (unit for unit, _ in groups), results[0].groups, strict=True)
            return draft.solved | {task: (unit, solution) for task, unit, solution in new}

        with damaged_as_lost(draft.staged, *targets):
            results: list[RefineDone] = yield [unit]
        (record,) = yield from self.session.build_on(
            results, [unit], lambda results: [write_unit(layer, [*joined(results).values()])]
        )
        return _draft(layer, record, joined(results), results[0].refined)

    def _output_gradient(self, tasks: Iterable[Task]) -> ArrayRecord | None:
        """Return the moment of the gradient at the layer's outputs, or None if no task needs it."""
        having = (self.stored.of_task(task) for task in tasks if OUTPUT_GRADIENT in task.moments)
        return next((moments[OUTPUT_GRADIENT] for moments in having), None)

    def _drop_drafts(self, besides: Iterable[StagedLayer] = ()) -> None:
        """Drop the drafts and statistics of entered layers. Keep the drafts in `besides`."""
        self.stored.retain()
        layers = (staged_layer(self.session.journal, layer) for layer in range(self.job.num_layers))
        self.session.cleaner.retain_staged((*(staged for staged in layers if staged), *besides))

    def _propagate(self, layer: int, base: int, targets: RefinementRecords, paths: DraftPaths) -> Coroutine[int]:
        """Run all shards of both models through a layer, and commit the outputs at a boundary. Return the last layer
        with committed inputs.

        `targets`: of the layer's training, if it was just trained; they hold the dense layer's outputs. `paths`: of the
        drafts at the steps in which it was just corrected.
        """
        staged, passes = staged_layer(self.session.journal, layer), len(self.job.points[layer])
        store = self.job.is_boundary(layer + 1)
        units = self._units(layer, base, passes, staged, paths, emit=True, store=store)
        units = [replace(unit, known=known) for unit, known in zip_longest(units, targets)]
        with damaged_as_lost(*targets):
            results = yield units
        if targets:
            self.session.cleaner.drop_activations(targets)
        if not store:
            return base
        self.session.commit_inputs(layer + 1, results)
        return layer + 1

    def _units(
        self,
        layer: int,
        base: int,
        step: int,
        staged: StagedLayer | None,
        paths: DraftPaths = (),
        *,
        moments: tuple[Moment, ...] = (),
        emit: bool = False,
        store: bool = False,
        targets: bool = False,
    ) -> list[Pair]:
        """Return the units that run all shards through the dense and the compressed layer, in shard order."""
        activations = self.session.forwards.activations("compressed", base)
        replay = tuple(staged_layer(self.session.journal, before) for before in range(base, layer))
        return [
            Pair(
                layer,
                shard,
                step,
                staged,
                moments,
                emit=emit,
                store=store or targets,
                base=base,
                base_record=activations[shard] if activations else None,
                replay=replay,
                ahead=layer + 1 if emit else None,
                drafts=paths,
                targets=targets,
            )
            for shard in range(self.job.shards)
        ]


@contextmanager
def damaged_as_lost(*drafts: StagedLayer | ArrayRecord | None) -> Iterator[None]:
    """Raise LostInputError for damaged data of drafts, which no ledger entry names: the layer is solved again."""
    try:
        yield
    except CorruptError as error:
        if any(draft is not None and error.path == draft.path for draft in drafts):
            raise LostInputError(str(error)) from error
        raise


def _draft(layer: int, record: StagedRecord, solved: SolvedByTask, refined: RefinedFigures | None = None) -> Draft:
    """Return the written layer with these groups, for workers to load."""
    rounded = {path: scheme for _, solution in solved.values() for path, scheme in solution.rounded.items()}
    forms = write_unit(layer, [*solved.values()]).forms
    return Draft(solved, StagedLayer(**dict(record), forms=forms, rounded=rounded), refined)


def _joined(before: SolveDone, after: SolveDone) -> SolveDone:
    """Join the reports and forms of two corrections of a group; the later one has all factors."""
    report = {**before.report, **after.report}
    if errors := [each["rounding_error"] for each in (before.report, after.report) if "rounding_error" in each]:
        report["rounding_error"] = max(errors)
    return replace(
        after,
        forms={**before.forms, **after.forms},
        report=report,
        rounded={**before.rounded, **after.rounded},
    )
