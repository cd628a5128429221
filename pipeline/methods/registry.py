"""Builds the methods of a manifest, collects their claims, and allocates ranks within the budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from manifests.errors import InputError
from manifests.method_entry import MethodEntry
from manifests.methods import (
    ASVD,
    MLA,
    REAP,
    SVD,
    SVDLLM,
    FlatLLM,
    Frequency,
    HEAPr,
    JointRankK,
    LeSTD,
    LoRC,
    LossAware,
    Magnitude,
    MergeExperts,
)
from manifests.quantize import OUTER_ROLES
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import foreign_attention_fault
from pipeline.methods.base import Group, Method
from pipeline.methods.expert_pruning import FrequencyMethod, MergeExpertsMethod, REAPMethod
from pipeline.methods.flat_llm import FlatLLMMethod
from pipeline.methods.heapr import HEAPrMethod
from pipeline.methods.joint_rank_k import JointRankKMethod
from pipeline.methods.lestd import LeSTDMethod
from pipeline.methods.lorc import LoRCMethod
from pipeline.methods.loss_aware.method import LossAwareMethod
from pipeline.methods.loss_aware.shapes import ShapedExperts
from pipeline.methods.magnitude import MagnitudeMethod
from pipeline.methods.method import Moment, Scores, Task, group_key, task_key
from pipeline.methods.mla import MLAMethod
from pipeline.methods.rounded_size import RoundedSizes
from pipeline.methods.separate import ASVDMethod, SVDLLMMethod, SVDMethod
from pipeline.methods.unchanged import Unchanged
from pipeline.ranks.allocation import (
    Entry,
    NumberBudget,
    Prediction,
    allocate,
    fixed_numbers,
    tied,
    weighed,
)
from pipeline.ranks.budget import RankKey
from pipeline.ranks.curves import from_columns
from pipeline.ranks.importance import angular_importance

Methods = Sequence[Method[Any]]


def loss_aware(entry: LossAware, routed_only: bool) -> Method[LossAware]:
    """Return the method of an entry: experts of free sizes, or of one shape."""
    return (LossAwareMethod if entry.shapes == "free" else ShapedExperts)(entry, routed_only)


METHODS: dict[type[MethodEntry], Callable[[Any, bool], Method[Any]]] = {
    FlatLLM: FlatLLMMethod,
    JointRankK: JointRankKMethod,
    LeSTD: LeSTDMethod,
    LoRC: LoRCMethod,
    LossAware: loss_aware,
    MLA: MLAMethod,
    SVD: SVDMethod,
    ASVD: ASVDMethod,
    SVDLLM: SVDLLMMethod,
    Magnitude: MagnitudeMethod,
    HEAPr: HEAPrMethod,
    REAP: REAPMethod,
    Frequency: FrequencyMethod,
    MergeExperts: MergeExpertsMethod,
}


def build_methods(manifest: Manifest) -> tuple[Method[Any], ...]:
    """Return the methods in the manifest's order and, with `quantize`, an `Unchanged` for the unclaimed roles."""
    multiple, routed_only = manifest.rank_multiple, manifest.budget is not None and manifest.budget.scope == "experts"
    methods = tuple(METHODS[type(entry)](entry.in_steps_of(multiple), routed_only) for entry in manifest.methods)
    if manifest.quantize is None:
        return methods
    quantize = manifest.quantize
    rest = Unchanged(
        routed_only=routed_only,
        others=methods,
        skip=quantize.skip,
        chosen_bits=quantize.bits == "auto",
        outer=quantize.outer_roles,
        ridges=quantize.correct_ridges if quantize.correct == "output" else None,
    )
    return (*methods, rest)


def claim_tasks(methods: Methods, geometry: Geometry) -> tuple[Task, ...]:
    """Return the groups of all methods, by layer. Raises InputError on tensors claimed twice or impossible claims."""
    tasks: list[Task] = []
    owner: dict[tuple[int, str], str] = {}
    for position, method in enumerate(methods):
        try:
            groups = method.claims(geometry)
        except ValueError as error:
            raise InputError(f"methods.{position} ({method.name}): {error}") from error
        _check_beside_own_class(methods, position)
        if not groups and method.listed:
            _refuse_idle(f"methods.{position} ({method.name})", geometry)
        for group in groups:
            claim = f"methods.{position} ({method.name}, {group.name})"
            for role in group.roles:
                other = owner.setdefault((group.layer, role), claim)
                if other != claim:
                    raise InputError(
                        f"layer {group.layer}: {role} is claimed by {other} and by {claim}; a tensor is claimed once"
                    )
            tasks.append(group.task(position, method.entry.refine))
    return _by_layer(tasks)


def _check_beside_own_class(methods: Methods, position: int) -> None:
    """Raise InputError if a method shares the job with one of its own class, which cannot hold its results."""
    owner, method = next((method for method in methods if method.own_class), None), methods[position]
    if owner is None or method is owner or method.narrows_alike:
        return
    entry = f"methods.{position} ({method.name})" if method.listed else method.name
    raise InputError(
        f"{entry}: OUTPUT of {owner.name} is an ordinary checkpoint of another class, which cannot hold its results; "
        "leave it out, or compress OUTPUT in a second job. The class holds MLPs of one smaller width in all layers: "
        "{method: flat_llm, attention: false, uniform: true} without refine"
    )


def _refuse_idle(where: str, geometry: Geometry) -> None:
    """Raise InputError, because a method claims nothing, if some of the model's attention is foreign."""
    if any(layer.foreign for layer in geometry.layers):
        raise InputError(
            f"{where}: nothing to compress: {foreign_attention_fault(geometry.layers)}, and the entry leaves out "
            "their MLPs"
        )


def task_groups(methods: Methods, geometry: Geometry) -> dict[str, Group[Any]]:
    """Map the keys of these methods' tasks to their groups.

    Where points of a sweep are planned together, their tasks name methods of all points; those of another point than
    `methods` have no group here.
    """
    claims = ((position, group) for position, method in enumerate(methods) for group in method.claims(geometry))
    return {task_key(group.layer, position, group.name): group for position, group in claims}


def measure_tasks(methods: Methods, geometry: Geometry) -> tuple[Task, ...]:
    """Return the groups to measure before ranks are chosen, by layer."""
    return _by_layer(group.task(position) for position, each in enumerate(methods) for group in each.measures(geometry))


def predict_tasks(methods: Methods, geometry: Geometry) -> tuple[Task, ...]:
    """Return the groups whose curves are computed before ranks are chosen, by layer."""
    return _by_layer(group.task(position) for position, each in enumerate(methods) for group in each.predicts(geometry))


def _by_layer(tasks: Iterable[Task]) -> tuple[Task, ...]:
    return tuple(sorted(tasks, key=lambda task: (task.layer, task.method, task.name)))


def layers_of(tasks: Iterable[Task]) -> list[int]:
    """Return the layers that have a task, ascending."""
    return sorted({task.layer for task in tasks})


def config_fields(methods: Methods) -> dict[str, Any]:
    """Return further fields of the checkpoint's config.json. Raises InputError if two methods disagree."""
    fields: dict[str, Any] = {}
    for position, method in enumerate(methods):
        for name, value in method.config_fields.items():
            if fields.setdefault(name, value) != value:
                raise InputError(
                    f"methods.{position} ({method.name}): {name} is {value!r}, but an earlier entry sets "
                    f"{fields[name]!r}; a checkpoint has one {name}"
                )
    return fields


class LayerTasks(NamedTuple):
    """The tasks of a layer, and the statistics that they need, each once, in a fixed order: `moments` of activations,
    and `gradients`."""

    tasks: tuple[Task, ...] = ()
    moments: tuple[Moment, ...] = ()
    gradients: tuple[Moment, ...] = ()


NO_TASKS = LayerTasks()


def tasks_by_layer(tasks: Iterable[Task]) -> dict[int, LayerTasks]:
    """Map each layer that has a task to its tasks, in ascending order. Large mixtures have 15,000 tasks."""
    grouped: defaultdict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        grouped[task.layer].append(task)
    return {layer: _layer_tasks(grouped[layer]) for layer in sorted(grouped)}


def _layer_tasks(tasks: Sequence[Task]) -> LayerTasks:
    moments = sorted({moment for task in tasks for moment in task.moments})
    gradients = tuple(moment for moment in moments if moment.kind == "gradient")
    return LayerTasks(tuple(tasks), tuple(moment for moment in moments if moment.kind != "gradient"), gradients)


def allocate_ranks(
    manifest: Manifest, methods: Methods, geometry: Geometry, scores: Scores
) -> dict[str, dict[str, int]]:
    """Map each `Task.key` to ranks that meet the budget; tasks whose curves are still missing are left out.

    Raises:
        InputError: the budget cannot be met. The message names the reachable range.
    """
    sizes = RoundedSizes(manifest, geometry)
    claims = [_Claims(position, method, geometry, scores, sizes) for position, method in enumerate(methods)]
    entries = [each.entry() for each in claims]
    beyond = sum(each.overcounted(entry) for each, entry in zip(claims, entries, strict=True))
    claimed = {(group.layer, role) for method in methods for group in method.claims(geometry) for role in group.roles}
    entries = [entry for entry in entries if entry.dense_numbers]  # `Unchanged` may have nothing to round
    _check_max_loss(manifest, entries)

    def shared(own_numbers: float) -> NumberBudget | None:
        """Return the budget of the entries that share it, or None if the manifest sets no size.

        `own_numbers`: the numbers of the entries with a size of their own.
        """
        budget = manifest.budget
        if budget is None or (budget.keep, budget.bytes, budget.max_loss) == (None, None, None):
            return None
        total = geometry.scope_numbers(budget.scope)
        untouched = total - sum(entry.dense_numbers for entry in entries)
        if budget.bytes is None:
            return NumberBudget("budget.keep", budget.share, total, untouched + own_numbers)
        if manifest.quantize is not None and manifest.quantize.bits == "auto" and scores.curves is not None:
            inside = (
                geometry.layers[layer].stored_bytes((role,)) for layer, role in claimed if role not in OUTER_ROLES
            )
            untouched_units = sizes.units - 8 * sum(inside) / geometry.bits
            reserved = untouched_units - sizes.saved_outside
            return NumberBudget("budget.bytes", budget.bytes, sizes.units, reserved + own_numbers)
        reserved = sizes.reserved(claimed) - beyond + untouched
        return NumberBudget("budget.bytes", budget.bytes, sizes.whole, reserved + own_numbers * sizes.most_by_bits)

    ranks = allocate(entries, shared)
    for each in claims:
        outside = each.method.outer_ranks(geometry).items()
        ranks |= {each.key(layer, group): own for (layer, group), own in outside}
    return ranks


def _check_max_loss(manifest: Manifest, entries: Sequence[Entry]) -> None:
    """Raise InputError if `budget.max_loss` has no size to choose."""
    limit = manifest.budget.max_loss if manifest.budget else None
    if limit is not None and all(entry.has_own_size for entry in entries):
        raise InputError(
            f"budget.max_loss: {limit:g} has no size to choose, because every entry sets its own "
            f"({', '.join(entry.where for entry in entries)}); leave out budget.max_loss, or `keep` or `cache_keep` in "
            "an entry"
        )


def saved_numbers(methods: Methods, geometry: Geometry) -> int:
    """Count the numbers saved by methods with ranks or a `keep` of their own."""
    saved = 0.0
    alike = Scores(dict.fromkeys(range(geometry.num_layers), 1.0))
    for position, method in enumerate(methods):
        entry = _Claims(position, method, geometry, alike).entry()
        if entry.fixed:
            saved += entry.dense_numbers - fixed_numbers(entry)
        elif entry.keep is not None:
            saved += (1.0 - entry.keep) * entry.dense_numbers
    return round(saved)


def layer_importance(mean_cosines: Sequence[float]) -> dict[int, float]:
    """Map each layer to t_l, from the mean cosine between its input and output. docs/methods.md#importance."""
    return dict(enumerate(angular_importance(mean_cosines)))


@dataclass(frozen=True)
class _Claims:
    """The claims of one method, whose ranks are to be chosen.

    `position`: of the method in the manifest. `sizes`: None if no budget weighs numbers.
    """

    position: int
    method: Method[Any]
    geometry: Geometry
    scores: Scores
    sizes: RoundedSizes | None = None

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Map each task to the weight of its numbers, under a budget of bytes with several dtypes; else return {}."""
        if self.sizes is None:
            return {}
        manifest, method, geometry = self.sizes.manifest, self.method, self.geometry
        mixed = geometry.outer_bits or any(layer.own_bits for layer in geometry.layers)
        chosen_bits = manifest.quantize is not None and manifest.quantize.bits == "auto"
        weighed_already = chosen_bits and method.predicts(geometry)
        if manifest.budget is None or manifest.budget.bytes is None or not mixed or weighed_already:
            return {}
        return {
            self.key(group.layer, group.name): self.sizes.weight_of(group.geometry, group.roles)
            for group in method.claims(geometry)
        }

    def key(self, layer: int, group: str) -> str:
        """Return the key of a group's task."""
        return task_key(layer, self.position, group)

    def entry(self) -> Entry:
        """Return the claims as an entry of the allocation, with groups named by the keys of their tasks."""
        method, geometry, own_scores = self.method, self.geometry, self._own_scores()

        def targets(ratio: float) -> dict[RankKey, float]:
            try:
                ranks = method.target_ranks(geometry, ratio, own_scores)
            except ValueError as error:  # fields contradict each other on this model
                raise InputError(f"methods.{self.position} ({method.name}): {error}") from error
            return {(layer, self.key(layer, group), name): rank for (layer, group, name), rank in ranks.items()}

        entry = Entry(
            where=f"methods.{self.position}",
            dense_numbers=sum(
                geometry.layers[group.layer].numbers(set(group.roles) - {*OUTER_ROLES})
                for group in method.claims(geometry)
            ),
            keep=method.entry.keep,
            fixed=method.fixed_ranks,
            variables=tuple(
                replace(variable, group=self.key(variable.layer, variable.group))
                for variable in method.rank_variables(geometry)
            ),
            targets=targets,
            prediction=self._prediction(),
            most=self._most_numbers(),
            least_reason=method.least_reason(geometry),
        )
        entry = weighed(entry, self.weights) if self.weights else entry
        return tied(entry) if method.uniform else entry

    def overcounted(self, entry: Entry) -> float:
        """Sum `overcounted` over the groups inside the layers, if their numbers are weighted. `entry`: that of these
        claims."""
        if self.sizes is None or not self.weights:
            return 0.0
        return sum(
            self.sizes.overcounted(group.geometry, group.roles, entry.heaviest if entry.keeps_share else weight)
            for group, weight in zip(self.method.claims(self.geometry), self.weights.values(), strict=True)
            if not {*group.roles} & {*OUTER_ROLES}
        )

    def _prediction(self) -> Prediction | None:
        """Return the curves of a method whose ranks follow predicted loss, else None."""
        groups, weights, known = self.method.predicts(self.geometry), self.weights, self.scores.curves
        if not groups:
            return None
        keys = [self.key(group.layer, group.name) for group in groups]
        least = sum(weights.get(key, 1.0) * group.least_numbers() for key, group in zip(keys, groups, strict=True))
        curves, guarded = None, frozenset[str]()
        if known is not None:
            guarded = frozenset(key for key in keys if known[key].few)
            curves = {
                key: [replace(p, numbers=weights.get(key, 1.0) * p.numbers) for p in from_columns(known[key])]
                for key in keys
            }
        return Prediction(curves, least, self.method.cache_target(self.geometry), guarded)

    def _most_numbers(self) -> float:
        """Bound the numbers of a method that sets its own size, while its measurements or curves are missing; else
        0."""
        measures = self.scores.measured is None and self.method.measures(self.geometry)
        predicts = self.scores.curves is None and self.method.predicts(self.geometry)
        unknown = self.method.fixed_ranks and (measures or predicts)
        return self.method.most_numbers(self.geometry) if unknown else 0.0

    def _own_scores(self) -> Scores:
        """Return the scores with only the method's own measurements, by `group_key`."""
        measured = self.scores.measured
        if measured is None:
            return self.scores
        own = {(group.layer, group.name) for group in self.method.measures(self.geometry)}
        by_group = {group_key(layer, name): measured[self.key(layer, name)] for layer, name in own}
        return replace(self.scores, measured=by_group)
