"""The interface of compression methods, with its defaults: a method gives groups, and a group compresses itself.

Driver and workers know methods only through `Method` and `Group`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from torch import Tensor

from manifests.method_entry import MethodEntry, Refine
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Moment, Ranks, Scores, Solution, Statistics, Task, Weights
from pipeline.methods.work import Work
from pipeline.ranks.budget import RankKey, RankVariable
from pipeline.ranks.importance import preserve_importance

E = TypeVar("E", bound=MethodEntry)


class Visits(NamedTuple):
    """Number of reads of each expert by a curve and by a solve, for experts that are read one at a time."""

    curve: float
    solve: float


@dataclass(frozen=True)
class Group(ABC, Generic[E]):
    """Tensors that a method compresses together in one layer: one unit of solving. All its functions are pure.

    Attributes:
        entry: the settings of the method.
        geometry: of the group's layer.
        name, roles, moments, corrections, pieces: as in `Task`.
        weights: the dense `role.weight` and `role.bias` of the roles. Like `statistics`, only after `with_data`.
    """

    entry: E
    geometry: LayerGeometry
    name: str
    roles: tuple[str, ...]
    moments: tuple[Moment, ...] = ()
    corrections: tuple[Moment, ...] = ()
    pieces: int = 1
    weights: Weights = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    statistics: Statistics = field(default_factory=Statistics, compare=False, repr=False, kw_only=True)

    def with_data(self, weights: Weights, statistics: Statistics | None = None) -> Self:
        """Return the group with its data, which `measure`, curves and solutions need."""
        return replace(self, weights=weights, statistics=statistics or Statistics())

    def task(self, method: int, refine: Refine | None = None) -> Task:
        """Return the group as messages name it. `method`: the position of its method in the manifest."""
        needs = (self.moments, self.corrections, self.pieces)
        return Task(self.layer, self.name, self.roles, *needs, method=method, refine=refine)

    @property
    def layer(self) -> int:
        """Return the number of the layer."""
        return self.geometry.index

    @property
    def mlp(self) -> MLPBlock:
        """Return the MLP of the first role."""
        return self.geometry.mlp_of(self.roles[0])

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices of the roles."""
        return tuple(self.geometry.matrices[role] for role in self.roles)

    @property
    def bias_numbers(self) -> int:
        """Count the numbers of the matrices' biases."""
        return sum(matrix.biases for matrix in self.matrices)

    @property
    def multiple(self) -> int:
        """Return the number that divides all chosen ranks."""
        return self.entry.multiple(self.geometry.hidden)

    def weight(self, matrix: Matrix) -> Tensor:
        """Return the dense weight of a matrix."""
        return self.weights[matrix.weight_key]

    def biases(self) -> dict[str, Tensor]:
        """Return the dense biases."""
        return {key: bias for key, bias in self.weights.items() if key.endswith(".bias")}

    def mean(self, moment: Moment) -> Tensor:
        """Return the first part of a moment per calibration token, float64."""
        return self.statistics.mean(moment)[0]

    def dense(self) -> Solution:
        """Return the weights."""
        return Solution(dict(self.weights), {}, {"dense": True})

    # -- sizes -------------------------------------------------------------------------------------------------------

    def variables(self) -> tuple[RankVariable, ...]:
        """Return the integers to choose, with their costs in stored numbers; none if ranks are points of curves."""
        return ()

    def variable(self, name: str, cap: int, cost: Callable[[float], float], multiple: int = 0) -> RankVariable:
        """Return a variable of this group."""
        return RankVariable(self.layer, self.name, name, cap, multiple or self.multiple, cost)

    def least_numbers(self) -> int:
        """Count the numbers stored at the first point of the curve, before the curve is known."""
        (variable,) = self.variables()
        return round(variable.cost(variable.least))

    def forms(self, ranks: Ranks) -> dict[str, FormSpec] | None:
        """Map each role to its form, as `Solution.forms`; None if ranks do not determine the shapes of all tensors."""
        return None

    # -- computations, of a group with its data ----------------------------------------------------------------------

    def measure(self) -> Any:
        """Measure the dense weights: a few JSON numbers, which `target_ranks` gets in `Scores.measured`."""
        raise NotImplementedError

    def curve(self) -> Curve:
        """Return the points to choose from. The first is the smallest; the last is the dense group, with loss 0."""
        raise NotImplementedError

    def begin_curve(self) -> Any:
        """Compute the values, as JSON, that all pieces of the curve need. The curve from pieces equals `curve`."""
        raise NotImplementedError

    def curve_pieces(self, shared: Any, numbers: Sequence[int]) -> list[Any]:
        """Compute the pieces, as JSON, with these numbers, from 0. Pieces are in descending order of work."""
        raise NotImplementedError

    def join_curve(self, shared: Any, pieces: Sequence[Any]) -> Curve:
        """Return the curve from all pieces in order. Needs no data."""
        raise NotImplementedError

    @abstractmethod
    def solve(self, ranks: Ranks) -> Solution:
        """Compress the group. Weights are not changed."""

    def solve_sizes(self, sizes: Sequence[Ranks]) -> Iterator[Solution]:
        """Yield the result of `solve` for each of `sizes`, which may share work."""
        return (self.solve(ranks) for ranks in sizes)

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Return the corrected tensors of the roles that one pair, the only one among the statistics, determines.

        They replace the roles' earlier tensors and forms. `before`: `role.weight` and `role.bias` after the previous
        correction, for roles that are stored in this form.
        """
        raise NotImplementedError

    # -- work, for the cost model ------------------------------------------------------------------------------------

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the operations of a solve, while ranks are unknown.

        `tokens`: of the calibration text. `hinted`: a curve was computed from the same moments.
        """
        return Work()

    def curve_work(self, tokens: int) -> Work:
        """Count the operations of a curve."""
        return self.solve_work(tokens)

    def visits(self, tokens: int) -> Visits | None:
        """Return the visits of each expert, if all experts of a layer are solved together."""
        return None


G = TypeVar("G", bound=Group[Any])


@dataclass(frozen=True)
class Method(ABC, Generic[E]):
    """A compression method bound to its manifest entry. All its functions are pure.

    Attributes:
        own_class: OUTPUT is an ordinary checkpoint whose class cannot hold the results of other methods.
        listed: an entry of `methods` names it, so that it must claim something.
        routed_only: claim only routed experts, because the budget counts only them.
    """

    name: ClassVar[str]
    own_class: ClassVar[bool] = False
    listed: ClassVar[bool] = True
    entry: E
    routed_only: bool = False
    _claimed: list[tuple[Geometry, tuple[Group[Any], ...]]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    @property
    def fixed_ranks(self) -> bool:
        """Return True if the entry gives ranks, so that no budget applies."""
        return getattr(self.entry, "ranks", None) is not None

    @property
    def uniform(self) -> bool:
        """Return True if all layers of a group get one rank."""
        return False

    @property
    def narrows_alike(self) -> bool:
        """Return True if nothing changes but the width of the MLPs, to one for all layers, as an ordinary class has."""
        return False

    @property
    def scores(self) -> frozenset[str]:
        """Return the fields of `Scores` from calibration text that the ranks follow: `importance`."""
        return frozenset()

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Return further fields of the checkpoint's config.json; two methods may not disagree."""
        return {}

    # -- groups ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def groups(self, layer: LayerGeometry) -> Iterable[Group[Any]]:
        """Return the groups that the entry claims in a layer. Raises ValueError if the layer does not allow them."""

    def chosen_layers(self, geometry: Geometry) -> tuple[LayerGeometry, ...]:
        """Return the layers that the entry selects, ascending. Raises ValueError if one does not exist."""
        return tuple(geometry.layers[layer] for layer in self.entry.chosen_layers(geometry.num_layers))

    def claims(self, geometry: Geometry) -> tuple[Group[Any], ...]:
        """Return the claimed groups of all layers. Raises as `groups`. They are built once for a geometry: large
        mixtures have 15,000."""
        if not (self._claimed and self._claimed[0][0] is geometry):
            self._claimed[:] = [(geometry, self.chosen(geometry, self.groups))]
        return self._claimed[0][1]

    def chosen(self, geometry: Geometry, groups: Callable[[LayerGeometry], Iterable[G]]) -> tuple[G, ...]:
        """Return the groups of all chosen layers; with `routed_only`, those of routed experts."""
        every = (group for layer in self.chosen_layers(geometry) for group in groups(layer))
        return tuple(each for each in every if not self.routed_only or {*each.roles} <= each.geometry.routed_roles)

    def group(self, task: Task, layer: LayerGeometry) -> Group[Any]:
        """Return the group of a task."""
        return next(group for group in self.groups(layer) if group.name == task.name)

    def measures(self, geometry: Geometry) -> tuple[Group[Any], ...]:
        """Return the groups to measure before ranks are chosen, which need not be claimed."""
        return ()

    def predicts(self, geometry: Geometry) -> tuple[Group[Any], ...]:
        """Return the groups whose curves are needed: all claimed ones if ranks follow predicted loss, else none."""
        return self.claims(geometry) if self.entry.follows_curves else ()

    # -- sizes -------------------------------------------------------------------------------------------------------

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """Return the variables of all claimed groups."""
        return tuple(variable for group in self.claims(geometry) for variable in group.variables())

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return the real-valued rank of every variable at a common `ratio` in (0, 1]: this share of its cap."""
        return {variable.key: ratio * variable.cap for variable in self.rank_variables(geometry)}

    def layer_shares(
        self, geometry: Geometry, ratio: float, importance: Mapping[int, float] | None
    ) -> dict[int, float]:
        """Map each chosen layer to `ratio` or, with importance, to a share by IPRS. The mean of the shares is
        `ratio`."""
        layers = self.entry.chosen_layers(geometry.num_layers)
        if importance is None:
            return dict.fromkeys(layers, ratio)
        shares = preserve_importance([importance[layer] for layer in layers], ratio)
        return dict(zip(layers, shares, strict=True))

    def outer_ranks(self, geometry: Geometry) -> Mapping[tuple[int, str], dict[str, int]]:
        """Map layer and name of each group outside the layers, which the budget does not count, to its ranks."""
        return {}

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return the budget in cached numbers per token over all layers, or None if it counts stored numbers."""
        return None

    def least_reason(self, geometry: Geometry) -> str:
        """Return the reason for the smallest size, for the message on a budget below it; may be empty."""
        return ""

    def most_numbers(self, geometry: Geometry) -> float:
        """Bound the stored numbers of an entry with a size of its own, before its ranks can be chosen."""
        return sum(variable.cost(variable.cap) for variable in self.rank_variables(geometry))

    def remarks(self, geometry: Geometry) -> tuple[str, ...]:
        """Return a remark for each setting that cannot be met, with the reason and the value used instead."""
        return ()
