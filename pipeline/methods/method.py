"""What a compression method declares and computes; the only view of a method that driver and workers have.

Legend: D hidden, F features of a tap, G groups, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pipeline.families.family import Geometry
from pipeline.ranks.budget import RankVariable

Ranks = Mapping[str, int]
Form = dict[str, Any]
Key = tuple[int, str, str]


@dataclass(frozen=True, order=True)
class Moment:
    """A statistic: the uncentred second moment, summed over calibration tokens, of what passes a point of the layer.

    Attributes:
        point: `role.in` or `role.out`; roles that share their input share the moment (`attention.in`, `mlp.in`).
        heads: the F features are cut in `heads` equal parts, each with a moment of its own.
        groups: the moments of consecutive heads are summed into `groups` of them: (groups, F/heads, F/heads).
    """

    point: str
    heads: int = 1
    groups: int = 1

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.point}-{self.heads}-{self.groups}"


@dataclass(frozen=True)
class Scores:
    """What ranks may follow; only what a method of the job asks for is filled in.

    Attributes:
        importance: layer -> t_l, how far it turns its input on calibration text. METHODS §1.
        measured: what `Measuring.measure` gave, by `LAYER/GROUP` (with the method's position between the two until the
            registry hands a method its own). None before anything is measured: all layers then count as alike.
    """

    importance: Mapping[int, float] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Group:
    """Tensors that a method compresses together in one layer: one unit of solving.

    Attributes:
        roles: the roles whose tensors are claimed; nobody else may claim them.
        moments: the statistics needed; empty for a data-free group.
    """

    layer: int
    name: str
    roles: tuple[str, ...]
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Solution:
    """What compressing a group gives.

    Attributes:
        tensors: `role.weight`, `role.bias`, `role.first.weight`, ... -> factor, or the tensor itself; `GROUP.FORM.…`,
            with the group's name and form, for what belongs to no single role. Integers are stored as they are.
        forms: role -> form and ranks, as the checkpoint's config holds them; a dense role is left out.
        report: figures for the summary: errors, fallbacks, condition numbers.
    """

    tensors: dict[str, Tensor]
    forms: dict[str, Form]
    report: dict[str, Any] = field(default_factory=dict)


class Method(Protocol):
    """A compression method bound to its manifest entry. Everything it computes is pure."""

    @property
    def name(self) -> str:
        """As the manifest calls it."""
        ...

    @property
    def keep(self) -> float | None:
        """A budget of its own, instead of the common one."""
        ...

    @property
    def fixed_ranks(self) -> bool:
        """Whether the entry gives ranks, so that no budget applies."""
        ...

    @property
    def scores(self) -> frozenset[str]:
        """The fields of `Scores` that the ranks follow and that come from calibration text: `importance`."""
        ...

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """What the checkpoint's config.json says beside the forms; two methods may not disagree."""
        ...

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """The groups this method takes, over all layers. Raises ValueError when the geometry does not allow it."""
        ...

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """The integers to choose, with what each costs in stored numbers."""
        ...

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """The real-valued rank of every variable at a common `ratio` in (0, 1]."""
        ...

    def compress(
        self,
        group: Group,
        geometry: Geometry,
        weights: Mapping[str, Tensor],
        moments: Mapping[Moment, Tensor],
        ranks: Ranks,
    ) -> Solution:
        """The factors of one group. `weights`: `role.weight` / `role.bias` of the claimed roles, dense; not changed."""
        ...


@runtime_checkable
class Measuring(Protocol):
    """A method whose ranks follow something that the dense weights alone tell."""

    def measures(self, geometry: Geometry) -> tuple[Group, ...]:
        """The groups to measure: they claim nothing, and may go beyond what the method claims."""
        ...

    def measure(self, group: Group, geometry: Geometry, weights: Mapping[str, Tensor]) -> Any:
        """A few numbers, as JSON has them, for `target_ranks` in `Scores.measured`. `weights` as in `compress`."""
        ...
