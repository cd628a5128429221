"""Base classes of methods, with the defaults of `Method`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from manifests.method_entry import MethodEntry, Refine
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Group
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.importance import preserve_importance

E = TypeVar("E", bound=MethodEntry)


class MethodDefaults(ABC):
    """The defaults of `Method`."""

    name: ClassVar[str]
    own_class: ClassVar[bool] = False
    routed_only: bool  # claim only routed experts, because the budget counts only them

    @property
    def keep(self) -> float | None:
        """Return None: the method shares the common budget."""
        return None

    @property
    def refine(self) -> Refine | None:
        """Return None: the stored numbers are those of the solve."""
        return None

    @property
    def fixed_ranks(self) -> bool:
        """Return False: ranks follow a budget."""
        return False

    @property
    def uniform(self) -> bool:
        """Return False: each layer has ranks of its own."""
        return False

    @property
    def narrows_alike(self) -> bool:
        """Return False: OUTPUT needs forms of its own."""
        return False

    @property
    def scores(self) -> frozenset[str]:
        """Return an empty set: ranks do not depend on calibration text."""
        return frozenset()

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Return an empty mapping: the forms describe the checkpoint."""
        return {}

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return the claimed groups, as `Method.claims`; with `routed_only`, those of routed experts."""
        groups = self.claimable(geometry)
        if not self.routed_only:
            return groups
        return tuple(group for group in groups if {*group.roles} <= geometry.layers[group.layer].routed_roles)

    @abstractmethod
    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return the groups that the entry claims. Raises ValueError if the geometry does not allow them."""

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """Return the variables of every claimed group."""
        return tuple(
            variable
            for group in self.claims(geometry)
            for variable in self.group_variables(group, geometry.layers[group.layer])
        )

    @abstractmethod
    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return the integers to choose for one group."""

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers stored at the smallest rank of a group with one rank."""
        (variable,) = self.group_variables(group, geometry)
        return round(variable.cost(variable.least))

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return None: the budget counts stored numbers."""
        return None

    def least_reason(self, geometry: Geometry) -> str:
        """Return an empty string: only the steps of ranks limit the sizes."""
        return ""

    def most_numbers(self, geometry: Geometry) -> float:
        """Count the numbers stored at the largest ranks."""
        return sum(variable.cost(variable.cap) for variable in self.rank_variables(geometry))


@dataclass(frozen=True)
class MethodBase(MethodDefaults, Generic[E]):
    """A method bound to its manifest entry, without `target_ranks` and `compress`.

    Methods that accept `allocation: loss` add a `curve`, which makes them `Predicting`.
    """

    entry: E
    routed_only: bool = False

    @property
    def keep(self) -> float | None:
        """Return the entry's own budget, or None."""
        return self.entry.keep

    @property
    def refine(self) -> Refine | None:
        """Return the entry's settings for training its stored numbers, or None."""
        return self.entry.refine

    def chosen_layers(self, geometry: Geometry) -> tuple[LayerGeometry, ...]:
        """Return the layers that the entry selects, ascending. Raises ValueError if one does not exist."""
        return tuple(geometry.layers[layer] for layer in self.entry.chosen_layers(geometry.num_layers))

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

    def predicts(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return all claimed groups if ranks follow predicted loss, else none."""
        return self.claims(geometry) if self.entry.follows_curves else ()
