"""From manifest entries to methods, what they claim together, and the ranks that meet the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manifests.errors import InputError
from manifests.schema import FlatLLM, JointRankK, LeSTD, LoRC, Manifest, MethodEntry
from pipeline.families.family import Geometry
from pipeline.methods.flat_llm import FlatLLMMethod
from pipeline.methods.joint_rank_k import JointRankKMethod
from pipeline.methods.lestd import LeSTDMethod
from pipeline.methods.lorc import LoRCMethod
from pipeline.methods.method import Group, Key, Measuring, Method, Moment, Predicting, Scores
from pipeline.ranks.budget import RankVariable, fit_ranks, solve_ratio
from pipeline.ranks.importance import angular_importance

METHODS: dict[type[MethodEntry], Callable[[Any], Method]] = {
    FlatLLM: FlatLLMMethod,
    JointRankK: JointRankKMethod,
    LeSTD: LeSTDMethod,
    LoRC: LoRCMethod,
}


@dataclass(frozen=True)
class Task:
    """A group and who compresses it: the position of the method in the manifest."""

    method: int
    group: Group


def build_methods(manifest: Manifest) -> tuple[Method, ...]:
    """The methods of a manifest, in its order."""
    return tuple(METHODS[type(entry)](entry) for entry in manifest.methods)


def claim_tasks(methods: Sequence[Method], geometry: Geometry) -> tuple[Task, ...]:
    """Every group of every method, by layer. Raises InputError on a tensor claimed twice or an impossible claim."""
    tasks: list[Task] = []
    owner: dict[tuple[int, str], str] = {}
    for position, method in enumerate(methods):
        try:
            groups = method.claims(geometry)
        except ValueError as error:
            raise InputError(f"methods.{position} ({method.name}): {error}") from error
        for group in groups:
            claim = f"methods.{position} ({method.name}, {group.name})"
            for role in group.roles:
                other = owner.setdefault((group.layer, role), claim)
                if other != claim:
                    raise InputError(
                        f"layer {group.layer}: {role} is claimed by {other} and by {claim}; a tensor is claimed once"
                    )
            tasks.append(Task(position, group))
    return tuple(sorted(tasks, key=lambda task: (task.group.layer, task.method, task.group.name)))


def measure_tasks(methods: Sequence[Method], geometry: Geometry) -> tuple[Task, ...]:
    """What must be measured before ranks are chosen, by layer."""
    tasks = [
        Task(position, group)
        for position, method in enumerate(methods)
        if isinstance(method, Measuring)
        for group in method.measures(geometry)
    ]
    return tuple(sorted(tasks, key=lambda task: (task.group.layer, task.method, task.group.name)))


def predict_tasks(methods: Sequence[Method], geometry: Geometry) -> tuple[Task, ...]:
    """What curves are to be taken of before ranks are chosen, by layer."""
    tasks = [
        Task(position, group)
        for position, method in enumerate(methods)
        if isinstance(method, Predicting)
        for group in method.predicts(geometry)
    ]
    return tuple(sorted(tasks, key=lambda task: (task.group.layer, task.method, task.group.name)))


def config_fields(methods: Sequence[Method]) -> dict[str, Any]:
    """What the checkpoint's config.json says beside the forms. Raises InputError where two methods disagree."""
    fields: dict[str, Any] = {}
    for position, method in enumerate(methods):
        for name, value in method.config_fields.items():
            if fields.setdefault(name, value) != value:
                raise InputError(
                    f"methods.{position} ({method.name}): {name} is {value!r}, but an entry before it says "
                    f"{fields[name]!r}; a checkpoint has one {name}"
                )
    return fields


def layer_moments(tasks: Sequence[Task], layer: int) -> tuple[Moment, ...]:
    """The moments of activations that a layer needs, each once, in a fixed order."""
    return tuple(moment for moment in _all_moments(tasks, layer) if moment.kind == "value")


def layer_gradients(tasks: Sequence[Task], layer: int) -> tuple[Moment, ...]:
    """The moments of gradients that a layer needs, each once, in a fixed order; none anywhere: no backward pass."""
    return tuple(moment for moment in _all_moments(tasks, layer) if moment.kind == "gradient")


def _all_moments(tasks: Sequence[Task], layer: int) -> list[Moment]:
    return sorted({moment for task in tasks if task.group.layer == layer for moment in task.group.moments})


def scope_numbers(geometry: Geometry, scope: str) -> int:
    """Stored numbers of the dense model that the budget's share is of."""
    return geometry.model_numbers() if scope == "model" else geometry.num_layers * geometry.layer_numbers()


def allocate_ranks(
    manifest: Manifest, methods: Sequence[Method], geometry: Geometry, scores: Scores
) -> dict[str, dict[str, int]]:
    """`ranks_key` -> ranks that meet the budget: one common ratio over all methods without a budget of their own.

    Raises:
        InputError: the budget cannot be met; the message says the reachable range.
    """
    chosen: dict[Key, int] = {}
    sharing = []
    fixed_numbers = 0.0
    for position, method in enumerate(methods):
        variables = _rank_variables(position, method, geometry)
        if method.fixed_ranks:
            targets = _target_ranks([(position, method)], geometry, 1.0, scores)
            ranks = {key: max(1, round(want)) for key, want in targets.items()}
        elif method.keep is not None:
            budget = _Budget(f"methods.{position}.keep", method.keep, _dense_numbers(method, geometry), 0)
            ranks = _fit([(position, method)], geometry, scores, budget)
        else:
            sharing.append((position, method))
            continue
        fixed_numbers += sum(variable.cost(ranks[variable.key]) for variable in variables)
        chosen |= ranks
    if sharing:
        chosen |= _fit(sharing, geometry, scores, _shared_budget(manifest, methods, geometry, fixed_numbers))
    by_task: dict[str, dict[str, int]] = {}
    for (layer, group, name), rank in chosen.items():
        by_task.setdefault(f"{layer}/{group}", {})[name] = rank
    return by_task


def saved_numbers(methods: Sequence[Method], geometry: Geometry) -> int:
    """How many numbers fewer are stored by those methods that say so themselves, by ranks or a `keep` of their own."""
    saved = 0.0
    for method in methods:
        dense = _dense_numbers(method, geometry)
        if method.fixed_ranks:
            targets = method.target_ranks(geometry, 1.0, Scores(dict.fromkeys(range(geometry.num_layers), 1.0)))
            saved += dense - sum(
                variable.cost(max(1, round(targets[variable.key]))) for variable in method.rank_variables(geometry)
            )
        elif method.keep is not None:
            saved += (1.0 - method.keep) * dense
    return round(saved)


def layer_importance(mean_cosines: Sequence[float]) -> dict[int, float]:
    """Layer -> t_l, from the mean cosine between each layer's input and output. METHODS §1."""
    return dict(enumerate(angular_importance(mean_cosines)))


def ranks_key(task: Task) -> str:
    """Where `allocate_ranks` puts the ranks of a task."""
    return f"{task.group.layer}/{task.method}/{task.group.name}"


def _rank_variables(position: int, method: Method, geometry: Geometry) -> list[RankVariable]:
    """The variables of a method, told apart from another method's by its position in their group's name."""
    return [replace(variable, group=f"{position}/{variable.group}") for variable in method.rank_variables(geometry)]


def _target_ranks(
    sharing: Sequence[tuple[int, Method]], geometry: Geometry, ratio: float, scores: Scores
) -> dict[Key, float]:
    return {
        (layer, f"{position}/{group}", name): want
        for position, method in sharing
        for (layer, group, name), want in method.target_ranks(geometry, ratio, _own(scores, position)).items()
    }


def _own(scores: Scores, position: int) -> Scores:
    """The scores as one method sees them: what was measured for it, without its position."""
    if scores.measured is None:
        return scores
    split = {key: key.split("/", 2) for key in scores.measured}
    own = {f"{layer}/{group}": key for key, (layer, owner, group) in split.items() if owner == str(position)}
    return replace(scores, measured={name: scores.measured[key] for name, key in own.items()})


def _dense_numbers(method: Method, geometry: Geometry) -> int:
    return sum(geometry.layer_numbers(group.roles) for group in method.claims(geometry))


@dataclass(frozen=True)
class _Budget:
    """`keep` (of the manifest's `field`) of `total` numbers, `taken` of which are spoken for."""

    field: str
    keep: float
    total: int
    taken: float

    @property
    def target(self) -> int:
        """What may be stored. The products of floats are forgiven their last bits."""
        numbers = self.keep * self.total - self.taken
        return math.floor(numbers + 1e-6 + 1e-12 * abs(numbers))

    def least_keep(self, numbers: float) -> float:
        """The smallest `keep`, to three digits, that leaves room for so many numbers."""
        return math.ceil((self.taken + numbers) / self.total * 1000 - 1e-9) / 1000


def _shared_budget(manifest: Manifest, methods: Sequence[Method], geometry: Geometry, fixed_numbers: float) -> _Budget:
    """What all methods without a budget of their own may store: keep · total less what nobody claims or is fixed."""
    if manifest.budget is None:
        raise InputError("budget: missing; give budget.keep, or `keep` or `ranks` in every method's entry")
    total = scope_numbers(geometry, manifest.budget.scope)
    untouched = total - sum(_dense_numbers(method, geometry) for method in methods)
    return _Budget("budget.keep", manifest.budget.keep, total, untouched + fixed_numbers)


def _fit(sharing: Sequence[tuple[int, Method]], geometry: Geometry, scores: Scores, budget: _Budget) -> dict[Key, int]:
    """Ranks of several methods at the largest common ratio whose stored numbers stay within the budget."""
    variables = [variable for position, method in sharing for variable in _rank_variables(position, method, geometry)]
    least = sum(variable.cost(min(variable.multiple, variable.cap)) for variable in variables)
    most = sum(variable.cost(variable.cap) for variable in variables)
    target = budget.target
    if target < least:
        dense = sum(_dense_numbers(method, geometry) for _, method in sharing)
        raise InputError(
            f"{budget.field}: {budget.keep:g} leaves {max(0, target):,} numbers for what is claimed, which takes "
            f"{least:,.0f} at the least ({dense:,} dense); claim more tensors or keep more: "
            f"reachable is {budget.least_keep(least):.3f} to 1"
        )

    def cost_at(ratio: float) -> float:
        targets = _target_ranks(sharing, geometry, ratio, scores)
        return sum(variable.cost(targets[variable.key]) for variable in variables)

    ratio = 1.0 if target >= most else solve_ratio(cost_at, target)
    return fit_ranks(variables, _target_ranks(sharing, geometry, ratio, scores), target)
