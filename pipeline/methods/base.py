"""What methods say alike: a method is this, and what it says otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from manifests.methods import MethodEntry
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.method import Group
from pipeline.ranks.budget import RankVariable

E = TypeVar("E", bound=MethodEntry)


class MethodDefaults(ABC):
    """What a method says of itself unless it says otherwise: see `Method`."""

    name: ClassVar[str]

    @property
    def keep(self) -> float | None:
        """No budget of its own."""
        return None

    @property
    def fixed_ranks(self) -> bool:
        """Ranks follow a budget."""
        return False

    @property
    def uniform(self) -> bool:
        """Each layer has ranks of its own."""
        return False

    @property
    def scores(self) -> frozenset[str]:
        """Ranks follow nothing that comes from calibration text."""
        return frozenset()

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """The forms say all."""
        return {}

    @abstractmethod
    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """As `Method.claims`."""

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """Those of every claimed group, with the shapes of its layer."""
        return tuple(
            variable
            for group in self.claims(geometry)
            for variable in self.group_variables(group, geometry.layers[group.layer])
        )

    @abstractmethod
    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """The integers to choose for one group."""

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Stored at the smallest rank, of a group with one."""
        (variable,) = self.group_variables(group, geometry)
        return round(variable.cost(variable.least))

    def cache_target(self, geometry: Geometry) -> float | None:
        """Stored numbers are what is budgeted."""
        return None

    def most_numbers(self, geometry: Geometry) -> float:
        """At the largest ranks."""
        return sum(variable.cost(variable.cap) for variable in self.rank_variables(geometry))


@dataclass(frozen=True)
class MethodBase(MethodDefaults, Generic[E]):
    """A method bound to its manifest entry, without `target_ranks` and `compress`.

    With a `curve` besides, it is a `Predicting` one, for entries with `allocation: loss`.
    """

    entry: E

    @property
    def keep(self) -> float | None:
        """A budget of its own, if the entry gives one."""
        return self.entry.keep

    def chosen_layers(self, geometry: Geometry) -> tuple[LayerGeometry, ...]:
        """The layers that the entry means, ascending. Raises ValueError if one does not exist."""
        return tuple(geometry.layers[layer] for layer in self.entry.chosen_layers(geometry.num_layers))

    def predicts(self, geometry: Geometry) -> tuple[Group, ...]:
        """All that is claimed, where ranks follow predicted loss."""
        return self.claims(geometry) if self.entry.follows_curves else ()
