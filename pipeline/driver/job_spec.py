"""The job as the driver sees it: tasks, passes and layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

from manifests.entries import LossRatiosEntry
from manifests.records import Curve, LedgerKey, StagedLayer
from manifests.schema import Manifest
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import curves_key, dense_key, layer_key, measured_key
from pipeline.methods.base import Method
from pipeline.methods.method import Moment, Scores, Task
from pipeline.methods.registry import NO_TASKS, LayerTasks, layer_importance, layers_of, tasks_by_layer
from pipeline.units.sharding import (
    expert_parts,
    expert_ranges,
    gradient_count,
    gradient_samples,
    importance_shards,
)
from pipeline.units.units import Unwritten

RanksOf = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class LayerPart:
    """A part of a pass through a layer. `number`: as `Forward.part`. `moments`: the moments summed in it."""

    number: int | None
    moments: tuple[Moment, ...]
    last: bool = True

    @property
    def first(self) -> bool:
        """True if the part starts at the layer's inputs."""
        return not self.number


@dataclass(frozen=True, kw_only=True)
class CalibrationPasses:
    """The passes of a job over its calibration text. The manifest and the tasks determine them.

    Attributes:
        shards: the number of shards of the text; 1 without text.
        propagate: the model whose hidden states the statistics come from.
        scores: the fields of `Scores` that are computed from calibration text.
        importance_shards: the shards on which importance is measured.
        keep_statistics: keep moments after their layer is entered.
        gradient: the source of gradients: the model's own loss, or random gradients at each layer's output.
        gradient_samples: the number of samples in the backward pass; 0 if no task needs gradients.
        gradient_shards: the shards that hold these samples.
    """

    shards: int = 1
    propagate: Literal["dense", "compressed"] = "dense"
    scores: frozenset[str] = frozenset()
    importance_shards: tuple[int, ...] = ()
    keep_statistics: bool = False
    gradient: Literal["model", "local"] = "model"
    gradient_samples: int = 0
    gradient_shards: tuple[int, ...] = ()


def passes_of(
    manifest: Manifest, methods: Sequence[Method[Any]], tasks: Sequence[Task], hidden: int, *, gradients: bool = False
) -> CalibrationPasses:
    """Return the passes of a job.

    `hidden`: the width of the model's hidden states. `gradients`: choose samples for the backward pass even if no task
    needs gradients.
    """
    calibration, keep = manifest.calibration, manifest.statistics.keep
    scores = frozenset(score for method in methods for score in method.scores)
    if calibration is None:
        return CalibrationPasses(scores=scores, keep_statistics=True if keep is None else keep)
    shards, samples, length = calibration.shards, calibration.samples, calibration.sequence_length
    chosen = 0
    if gradients or any(moment.kind == "gradient" for task in tasks for moment in task.moments):
        least, count = calibration.gradient.least_tokens, calibration.gradient.samples
        chosen = gradient_samples(samples, length, hidden, least) if count is None else min(samples, count)
    return CalibrationPasses(
        shards=shards,
        propagate=calibration.propagate,
        scores=scores,
        importance_shards=importance_shards(shards, samples, length),
        keep_statistics=calibration.propagate == "dense" if keep is None else keep,
        gradient=calibration.gradient.kind,
        gradient_samples=chosen,
        gradient_shards=tuple(shard for shard in range(shards) if gradient_count(shard, shards, samples, chosen)),
    )


@dataclass(frozen=True, kw_only=True)
class Job(CalibrationPasses):
    """The computation of a job.

    Attributes:
        allocate: scores -> ranks of every task, by `Task.key`.
        every: the number of layers between two commits of hidden states.
        experts: for each layer, the number of experts that its router chooses from.
        held_experts: the number of experts that a worker holds at a time.
        rounds: round solved matrices as the manifest says.
        measures: the measurements of dense weights on which ranks depend.
        predicts: the groups on whose curves ranks depend.
        points: for each layer, the points at which groups may be corrected, step by step in the order of the forward
            pass.
    """

    num_layers: int
    tasks: tuple[Task, ...]
    allocate: Callable[[Scores], dict[str, dict[str, int]]]
    points: tuple[tuple[tuple[str, ...], ...], ...] = ()
    every: int = 1
    measures: tuple[Task, ...] = ()
    predicts: tuple[Task, ...] = ()
    experts: tuple[int, ...] = ()
    held_experts: int = 1
    rounds: bool = True

    def parts(
        self, layer: int, moments: Sequence[Moment], staged: StagedLayer | Unwritten | None = None
    ) -> list[LayerPart]:
        """Return the parts of a pass through a layer, with their moments: slices of its experts, or the whole layer.

        `staged`: the compressed layer; None: the dense one.
        """
        numbers = layer_parts(self.experts, self.held_experts, layer, staged)
        of_part: list[list[Moment]] = [[] for _ in numbers]
        for moment in moments:
            of_part[self._part_of(moment, len(numbers))].append(moment)
        last = numbers[-1]
        return [
            LayerPart(number, tuple(summed), number == last) for number, summed in zip(numbers, of_part, strict=True)
        ]

    def _part_of(self, moment: Moment, parts: int) -> int:
        """Return the part that passes a moment's point. The shared expert and the head belong to the last part."""
        if parts == 1:
            return 0
        block, _, rest = moment.point.removeprefix("pull:").partition(".")
        if block == "experts":
            return int(rest.partition(".")[0]) // self.held_experts
        return parts - 1 if block in ("shared", "head") else 0

    def layer_tasks(self, layer: int) -> tuple[Task, ...]:
        """Return the tasks of a layer."""
        return self._claimed.get(layer, NO_TASKS).tasks

    def layer_moments(self, layer: int) -> tuple[Moment, ...]:
        """Return the statistics of activations that a layer needs, each once, in a fixed order."""
        return self._claimed.get(layer, NO_TASKS).moments

    def layer_gradients(self, layer: int) -> tuple[Moment, ...]:
        """Return the moments of gradients that a layer needs, each once, in a fixed order."""
        return self._claimed.get(layer, NO_TASKS).gradients

    @cached_property
    def _claimed(self) -> Mapping[int, LayerTasks]:
        return tasks_by_layer(self.tasks)

    def factor_parts(self, task: Task) -> int:
        """Return the number of parts of a task's factors: one for each slice of its experts."""
        experts = {role.split(".")[1] for role in task.roles if role.startswith("experts.")}
        return max(1, len(expert_ranges(len(experts), self.held_experts)))

    def is_boundary(self, layer: int) -> bool:
        """Return True if hidden states (or gradients) at a layer's inputs are committed."""
        return layer % self.every == 0

    def solves_in_pass(self) -> bool:
        """Return True if layers are solved during the dense pass."""
        return solves_in_pass(self.propagate, self.tasks, ranks_wait=bool(self.scores or self.predicts))

    @property
    def has_moments(self) -> bool:
        """True if a task needs statistics."""
        return any(task.moments for task in self.tasks)

    def dense_shards(self) -> Sequence[int]:
        """Return the shards of the dense pass: all, or fewer if it only measures importance."""
        summed = self.propagate == "dense" and self.has_moments
        return range(self.shards) if summed or self.gradient_layers() else self.importance_shards

    def committed_shards(self, lineage: str, count: int) -> Sequence[int]:
        """Return the shards whose hidden states an entry of `count` records holds."""
        partial_pass = lineage == "dense" and count != self.shards
        return self.dense_shards() if partial_pass else range(self.shards)

    def gradient_layers(self) -> list[int]:
        """Return the layers of the backward pass, ascending; none if no task needs gradients."""
        needing = [layer for layer in range(self.num_layers) if self.layer_gradients(layer)]
        return list(range(needing[0], self.num_layers)) if needing else []


def solves_in_pass(propagate: str, tasks: Collection[Task], *, ranks_wait: bool) -> bool:
    """Return True if layers are solved during the dense pass, because they need only moments of its values.

    `ranks_wait`: ranks depend on results of all layers.
    """
    moments = {moment for task in tasks for moment in task.moments}
    needs_more = any(moment.kind == "gradient" for moment in moments) or any(map(needs_both_models, tasks))
    return propagate == "dense" and bool(moments) and not needs_more and not ranks_wait


def layer_parts(
    experts: Sequence[int], held: int, layer: int, staged: StagedLayer | Unwritten | None = None
) -> tuple[int | None, ...]:
    """Return the numbers of the parts of a pass through a layer, as `expert_parts`.

    `experts`: the number of experts of each dense layer. `held`: the number that a worker holds at a time. `staged`:
    the compressed layer, which may have fewer experts.
    """
    forms = staged.write.forms if isinstance(staged, Unwritten) else staged.forms if staged else {}
    dense = experts[layer] if experts else 0
    kept = forms["router"].rank if "router" in forms else None
    return expert_parts(dense if kept is None else kept, held)


def needs_both_models(task: Task) -> bool:
    """Return True if a group needs the hidden states of both models at its layer."""
    return bool(task.corrections) or task.refine is not None


def trains_independently(task: Task) -> bool:
    """Return True if a group is trained independently of the refined layers before it."""
    return task.refine is not None and task.refine.inputs != "compressed"


def trains_mixed(task: Task) -> bool:
    """Return True if a group is trained on hidden states with a share of the error of the solved layers before it."""
    return task.refine is not None and task.refine.inputs == "mixed"


def scores_from_ledger(
    job: Job,
    entry: Callable[[LedgerKey[Any]], Any],
    importance: Mapping[int, float],
    corrected: LossRatiosEntry | None,
) -> Scores:
    """Read the scores on which ranks depend. `entry`: returns the entry of a key, or None, or raises. `corrected`: by
    how much measured losses differ from predicted ones, where they were measured."""
    measured: dict[str, Any] = {}
    curves: dict[str, Curve] = {}
    ratios = corrected.ratios if corrected else {}
    for layer in layers_of(job.measures):
        if entered := entry(measured_key(layer)):
            measured |= entered.measured
    for layer in layers_of(job.predicts):
        if entered := entry(curves_key(layer)):
            curves |= {key: curve.times(ratios.get(key, 1.0)) for key, curve in entered.curves.items()}
    return Scores(importance, measured, curves)


def importance_from_ledger(job: Job, entry: Callable[[LedgerKey[Any]], Any]) -> dict[int, float]:
    """Return the importance of every layer, from the cosines of its shards; empty if no ranks depend on it."""
    if "importance" not in job.scores:
        return {}
    means = []
    for layer in range(job.num_layers):
        cosines = entry(dense_key(layer)).cosine
        means.append(sum(total for total, _ in cosines) / sum(count for _, count in cosines))
    return layer_importance(means)


def staged_layer(journal: Journal, layer: int) -> StagedLayer | None:
    """Return the committed compressed layer: its file, forms and schemes; None if it is not compressed."""
    entry = journal.get(layer_key(layer))
    if entry is None:
        return None
    return StagedLayer(**dict(entry.staged), forms=entry.forms, rounded=entry.rounded)


class LayersEntered(Sequence[StagedLayer | None]):
    """The layers of the compressed model: a staged layer, or None for a dense layer of the source."""

    def __init__(self, journal: Journal, num_layers: int, claimed: Collection[int]) -> None:
        """`claimed`: the layers that are to be compressed."""
        self.journal = journal
        self.num_layers = num_layers
        self.claimed = claimed
        self.staged: dict[int, StagedLayer] = {}

    def is_final(self, layer: int) -> bool:
        """Return True if a layer is staged or not claimed."""
        if layer in self.claimed and layer not in self.staged and (staged := staged_layer(self.journal, layer)):
            self.staged[layer] = staged
        return layer not in self.claimed or layer in self.staged

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
        assert self.is_final(places), f"layer {places} is not entered yet"
        return self.staged.get(places)
