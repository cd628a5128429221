"""Scores models on windows of tokens with the workers of a job, layer by layer, and resumes from the journal.

A model is a sequence of layers: a staged layer, or None for the layer of the source. Only the last committed hidden
states of a model are stored. They are committed every `every` layers, like those of the calibration samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from manifests.entries import ScoredEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, StagedLayer
from pipeline.driver.interfaces import Cleaner, Journal
from pipeline.driver.job_spec import LayersEntered
from pipeline.driver.ledger_keys import scored_key
from pipeline.driver.recovery import Repairs
from pipeline.driver.scheduler import NOTHING_DUE, Coroutine, Fiber, Scheduler
from pipeline.units.questions import Answer, Answers, Questions
from pipeline.units.scores import Score, Scored, Teach, WindowForward, Windows
from pipeline.units.units import ShardDone

Layers = Sequence[StagedLayer | None]
Outputs = Sequence[ArrayRecord]  # the outputs of another model, by shard; empty without one
T = TypeVar("T")


class States(NamedTuple):
    """Stored hidden states of a model: its last layer's outputs, and the inputs of some layers, by shard."""

    outputs: tuple[ArrayRecord, ...]
    inputs: Mapping[int, tuple[ArrayRecord, ...]]


class Start(NamedTuple):
    """The hidden states, by shard, that enter a layer: those of a model with the same layers before it."""

    layer: int
    inputs: tuple[ArrayRecord, ...]


FIRST = Start(0, ())  # the tokens themselves


@dataclass(frozen=True)
class Scorer:
    """Scores models, each under a name. The entries of a name remain until `forget`.

    Attributes:
        every: the number of layers between two commits of hidden states.
        alone: returns True if no other work runs. Only then are hidden states committed and phases reported.
        phase: the name of its phases; empty: `score` and the name of the model.
        parts: returns the parts of a pass through a layer, dense or staged, as `pipeline.units.sharding.expert_parts`.
    """

    scheduler: Scheduler
    journal: Journal
    cleaner: Cleaner
    num_layers: int
    every: int = 1
    alone: Callable[[], bool] = lambda: True
    parts: Callable[[int, StagedLayer | None], Sequence[int | None]] = lambda *_: (None,)
    phase: str = ""

    def states(self, windows: Windows, name: str, layers: Layers, kept: Collection[int] = ()) -> States:
        """Return the stored outputs of a model's last layer, and the stored inputs of the `kept` layers. A resumed pass
        returns no inputs of the layers before it.

        Raises:
            CorruptError: a staged layer or the tokens are damaged.
            Interrupted: the job was asked to stop; entries remain.
        """
        model = _Model(self, windows, name, layers)
        return model.repaired(lambda: model.states(kept))

    def states_coroutine(
        self, windows: Windows, name: str, layers: Layers, kept: Collection[int] = ()
    ) -> Coroutine[States]:
        """Return the coroutine of `states`, to run in the background. It does not repair damaged data."""
        return _Model(self, windows, name, layers).states(kept)

    def score(self, windows: Windows, name: str, layers: Layers, dense: Outputs = (), start: Start = FIRST) -> Scored:
        """Return the loss of a model on all windows, summed in shard order.

        `dense`: the outputs of another model on the same windows, from which the divergence is measured. `start`:
        where the pass begins. Raises the errors of `states`, and CorruptError if `dense` or `start` is damaged.
        """
        model = _Model(self, windows, name, layers, start)
        return model.repaired(lambda: model.score(dense))

    def scores_and_outputs(
        self, windows: Windows, name: str, layers: Layers, scored: int
    ) -> tuple[list[Scored], tuple[ArrayRecord, ...]]:
        """Return the loss of a model on each of the first `scored` shards, and the stored outputs of its last layer on
        each of the others. Both pass the layers together. Raises the errors of `states`."""
        model = _Model(self, windows, name, layers)
        return model.repaired(lambda: model.end(scored))

    def taught(
        self, windows: Windows, name: str, layers: Layers, taught: int
    ) -> tuple[tuple[ArrayRecord, ...], tuple[ArrayRecord, ...]]:
        """Return the records of the rows of the first `taught` shards (`Teach`), and the stored outputs of the last
        layer on each of the others. Raises the errors of `states`."""
        model = _Model(self, windows, name, layers)
        rows, outputs = model.repaired(lambda: model.end(taught, Teach))
        return tuple(rows), outputs

    def score_coroutine(
        self, windows: Windows, name: str, layers: Layers, dense: Outputs | Fiber[tuple[ArrayRecord, ...]]
    ) -> Coroutine[Scored]:
        """Return the coroutine of `score`, to run in the background. It waits for layers that are not final, and for
        the other model's outputs. It does not repair damaged data."""
        return _Model(self, windows, name, layers).score(dense)

    def answers(self, questions: Questions, name: str, layers: Layers) -> list[Answers]:
        """Return a model's answers to questions, by shard. Raises the errors of `states`."""
        model = _Model(self, questions, name, layers)
        answers, _ = model.repaired(lambda: model.end(questions.shards, Answer))
        return answers

    def forget(self, name: str) -> None:
        """Retract the entries of a model, and drop its hidden states."""
        for layer in range(self.num_layers + 1):
            self.journal.retract(scored_key(name, layer))
        self.cleaner.retain_activations(())


def score_beside_dense(
    scorer: Scorer,
    windows: Windows,
    name: str,
    layers: Layers,
    dense: Outputs | Fiber[tuple[ArrayRecord, ...]],
) -> Coroutine[Scored]:
    """Score a model in the background. Several workers score it side by side with the dense one, a single worker
    afterwards. Of two models that are scored side by side, only the dense one commits hidden states.

    `dense`: the dense model's outputs, or the fiber that computes them.
    """
    if isinstance(dense, Fiber):
        if scorer.scheduler.pool.size < 2:
            yield dense
        alone = scorer.alone
        scorer = replace(scorer, alone=lambda: alone() and dense.done)
    return (yield from scorer.score_coroutine(windows, name, layers, dense))


def window_units(
    windows: Windows,
    name: str,
    layers: Layers,
    layer: int,
    *,
    part: int | None = None,
    store: Collection[int] = (),
    base: int = 0,
    records: Sequence[ArrayRecord] | None = None,
) -> list[WindowForward]:
    """Return the units that run all shards through a layer, or a part of it. `store`: the shards whose outputs are
    stored. `records`: the inputs of layer `base`, if committed."""
    ahead = layer + 1 if layer + 1 < len(layers) and _is_final(layers, layer + 1) else None
    return [
        WindowForward(
            windows,
            name,
            layer,
            shard,
            staged=layers[layer],
            store=shard in store,
            part=part,
            base=base,
            base_record=records[shard] if records else None,
            replay=tuple(layers[base:layer]),
            ahead=ahead,
            ahead_staged=None if ahead is None else layers[ahead],
        )
        for shard in range(windows.shards)
    ]


class _Model:
    """A model that is being scored."""

    def __init__(self, scorer: Scorer, windows: Windows, name: str, layers: Layers, start: Start = FIRST) -> None:
        self.scorer, self.start = scorer, start
        self.observer = scorer.scheduler.observer
        self.windows = windows
        self.name = name
        self.layers = layers
        self.shards = range(windows.shards)
        self.inputs: dict[int, tuple[ArrayRecord, ...]] = {}
        self.phase = scorer.phase or f"score {name}"
        keys = [scored_key(name, layer) for layer in range(scorer.num_layers + 1)]
        self.repairs = Repairs(scorer.journal, keys, self.observer)

    def repaired(self, coroutine: Callable[[], Coroutine[T]]) -> T:
        """Run a coroutine on a pool without other work. Restart it from the last entry if hidden states are damaged or
        lost."""
        scheduler = self.scorer.scheduler
        while True:
            scheduler.pool.forget()  # workers may hold hidden states of an earlier model with this name
            try:
                return scheduler.run(coroutine())
            except (CorruptError, LostInputError) as error:
                scheduler.cancel()
                self.repairs.invalidate(error)
                if isinstance(error, CorruptError):  # the data of earlier entries was dropped
                    self.scorer.forget(self.name)

    def states(self, kept: Collection[int]) -> Coroutine[States]:
        """Run all shards through all layers. Return the records of the last layer's outputs, and of the inputs of the
        `kept` layers."""
        _, records, _ = yield from self._through(self.shards, kept)
        assert records is not None
        return States(records, self.inputs)

    def end(
        self, ending: int, unit: type[Score] = Score, dense: Outputs | Fiber[tuple[ArrayRecord, ...]] = ()
    ) -> Coroutine[tuple[list[Any], tuple[ArrayRecord, ...]]]:
        """Run all shards through all layers, and the first `ending` ones through the head, by units of this type.

        Return the results of these units, in shard order, and the records of the last layer's outputs of the others.
        `dense`: the last outputs of the dense model, from which the divergence is measured, or the fiber that computes
        them.
        """
        base, records, outputs = yield from self._through(self.shards[ending:])
        compared: Outputs = (yield dense) if isinstance(dense, Fiber) else dense
        units = [
            unit(
                self.windows,
                self.name,
                len(self.layers),
                shard,
                staged=self.layers[-1],
                dense=compared[shard] if compared else None,
                base=base,
                base_record=records[shard] if records else None,
                replay=tuple(self.layers[base:]),
            )
            for shard in self.shards[:ending]
        ]
        return (yield units), outputs

    def score(self, dense: Outputs | Fiber[tuple[ArrayRecord, ...]]) -> Coroutine[Scored]:
        """Score all shards. Return the sum, in shard order."""
        scores, _ = yield from self.end(len(self.shards), dense=dense)
        return sum(scores, Scored(0.0, 0))

    def _through(
        self, kept: Collection[int], kept_inputs: Collection[int] = ()
    ) -> Coroutine[tuple[int, tuple[ArrayRecord, ...] | None, tuple[ArrayRecord, ...]]]:
        """Run all shards through all layers, and store the last layer's outputs of the `kept` ones. Keep the stored
        inputs of some layers, of all shards, in `inputs`.

        Return the last layer with committed inputs, their records, and the records of the kept outputs. The outputs of
        all shards are committed as the inputs of one more layer.
        """
        scorer, last = self.scorer, len(self.layers)
        self.inputs = {}
        base, records = self._last_committed()
        stored: tuple[ArrayRecord, ...] = ()
        observed = False
        for layer in range(base, last):
            while not _is_final(self.layers, layer):
                yield NOTHING_DUE
            if scorer.alone() and not observed:
                self.observer.phase(self.phase, last - layer, self.windows.shards)
                observed = True
            above = layer + 1
            commits = above < last and above % scorer.every == 0 and scorer.alone()
            store = kept if above == last else self.shards if commits or above in kept_inputs else ()
            parts, results = scorer.parts(layer, self.layers[layer]), list[ShardDone]()
            for part in parts:
                results = yield window_units(
                    self.windows, self.name, self.layers, layer,
                    part=part, store=store if part == parts[-1] else (), base=base, records=records,
                )  # fmt: skip
            stored = tuple(result.activation for result in results if result.activation is not None)
            if above in kept_inputs:
                self.inputs[above] = stored
            if len(stored) == len(self.shards) and (commits or above == last):
                base, records = above, stored
                self._enter(above, records)
            if observed:
                self.observer.layer_done(self.phase, layer, {})
        return base, records, stored

    def _last_committed(self) -> tuple[int, tuple[ArrayRecord, ...] | None]:
        """Return the last committed layer of this model, and its records. Retract entries of an earlier model of the
        same name."""
        for layer in range(len(self.layers), self.start.layer, -1):
            entry = self.scorer.journal.get(scored_key(self.name, layer))
            if entry is None or not all(_is_final(self.layers, below) for below in range(layer)):
                continue
            if entry.of == self._digest(layer):
                return layer, entry.activations
            self.scorer.forget(self.name)
        return self.start.layer, self.start.inputs or None

    def _enter(self, layer: int, records: tuple[ArrayRecord, ...]) -> None:
        entry = ScoredEntry(activations=records, of=self._digest(layer))
        self.scorer.journal.commit(scored_key(self.name, layer), entry)
        kept = (record for inputs in self.inputs.values() for record in inputs)
        self.scorer.cleaner.retain_activations((*records, *kept))
        self.repairs.progress()

    def _digest(self, layer: int) -> str:
        staged = [record.sha256 if record else None for record in self.layers[:layer]]
        return hashlib.sha256(json.dumps([self.windows.name, self.windows.dtype, staged]).encode()).hexdigest()


def _is_final(layers: Layers, layer: int) -> bool:
    return layers.is_final(layer) if isinstance(layers, LayersEntered) else True
