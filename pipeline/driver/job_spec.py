"""The description of a job that the driver works by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from manifests.records import Curve, Key, StagedLayer
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import curves_key, dense_key, layer_key, measured_key
from pipeline.methods.method import Scores, Task
from pipeline.methods.registry import layer_gradients, layer_importance, layers_of

RanksOf = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Job:
    """The computation of a job.

    Attributes:
        allocate: scores -> ranks of every task, by `Task.key`.
        scores: the fields of `Scores` that calibration text must give.
        importance_shards: the shards that importance is measured on.
        measures: what must be measured on the dense weights before ranks are chosen.
        predicts: the groups whose curves must be taken before ranks are chosen.
        propagate: whose hidden states the statistics are taken on.
        every: hidden states are committed each time this many layers are done.
        gradient: where gradients come from: the model's own loss, or random ones at each layer's output.
        points: for each layer the points at which a group may be corrected, in the order of the forward pass.
        gradient_shards: the shards that hold samples of the backward pass.
    """

    num_layers: int
    shards: int
    tasks: tuple[Task, ...]
    allocate: Callable[[Scores], dict[str, dict[str, int]]]
    scores: frozenset[str]
    propagate: Literal["dense", "compressed"]
    importance_shards: tuple[int, ...]
    points: tuple[tuple[str, ...], ...] = ()
    every: int = 1
    keep_statistics: bool = False
    measures: tuple[Task, ...] = ()
    predicts: tuple[Task, ...] = ()
    gradient: Literal["model", "local"] = "model"
    gradient_shards: tuple[int, ...] = ()

    def is_boundary(self, layer: int) -> bool:
        """Whether hidden states (or gradients) at a layer's inputs are committed."""
        return layer % self.every == 0

    def solves_in_pass(self) -> bool:
        """See `solves_in_pass`."""
        return solves_in_pass(self.propagate, self.tasks, waits=bool(self.scores or self.predicts))

    def dense_shards(self) -> Sequence[int]:
        """The shards of the dense pass: all, or fewer if it measures importance alone."""
        summed = self.propagate == "dense" and any(task.moments for task in self.tasks)
        return range(self.shards) if summed or self.gradient_layers() else self.importance_shards

    def committed_shards(self, lineage: str, count: int) -> Sequence[int]:
        """The shards whose hidden states an entry of `count` records holds."""
        alone = lineage == "dense" and count != self.shards
        return self.dense_shards() if alone else range(self.shards)

    def gradient_layers(self) -> list[int]:
        """The layers that the backward pass must go through, ascending; none when no task asks for gradients."""
        asking = [layer for layer in range(self.num_layers) if layer_gradients(self.tasks, layer)]
        return list(range(asking[0], self.num_layers)) if asking else []


def solves_in_pass(propagate: str, tasks: Collection[Task], *, waits: bool) -> bool:
    """Whether layers are solved during the dense pass, from moments of values alone. `waits`: ranks depend on results
    of all layers."""
    moments = {moment for task in tasks for moment in task.moments}
    more = any(moment.kind == "gradient" for moment in moments) or any(task.corrections for task in tasks)
    return propagate == "dense" and bool(moments) and not more and not waits


def entered_scores(job: Job, entry: Callable[[Key[Any]], Any], importance: Mapping[int, float]) -> Scores:
    """Reads from the ledger all that ranks may depend on. `entry` returns the entry of a key or None, or raises."""
    measured: dict[str, Any] = {}
    curves: dict[str, Curve] = {}
    for layer in layers_of(job.measures):
        if found := entry(measured_key(layer)):
            measured |= found.measured
    for layer in layers_of(job.predicts):
        if found := entry(curves_key(layer)):
            curves |= found.curves
    return Scores(importance, measured, curves)


def entered_importance(job: Job, entry: Callable[[Key[Any]], Any]) -> dict[int, float]:
    """The importance of every layer, from the cosines of its shards in their order; empty if no ranks depend on it."""
    if "importance" not in job.scores:
        return {}
    means = []
    for layer in range(job.num_layers):
        cosines = entry(dense_key(layer)).cosine
        means.append(sum(total for total, _ in cosines) / sum(count for _, count in cosines))
    return layer_importance(means)


def staged_layer(journal: Journal, layer: int) -> StagedLayer | None:
    """The committed compressed layer: its file, forms and schemes; None for one that is not compressed."""
    entry = journal.get(layer_key(layer))
    if entry is None:
        return None
    return StagedLayer(**dict(entry.staged), forms=entry.forms, rounded=entry.rounded)


class LayersEntered(Sequence[StagedLayer | None]):
    """The layers of the compressed model: staged ones, and None for those that stay as in the source."""

    def __init__(self, journal: Journal, num_layers: int, claimed: Collection[int]) -> None:
        """`claimed`: the layers that are to be compressed."""
        self.journal = journal
        self.num_layers = num_layers
        self.claimed = claimed
        self.known: dict[int, StagedLayer] = {}

    def there(self, layer: int) -> bool:
        """Whether a layer is staged, or stays as in the source."""
        if layer in self.claimed and layer not in self.known and (staged := staged_layer(self.journal, layer)):
            self.known[layer] = staged
        return layer not in self.claimed or layer in self.known

    def __len__(self) -> int:
        return self.num_layers

    @overload
    def __getitem__(self, layer: int) -> StagedLayer | None: ...
    @overload
    def __getitem__(self, layer: slice) -> tuple[StagedLayer | None, ...]: ...
    def __getitem__(self, layer: int | slice) -> StagedLayer | tuple[StagedLayer | None, ...] | None:
        places = range(self.num_layers)[layer]
        if isinstance(places, range):
            return tuple(self[place] for place in places)
        assert self.there(places), f"layer {places} is not entered yet"
        return self.known.get(places)
