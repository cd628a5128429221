"""The walk of `refine: {inputs: dense}` and `mixed`: workers train layers independently. docs/methods.md#refinement.

A batch of layers, one per worker, is solved. A pass stores their training data: hidden states of the dense model, with
`mixed` also a share of the error of the solved layers before. The layers are then trained and entered in parallel,
before the pass continues. It commits no hidden states: an interrupted job repeats the layers in training, the pass
starts again at the embeddings, and with `mixed` all layers are solved again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from manifests.method_entry import MIXED_SHARE
from manifests.records import StagedLayer
from pipeline.driver.corrected_walk import CorrectedWalk, Draft, RefinementRecords, damaged_as_lost
from pipeline.driver.forward_units import stored_outputs
from pipeline.driver.job_spec import RanksOf, trains_mixed
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.registry import layers_of
from pipeline.units.units import ShardDone


class IndependentWalk(CorrectedWalk):
    """Solves, trains and enters every claimed layer."""

    def __init__(self, session: Session, stored: StoredStatistics, ranks: RanksOf) -> None:
        super().__init__(session, stored, ranks)
        self.mixed = any(map(trains_mixed, self.job.tasks))
        self.drafts: dict[int, StagedLayer] = {}  # the solved layers that a pass of mixed inputs goes through

    def run(self) -> Coroutine[None]:
        """Run the walk."""
        pending = self.session.uncompressed()
        if not pending:
            return
        last = pending[-1]
        self.session.observer.phase("correct", len(pending), self.job.shards)
        waiting = [layer for layer in layers_of(self.job.tasks) if layer <= last] if self.mixed else pending
        solved: dict[int, Draft] = {}
        targets: dict[int, RefinementRecords] = {}
        for layer in range(last + 1):
            if not solved and waiting:
                some, waiting = self.session.batch(waiting)
                solved = yield from self._solve_some(some)
            trained = layer in solved and layer in pending and any(task.refine for task in self.job.layer_tasks(layer))
            if trained or layer < last:
                passed = yield from self._pass(layer, emit=layer < last, targets=trained)
                if trained:
                    targets[layer] = stored_outputs(passed)
            if solved and layer == max(solved):
                yield from self._train({layer: solved[layer] for layer in solved if layer in pending}, targets)
                targets.clear()
                solved.clear()
        self._drop_drafts()

    def _solve_some(self, layers: Sequence[int]) -> Coroutine[dict[int, Draft]]:
        """Solve some layers side by side, and write a draft of each."""
        spawn, tasks_of = self.session.scheduler.spawn, self.job.layer_tasks
        fibers = {layer: spawn(self._write_draft(layer, tasks_of(layer))) for layer in layers}
        drafts: dict[int, Draft] = {}
        for layer, fiber in fibers.items():
            drafts[layer] = yield fiber
        if self.mixed:
            self.drafts |= {layer: draft.staged for layer, draft in drafts.items()}
        return drafts

    def _pass(self, layer: int, *, emit: bool, targets: bool) -> Coroutine[list[ShardDone]]:
        """Run all shards through a layer: of both models with `mixed`, else of the dense one."""
        units = self._units(layer, 0, 0, self.drafts.get(layer), emit=emit, targets=targets)
        replay, share = tuple(map(self.drafts.get, range(layer))), MIXED_SHARE if self.mixed else 1.0
        with damaged_as_lost(*self.drafts.values()):
            passed: list[ShardDone] = yield [replace(unit, replay=replay, share=share) for unit in units]
        return passed

    def _train(self, drafts: Mapping[int, Draft], targets: Mapping[int, RefinementRecords]) -> Coroutine[None]:
        """Train and enter some layers, and drop their training data."""
        spawn = self.session.scheduler.spawn
        fibers = {layer: spawn(self._refine(layer, drafts[layer], targets[layer])) for layer in targets}
        for layer, solved in drafts.items():
            draft: Draft = (yield fibers[layer]) if layer in fibers else solved
            self.session.commit_layer(layer, self._entry(layer, draft))
        self._drop_drafts(self.drafts.values())
        for records in targets.values():
            self.session.cleaner.drop_activations(records)
