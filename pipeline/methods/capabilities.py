"""Optional parts of the interface of methods. A method has a capability if it has the functions of its protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from manifests.records import Curve, FormSpec
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Group, Ranks, Solution, Statistics, Weights


@runtime_checkable
class Measuring(Protocol):
    """A method whose ranks depend on a measurement of the dense weights."""

    def measures(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return the groups to measure. They may include groups that the method does not claim."""
        ...

    def measure(self, group: Group, geometry: LayerGeometry, weights: Weights) -> Any:
        """Measure a group: a few JSON numbers, which `target_ranks` gets in `Scores.measured`. `weights` as in
        `compress`."""
        ...


@runtime_checkable
class Remarking(Protocol):
    """A method that can tell before the job starts that a setting of its entry cannot be met."""

    def remarks(self, geometry: Geometry) -> tuple[str, ...]:
        """Return a remark for each setting that cannot be met, with the reason and the value used instead."""
        ...


@runtime_checkable
class Predicting(Protocol):
    """A method that can predict the model's loss at each size of a group, before it compresses the group."""

    def predicts(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return the groups whose curves are needed: the claimed ones with `allocation: loss`, else none."""
        ...

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers stored at the first point of a group's curve, before the curve is known."""
        ...

    def cache_target(self, geometry: Geometry) -> float | None:
        """Return the budget in cached numbers per token over all layers, or None if the budget counts stored
        numbers."""
        ...

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Return the points to choose from. The first is the smallest; the last is the dense group, with loss 0."""
        ...


@runtime_checkable
class Dividing(Predicting, Protocol):
    """A method whose curves can be computed in pieces by several workers (`Group.pieces`), with the same result.

    The results of `begin_curve` and `curve_pieces` are JSON.
    """

    def begin_curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Any:
        """Compute the values that all pieces need."""
        ...

    def curve_pieces(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        shared: Any,
        numbers: Sequence[int],
    ) -> list[Any]:
        """Compute the pieces with these numbers, from 0. Pieces are in descending order of work."""
        ...

    def join_curve(self, group: Group, geometry: LayerGeometry, shared: Any, pieces: Sequence[Any]) -> Curve:
        """Return the curve from all pieces in order."""
        ...


@runtime_checkable
class Shaped(Protocol):
    """A method whose ranks determine the shapes of all stored tensors."""

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to its form, as `Solution.forms`. Dense roles are left out."""
        ...


@runtime_checkable
class SharingSizes(Protocol):
    """A method that shares work between several sizes of a group. The results equal those of `compress`."""

    def compress_sizes(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        sizes: Sequence[Ranks],
    ) -> Iterator[Solution]:
        """Yield the results of `compress` for each of `sizes`."""
        ...


@runtime_checkable
class Correcting(Protocol):
    """A method that can solve a group in several corrections, each on the outputs of the model compressed so far."""

    def correct(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        ranks: Ranks,
        before: Mapping[str, Tensor],
    ) -> Solution:
        """Return the corrected tensors of the roles that one pair, the only one among the statistics, determines.

        They replace the roles' earlier tensors and forms.

        `before`: `role.weight` and `role.bias` after the previous correction, for roles that are stored in this form.
        """
        ...


class Visits(NamedTuple):
    """Number of reads of each expert by a curve and by a solve, for experts that are read one at a time."""

    curve: float
    solve: float


@runtime_checkable
class VisitingExperts(Protocol):
    """A method that solves all experts of a layer together."""

    def visits(self, layer: LayerGeometry, tokens: int) -> Visits:
        """Return the visits of each expert. `tokens`: of the calibration text."""
        ...
