"""The walk of `refine: {inputs: dense}`: workers solve and train layers independently. docs/methods.md#refinement.

A dense pass stores the training data of a batch of layers, one per worker. The layers are then solved, trained and
entered in parallel, before the pass continues. It commits no hidden states: an interrupted job repeats the layers in
training, and the pass starts again at the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from manifests.records import RefinedFigures, StagedLayer
from pipeline.driver.corrected_walk import CorrectedWalk, Solved, Targets
from pipeline.driver.job_spec import RanksOf
from pipeline.driver.scheduler import TaskStream


class IndependentWalk(CorrectedWalk):
    """Solves, trains and enters every claimed layer."""

    def run(self, ranks: RanksOf) -> TaskStream[None]:
        """Runs the walk."""
        pending = self.session.uncompressed()
        if not pending:
            return
        last = pending[-1]
        self.session.observer.phase("correct", len(pending), self.job.shards)
        targets: dict[int, Targets] = {}
        current, pending = self.session.batch(pending)
        for layer in range(last + 1):
            trained = layer in current and any(task.refine for task in self.job.tasks if task.layer == layer)
            if trained or layer < last:
                units = self._units(layer, 0, 0, None, emit=layer < last, targets=trained)
                passed = yield [replace(unit, replay=(None,) * layer) for unit in units]
                if trained:
                    targets[layer] = tuple(result.activation for result in passed)
            if layer == current[-1]:
                yield from self._train(current, targets, ranks)
                targets.clear()
                current, pending = self.session.batch(pending) if pending else (current, pending)

    def _train(self, layers: list[int], targets: Mapping[int, Targets], ranks: RanksOf) -> TaskStream[None]:
        """Solves, trains and enters some layers, and drops their drafts and targets."""
        tasks = [self.session.scheduler.spawn(self._finished(layer, targets.get(layer, ()), ranks)) for layer in layers]
        for layer, task in zip(layers, tasks, strict=True):
            solved, staged, refined = yield task
            self.session.enter_layer(layer, [*solved.values()], staged, refined)
        self._drop_drafts()
        for records in targets.values():
            self.session.cleaner.drop_activations(records)

    def _finished(
        self, layer: int, targets: Targets, ranks: RanksOf
    ) -> TaskStream[tuple[Solved, StagedLayer, RefinedFigures | None]]:
        """Solves and trains a layer. Returns its groups, the written layer, and the figures of its training."""
        solved: Solved = {}
        tasks = [task for task in self.job.tasks if task.layer == layer]
        draft = yield from self._write_draft(layer, tasks, {}, ranks, solved)
        assert draft is not None, "a claimed layer has groups"
        if not targets:
            return solved, draft, None
        return solved, *(yield from self._refine(layer, draft, targets, solved))
