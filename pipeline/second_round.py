"""A second round: gradients once more, behind a draft of the compressed model. docs/methods.md#rounds.

The draft is compressed by a driver of its own, whose entries go by other names (`draft/…`). The gradient samples go
through it, layer by layer; then gradients of the labels that the dense model drew come back. Those behind layer l see
the draft in all other layers, and l's dense weights, whose errors they are to weigh. Their moments are added to the
first round's (`regradient/L`), which is what the compression that counts goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manifests.entries import ActivationsEntry
from manifests.records import ArrayRecord, E, GradientRecord, Key, StagedLayer, StagedRecord
from pipeline.computation import Job, staged_layer
from pipeline.gradient_pass import GradientPass
from pipeline.keys import RANKS, draft_inputs_key, draft_key, gradient_key, layer_key, regradient_key
from pipeline.methods.registry import layers_of
from pipeline.ports import Cleaner, Journal
from pipeline.scoring import window_units
from pipeline.steps import Steps
from pipeline.units import Backward

DRAFTED = ("curves/", "layer/", RANKS)


class DraftJournal:
    """A journal in which curves, ranks and layers are the draft's."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def commit(self, key: Key[E], record: E) -> None:
        """See `pipeline.ports.Journal`."""
        self.journal.commit(_drafted(key), record)

    def get(self, key: Key[E]) -> E | None:
        """See `pipeline.ports.Journal`."""
        return self.journal.get(_drafted(key))

    def retract(self, key: str) -> None:
        """See `pipeline.ports.Journal`."""
        self.journal.retract(_drafted(Key[Any](key)))


class Sparing:
    """A cleaner that keeps some hidden states, too."""

    def __init__(self, cleaner: Cleaner, spared: Sequence[ArrayRecord]) -> None:
        self.cleaner = cleaner
        self.spared = spared

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        """See `pipeline.ports.Cleaner`."""
        self.cleaner.retain_activations((*records, *self.spared))

    def retain_statistics(self, records: tuple[ArrayRecord, ...]) -> None:
        """See `pipeline.ports.Cleaner`."""
        self.cleaner.retain_statistics(records)

    def retain_staged(self, records: tuple[StagedRecord, ...]) -> None:
        """See `pipeline.ports.Cleaner`."""
        self.cleaner.retain_staged(records)


class SecondRound:
    """Enters the moments of both rounds, from where the journal says it was left."""

    def __init__(self, job: Job, steps: Steps, cleaner: Cleaner, compress: Callable[[Journal, Cleaner], None]) -> None:
        """`compress`: every layer of the draft, into a journal of its own."""
        self.job = job
        self.steps = steps
        self.cleaner = cleaner
        self.compress = compress
        self.draft = DraftJournal(steps.journal)

    def run(self) -> None:
        """The draft, the way forth and the way back; the draft is dropped when its gradients are there."""
        if self._pass().span():
            if any(staged_layer(self.draft, layer) is None for layer in layers_of(self.job.tasks)):
                self.compress(self.draft, Sparing(self.cleaner, self._entered()))
            layers = [staged_layer(self.draft, layer) for layer in range(self.job.num_layers)]
            self._forward(layers)
            self._pass(layers).run()
        self._forget()

    def _forget(self) -> None:
        """Takes back the draft's layers and what entered them. Its curves stay: they serve a draft of another size."""
        kinds = (draft_inputs_key, lambda layer: draft_key(layer_key(layer)))
        keys: list[Key[Any]] = [kind(layer) for kind in kinds for layer in range(self.job.num_layers)]
        entered = [key for key in keys if self.steps.journal.get(key) is not None]
        for key in entered:
            self.steps.journal.retract(key)
        if entered:
            finished = (staged_layer(self.steps.journal, layer) for layer in range(self.job.num_layers))
            self.cleaner.retain_staged(tuple(staged for staged in finished if staged))

    def _pass(self, layers: Sequence[StagedLayer | None] = ()) -> _DraftGradients:
        return _DraftGradients(self.job, self.steps, self.cleaner, layers)

    def _forward(self, layers: Sequence[StagedLayer | None]) -> None:
        """The gradient samples through the draft; what enters each layer is stored for the way back."""
        journal, needed = self.steps.journal, self._pass().span()
        missing = [layer for layer in needed if journal.get(draft_inputs_key(layer)) is None]
        if not missing:
            return
        windows = self.job.gradient_windows
        assert windows is not None, "who takes gradients has samples"
        base, records = self._nearest(missing[0])
        self.steps.observer.phase("draft", missing[-1] + 1 - base, windows.shards)
        self.steps.pool.forget()
        for layer in range(base, missing[-1] + 1):
            keep = layer in missing
            units = window_units(windows, "draft", layers, layer, keep_inputs=keep, base=base, records=records)
            done = self.steps.do(units)
            if keep:
                base, records = layer, tuple(result.inputs for result in done)
                self.steps.enter(draft_inputs_key(layer), ActivationsEntry(activations=records))
                self.cleaner.retain_activations(tuple(self._entered()))
            self.steps.observer.layer_done("draft", layer, {})

    def _nearest(self, layer: int) -> tuple[int, Sequence[ArrayRecord] | None]:
        """The last layer up to this one whose inputs are entered, and their records; or 0: the embeddings."""
        for base in range(layer, -1, -1):
            if entry := self.steps.journal.get(draft_inputs_key(base)):
                return base, entry.activations
        return 0, None

    def _entered(self) -> list[ArrayRecord]:
        """The hidden states and gradients of this round that are in the store."""
        keys: list[Key[Any]] = [
            key(n) for key in (draft_inputs_key, regradient_key) for n in range(self.job.num_layers)
        ]
        entries = [self.steps.journal.get(key) for key in keys]
        return [record for entry in entries if entry for record in entry.activations or ()]


class _DraftGradients(GradientPass):
    """The way back through the draft."""

    key = staticmethod(regradient_key)

    def __init__(self, job: Job, steps: Steps, cleaner: Cleaner, layers: Sequence[StagedLayer | None]) -> None:
        super().__init__(job, steps, cleaner)
        self.layers = layers

    def stored_inputs(self, layers: range) -> list[ArrayRecord]:
        """The records of the stored inputs of some layers, where the draft has been there."""
        entries = [self.steps.journal.get(draft_inputs_key(layer)) for layer in layers]
        return [record for entry in entries if entry for record in entry.activations]

    def _keeps_labels(self, layer: int) -> bool:
        return False

    def _before(self, layer: int) -> Mapping[str, GradientRecord]:
        return self.steps.entry(gradient_key(layer)).statistics

    def _inputs(self, layer: int) -> Sequence[ArrayRecord | None]:
        found = dict(zip(self.job.gradient_shards, self.steps.entry(draft_inputs_key(layer)).activations, strict=True))
        return [found.get(shard) for shard in range(self.job.shards)]

    def _adapted(self, unit: Backward, place: int) -> Backward:
        last = self.job.num_layers
        labels = self.steps.entry(gradient_key(last - 1)).labels if unit.base == last else None
        packed = tuple(self.layers[unit.layer : unit.base])
        return replace(unit, packed=packed, labels=labels[place] if labels else None)


def _drafted(key: Key[E]) -> Key[E]:
    return draft_key(key) if key.startswith(DRAFTED) else key
