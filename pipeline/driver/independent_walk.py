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
from pipeline.driver.corrected_walk import CorrectedWalk, RefinementRecords, SolvedByTask, stored_targets
from pipeline.driver.job_spec import RanksOf, trains_mixed
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.driver.stored_statistics import StoredStatistics
from pipeline.methods.registry import layers_of
from pipeline.units.units import ShardDone


class IndependentWalk(CorrectedWalk):
    """Solves, trains and enters every claimed layer."""

    def __init__(self, session: Session, stored: StoredStatistics) -> None:
        super().__init__(session, stored)
        self.mixed = any(map(trains_mixed, self.job.tasks))
        self.drafts: dict[int, StagedLayer] = {}  # the solved layers that the pass goes through

    def run(self, ranks: RanksOf) -> Coroutine[None]:
        """Run the walk."""
        pending = self.session.uncompressed()
        if not pending:
            return
        last = pending[-1]
        self.session.observer.phase("correct", len(pending), self.job.shards)
        waiting = [layer for layer in layers_of(self.job.tasks) if layer <= last] if self.mixed else pending
        targets: dict[int, RefinementRecords] = {}
        solved: dict[int, SolvedByTask] = {}
        for layer in range(last + 1):
            if not solved and waiting:
                some, waiting = self.session.batch(waiting)
                solved = yield from self._solve_some(some, ranks)
            trained = layer in solved and layer in pending and any(task.refine for task in self.job.layer_tasks(layer))
            if trained or layer < last:
                passed = yield from self._pass(layer, emit=layer < last, targets=trained)
                if trained:
                    targets[layer] = stored_targets(passed)
            if solved and layer == max(solved):
                yield from self._train({layer: solved[layer] for layer in solved if layer in pending}, targets)
                targets.clear()
                solved.clear()
        self._drop_drafts()

    def _solve_some(self, layers: Sequence[int], ranks: RanksOf) -> Coroutine[dict[int, SolvedByTask]]:
        """Solve some layers side by side, and write a draft of each. Return their groups."""
        solved: dict[int, SolvedByTask] = {layer: {} for layer in layers}
        fibers = {
            layer: self.session.scheduler.spawn(
                self._write_draft(layer, self.job.layer_tasks(layer), {}, ranks, solved[layer])
            )
            for layer in layers
        }
        for layer, fiber in fibers.items():
            draft = yield fiber
            assert draft is not None, "a claimed layer has groups"
            self.drafts[layer] = draft
        return solved

    def _pass(self, layer: int, *, emit: bool, targets: bool) -> Coroutine[list[ShardDone]]:
        """Run all shards through a layer: of both models with `mixed`, else of the dense one."""
        of_layers = self.drafts if self.mixed else {}
        units = self._units(layer, 0, 0, of_layers.get(layer), emit=emit, targets=targets)
        replay, share = tuple(map(of_layers.get, range(layer))), MIXED_SHARE if self.mixed else 1.0
        with self._damaged_as_lost(*of_layers.values()):
            passed: list[ShardDone] = yield [replace(unit, replay=replay, share=share) for unit in units]
        return passed

    def _train(self, solved: Mapping[int, SolvedByTask], targets: Mapping[int, RefinementRecords]) -> Coroutine[None]:
        """Train and enter some layers, and drop their training data."""
        fibers = {
            layer: self.session.scheduler.spawn(self._refine(layer, self.drafts[layer], targets[layer], solved[layer]))
            for layer in targets
        }
        for layer, groups in solved.items():
            staged, refined = (yield fibers[layer]) if layer in fibers else (self.drafts[layer], None)
            self.session.enter_layer(layer, [*groups.values()], staged, refined)
        self._drop_drafts(self.drafts.values() if self.mixed else ())
        for records in targets.values():
            self.session.cleaner.drop_activations(records)
