"""Optional parts of the interface of methods: a method has a capability if it has the protocol's functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from manifests.records import Curve, FormSpec
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Group, Ranks, Solution, Statistics, Weights


@runtime_checkable
class Measuring(Protocol):
    """A method whose ranks follow something that the dense weights alone tell."""

    def measures(self, geometry: Geometry) -> tuple[Group, ...]:
        """The groups to measure: they claim nothing, and may go beyond what the method claims."""
        ...

    def measure(self, group: Group, geometry: LayerGeometry, weights: Weights) -> Any:
        """A few numbers, as JSON has them, for `target_ranks` in `Scores.measured`. `weights` as in `compress`."""
        ...


@runtime_checkable
class Remarking(Protocol):
    """A method that may have to say, before anything is computed, that its entry asks for what cannot be."""

    def remarks(self, geometry: Geometry) -> tuple[str, ...]:
        """Return a remark for each setting that cannot be met: the reason, and the value used instead."""
        ...


@runtime_checkable
class Predicting(Protocol):
    """A method that can say, before it compresses a group, what each of its sizes costs the model's loss."""

    def predicts(self, geometry: Geometry) -> tuple[Group, ...]:
        """The groups whose curves are to be taken: those claimed, with `allocation: loss`; else none."""
        ...

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Stored by the first point of a group's curve, before any is taken."""
        ...

    def cache_target(self, geometry: Geometry) -> float | None:
        """The cache's numbers per token, over all layers, that are the budget in place of stored numbers; or None."""
        ...

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Points to choose from. The first is the smallest, the last the dense group, loss 0."""
        ...


@runtime_checkable
class Dividing(Predicting, Protocol):
    """A method some of whose curves workers may share (`Group.pieces`), with the same bytes for any cut.

    What is begun and what pieces are is JSON.
    """

    def begin_curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Any:
        """Compute the part that all pieces share."""
        ...

    def curve_pieces(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        begun: Any,
        numbers: Sequence[int],
    ) -> list[Any]:
        """Some of the pieces, numbered from 0. They come by the work that they are, the most first."""
        ...

    def join_curve(self, group: Group, geometry: LayerGeometry, begun: Any, pieces: Sequence[Any]) -> Curve:
        """The curve, from all pieces in order."""
        ...


@runtime_checkable
class Shaped(Protocol):
    """A method whose ranks alone say the shape of everything that it stores."""

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Role -> form, as `Solution.forms`; a role that stays dense is left out."""
        ...


@runtime_checkable
class SharingSizes(Protocol):
    """A method that computes once what several sizes of a group share, with the bytes that `compress` gives each."""

    def compress_sizes(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        sizes: Sequence[Ranks],
    ) -> Iterator[Solution]:
        """As `compress`, for one of `sizes` after another."""
        ...


@runtime_checkable
class Correcting(Protocol):
    """A method whose groups may be solved a part at a time, behind what was compressed before."""

    def correct(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        ranks: Ranks,
        before: Mapping[str, Tensor],
    ) -> Solution:
        """Return the changes by the one pair among the statistics: a role's tensors and form replace its earlier ones.

        `before`: `role.weight` and `role.bias` as the correction before this one left them, where they are stored so.
        """
        ...
