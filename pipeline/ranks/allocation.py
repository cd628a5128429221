"""Allocation of ranks within a budget: by a common ratio of the entries that share it, or by least predicted loss.

docs/methods.md#budget, #allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from manifests.errors import InputError
from pipeline.ranks.budget import RankKey, RankVariable, fit_ranks, solve_ratio
from pipeline.ranks.curves import Point, cache_numbers, choose, lower_hull, stored_numbers, summed

Chosen = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Prediction:
    """The choices of an entry whose ranks follow predicted loss.

    Attributes:
        curves: task -> points; None before they are computed.
        least: the numbers that its smallest points store.
        cache_target: the budget in cached numbers per token; None if the budget counts stored numbers.
        guarded: tasks that lose no larger share than all together, because few tokens predict their losses.
    """

    curves: Mapping[str, Sequence[Point]] | None
    least: float
    cache_target: float | None = None
    guarded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Entry:
    """An entry of the manifest, as the allocation of ranks sees it.

    Attributes:
        where: its name in messages.
        dense_numbers: the stored numbers of its claimed matrices when dense.
        keep: the share of these numbers that it may store, if it has its own budget.
        fixed: no budget applies; its targets at ratio 1 are its ranks.
        variables: the ranks to choose; the group of each is the key of its task.
        targets: common ratio -> the real-valued rank of every variable.
        prediction: the curves, if ranks follow predicted loss. There are then no variables.
        followers: task -> the tasks that get its ranks, if ranks are chosen for several tasks at once.
        most: a bound on the stored numbers of an entry that sets its own size, before its measurements or curves are
            known; else 0.
        heaviest: with its own `keep`, the weight of its numbers in the shared budget.
        least_reason: the reason for its smallest size; empty if only steps limit it.
    """

    where: str
    dense_numbers: int
    keep: float | None = None
    fixed: bool = False
    variables: tuple[RankVariable, ...] = ()
    targets: Callable[[float], Mapping[RankKey, float]] = field(default=lambda ratio: {}, compare=False)
    prediction: Prediction | None = None
    followers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    most: float = 0.0
    heaviest: float = 1.0
    least_reason: str = ""

    @property
    def has_own_size(self) -> bool:
        """Return True if no common budget applies."""
        return self.fixed or self.keep is not None

    @property
    def keeps_share(self) -> bool:
        """Return True if its ranks follow its own `keep`."""
        return self.keep is not None and not self.fixed


@dataclass(frozen=True)
class NumberBudget:
    """The share `keep` of `total` numbers, from the manifest's `field`; `reserved` of them are already used."""

    field: str
    keep: float
    total: float
    reserved: float

    @property
    def limit(self) -> int:
        """Return the numbers that may be stored, with a tolerance for the rounding of floats."""
        numbers = self.keep * self.total - self.reserved
        return math.floor(numbers + 1e-6 + 1e-12 * abs(numbers))

    def least_keep(self, numbers: float) -> float:
        """Return the smallest `keep`, to three digits, that leaves room for `numbers` numbers."""
        return math.ceil((self.reserved + numbers) / self.total * 1000 - 1e-9) / 1000

    def require(self, least: float, entries: Sequence[Entry], dense: Sized = ()) -> None:
        """Raise InputError with the reachable range if even the smallest ranks of the entries do not fit.

        `dense`: parts whose curves have no smaller size.
        """
        if self.limit < least:
            dense_numbers = sum(entry.dense_numbers for entry in entries)
            reasons = [f" ({entry.where}: {entry.least_reason})" for entry in entries if entry.least_reason]
            reasons += [f" ({len(dense)} parts stay dense, such as experts that no token passed)"] if dense else []
            raise InputError(
                f"{self.field}: {self.keep:g} leaves {max(0, self.limit):,} numbers for the claimed tensors, which "
                f"take at least {least:,.0f} ({dense_numbers:,} dense){''.join(reasons)}; claim more tensors or keep "
                f"more: reachable is {self.least_keep(least):.3f} to 1"
            )

    def require_room(self) -> None:
        """Raise InputError if the reserved numbers alone exceed the budget."""
        if self.limit >= 0:
            return
        needed = self.least_keep(0.0)
        raised = f"raise it to at least {needed:.3f}, " if needed <= 1.0 else ""
        raise InputError(
            f"{self.field}: {self.keep:g} is out of reach: the stored tensors take {needed:.3f}, because every size in "
            f"the manifest is fixed and none follows the budget; {raised}lower those sizes, leave out an entry's own "
            f"(`keep`, `ranks`, `cache_keep`), or leave out {self.field} (in a sweep: an empty list of sizes)"
        )


def allocate(entries: Sequence[Entry], shared: Callable[[float], NumberBudget | None]) -> Chosen:
    """Map each task to its ranks. Entries with their own ranks, cache or `keep` come first; the others share a budget.

    `shared` returns that budget, if there is one, from the numbers that the former store. Tasks whose curves are
    missing are left out, after a check that their smallest sizes fit. Raises InputError if a budget cannot be met (with
    the reachable range), if there is no budget to share, or if only some of its entries follow predicted loss.
    """
    chosen: Chosen = {}
    sharing: list[Entry] = []
    own_numbers = 0.0
    for entry in entries:
        if entry.prediction is not None and entry.prediction.cache_target is not None:
            ranks, numbers = _by_cache(entry, entry.prediction, entry.prediction.cache_target)
        elif entry.fixed:
            ranks, numbers = _counted(entry, {key: max(1, round(rank)) for key, rank in entry.targets(1.0).items()})
        elif entry.keep is not None:
            ranks, numbers = _fit([entry], NumberBudget(f"{entry.where}.keep", entry.keep, entry.dense_numbers, 0))
        else:
            sharing.append(entry)
            continue
        chosen |= ranks
        own_numbers += entry.heaviest * max(numbers, entry.most)
    budget = shared(own_numbers)
    if sharing:
        chosen |= _fit(sharing, _required(budget, sharing))[0]
    elif budget is not None:
        budget.require_room()
    followers = {task: others for entry in entries for task, others in entry.followers.items()}
    return {other: dict(ranks) for task, ranks in chosen.items() for other in followers.get(task, (task,))}


def _required(budget: NumberBudget | None, sharing: Sequence[Entry]) -> NumberBudget:
    if budget is None:
        without_size = ", ".join(entry.where for entry in sharing)
        raise InputError(
            "budget: missing; give budget.keep (in a sweep: keep), or `keep` or `ranks` in every method's entry "
            f"({without_size}: no size)"
        )
    return budget


def tied(entry: Entry) -> Entry:
    """Return the entry with one rank for all layers of a group. Its cost is the sum over the layers."""
    by_name: dict[tuple[str, str], list[RankVariable]] = {}
    for variable in entry.variables:
        by_name.setdefault((_beyond_layer(variable.group), variable.name), []).append(variable)
    groups = [*by_name.values()]

    def targets(ratio: float) -> dict[RankKey, float]:
        by_layer = entry.targets(ratio)
        return {group[0].key: fmean(by_layer[variable.key] for variable in group) for group in groups}

    return replace(
        entry,
        variables=tuple(
            replace(group[0], cost=partial(_summed_cost, group), floor=max(variable.floor for variable in group))
            for group in groups
        ),
        targets=targets,
        prediction=None if entry.prediction is None else _tied_prediction(entry.prediction),
        followers={group[0].group: tuple(variable.group for variable in group) for group in groups},
    )


def weighed(entry: Entry, weights: Mapping[str, float]) -> Entry:
    """Return the entry with numbers multiplied by the weights of its tasks.

    Its own `keep` counts each number once; in the shared budget, all of its numbers get the largest weight.
    """
    heaviest = max(1.0, *weights.values())
    if entry.keeps_share:
        return replace(entry, heaviest=heaviest)
    variables = tuple(replace(each, cost=partial(_weighed_cost, each, weights[each.group])) for each in entry.variables)
    return replace(entry, variables=variables, most=entry.most * heaviest)


def _weighed_cost(variable: RankVariable, weight: float, rank: float) -> float:
    return weight * variable.cost(rank)


def _beyond_layer(task: str) -> str:
    """Return METHOD/GROUP of a task's key."""
    return task.partition("/")[2]


def _summed_cost(group: Sequence[RankVariable], rank: float) -> float:
    return math.fsum(variable.cost(rank) for variable in group)


def _tied_prediction(prediction: Prediction) -> Prediction:
    """Sum the curves of a group's layers at the ranks that all of them have."""
    if prediction.curves is None:
        return prediction
    by_group: dict[str, list[str]] = {}
    for task in prediction.curves:
        by_group.setdefault(_beyond_layer(task), []).append(task)
    return replace(
        prediction,
        curves={tasks[0]: summed([prediction.curves[task] for task in tasks]) for tasks in by_group.values()},
        guarded=frozenset(tasks[0] for tasks in by_group.values() if prediction.guarded.intersection(tasks)),
    )


def fixed_numbers(entry: Entry) -> float:
    """Count the numbers that an entry with fixed ranks stores."""
    return _counted(entry, {key: max(1, round(rank)) for key, rank in entry.targets(1.0).items()})[1]


def _fit(entries: Sequence[Entry], budget: NumberBudget) -> tuple[Chosen, float]:
    """Return the ranks of entries that share a budget, and the numbers that they store."""
    predicted = [entry for entry in entries if entry.prediction is not None]
    if not predicted:
        return _by_ratio(entries, budget)
    for entry in entries:
        if entry.prediction is None:
            raise InputError(
                f"{entry.where}: shares a budget with {predicted[0].where}, whose ranks follow predicted loss; give it "
                "allocation: loss too, or a `keep` of its own"
            )
    return _by_loss([entry.prediction for entry in predicted if entry.prediction], entries, budget)


def _by_loss(predictions: Sequence[Prediction], entries: Sequence[Entry], budget: NumberBudget) -> tuple[Chosen, float]:
    curves = [prediction.curves for prediction in predictions]
    if any(by_task is None for by_task in curves):
        least = sum(prediction.least for prediction in predictions)
        budget.require(least, entries)
        return {}, budget.limit
    points = {key: line for by_task in curves if by_task is not None for key, line in by_task.items()}
    dense = [key for key, line in points.items() if len(line) == 1]
    budget.require(sum(lower_hull(line)[0].numbers for line in points.values()), entries, dense)
    guarded = frozenset(key for prediction in predictions for key in prediction.guarded)
    chosen = choose(points, budget.limit, guarded=guarded)
    return _ranks(chosen), sum(stored_numbers(point) for point in chosen.values())


def _by_cache(entry: Entry, prediction: Prediction, limit: float) -> tuple[Chosen, float]:
    """Return the ranks with the least predicted loss whose cache stays within the limit."""
    if prediction.curves is None:
        return {}, 0.0
    least = sum(lower_hull(line, cache_numbers)[0].cache for line in prediction.curves.values())
    if limit < least:
        raise InputError(
            f"{entry.where}.cache_keep: leaves {limit:,.0f} numbers per token for the cache, which takes at least "
            f"{least:,}; keep more"
        )
    chosen = choose(prediction.curves, limit, cache_numbers)
    return _ranks(chosen), sum(stored_numbers(point) for point in chosen.values())


def _by_ratio(entries: Sequence[Entry], budget: NumberBudget) -> tuple[Chosen, float]:
    """Return the ranks at the largest common ratio whose stored numbers stay within the budget."""
    variables = [variable for entry in entries for variable in entry.variables]
    least = sum(variable.cost(variable.least) for variable in variables)
    most = sum(variable.cost(variable.cap) for variable in variables)
    limit = budget.limit
    budget.require(least, entries)

    def targets_at(ratio: float) -> dict[RankKey, float]:
        return {key: rank for entry in entries for key, rank in entry.targets(ratio).items()}

    def cost_at(ratio: float) -> float:
        targets = targets_at(ratio)
        return sum(variable.cost(targets[variable.key]) for variable in variables)

    ratio = 1.0 if limit >= most else solve_ratio(cost_at, limit)
    ranks = fit_ranks(variables, targets_at(ratio), limit)
    return _by_task(ranks), _cost(variables, ranks)


def _counted(entry: Entry, ranks: Mapping[RankKey, int]) -> tuple[Chosen, float]:
    return _by_task(ranks), _cost(entry.variables, ranks)


def _cost(variables: Sequence[RankVariable], ranks: Mapping[RankKey, int]) -> float:
    return sum(variable.cost(ranks[variable.key]) for variable in variables)


def _by_task(ranks: Mapping[RankKey, int]) -> Chosen:
    by_task: Chosen = {}
    for (_, task, name), rank in ranks.items():
        by_task.setdefault(task, {})[name] = rank
    return by_task


def _ranks(points: Mapping[str, Point]) -> Chosen:
    return {key: dict(point.ranks) for key, point in points.items()}
