"""Claims the matrices that no method compresses, so that they can be rounded. docs/methods.md#rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from manifests.method_entry import MethodEntry
from manifests.quantize import OUTER_BITS, is_skipped
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Block, Matrix, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group, Method
from pipeline.methods.method import Moment, Ranks, Scores, Solution, Task, Weights
from pipeline.methods.moments import pair
from pipeline.methods.pairs import carry, complete
from pipeline.ranks.budget import RankKey, RankVariable
from pipeline.ranks.curves import Point, to_columns

WHOLE, BITS = "whole", "bits"


class Whole(Group[MethodEntry]):
    """Matrices that stay as they are, inside the layers or outside of them."""

    def variables(self) -> tuple[RankVariable, ...]:
        """Return one variable with a single value."""
        return (self.variable(WHOLE, 1, lambda rank: self.geometry.numbers(self.roles), multiple=1),)

    def curve(self) -> Curve:
        """Return a single point, with loss 0."""
        return to_columns([Point({WHOLE: 1}, self.geometry.numbers(self.roles), 0.0)])

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Return none: all roles stay dense."""
        return {}

    def solve(self, ranks: Ranks) -> Solution:
        """Return the weights."""
        return Solution(dict(self.weights), {}, {})


@dataclass(frozen=True)
class Corrected(Whole):
    """Matrices with a common input, fitted behind the rounded layers before them. `corrections`: one pair.

    `ridges`: of what reads the residual stream, and of what writes to it.
    """

    ridges: tuple[float, float] = field(kw_only=True)

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Apply the correction of the pair at the matrices' input."""
        (pair_of_input,), (readers, writers), matrix = self.corrections, self.ridges, self.matrices[0]
        if not matrix.writes_stream:
            return Solution(carry(self.statistics, pair_of_input, self.weights, self.matrices, readers).weights, {}, {})
        completed = complete(self.statistics, pair_of_input, self.weight(matrix), writers)
        return Solution({**self.weights, matrix.weight_key: completed.weight}, {}, {})


@dataclass(frozen=True)
class Unchanged(Method[MethodEntry]):
    """Claims every linear role that `others` do not claim, except those of `skip`.

    `outer`: further roles outside the layers, whose ranks are fixed (`outer_ranks`). `ridges`: of the corrections of
    what reads a block's input and of what writes to the residual stream, routed experts apart; None: no corrections.
    """

    entry: MethodEntry = field(default_factory=MethodEntry)
    others: Sequence[Method[Any]] = ()
    skip: tuple[str, ...] = ()
    chosen_bits: bool = False
    outer: tuple[str, ...] = ()
    ridges: tuple[float, float] | None = None
    name: ClassVar[str] = "quantize"
    listed: ClassVar[bool] = False

    @property
    def fixed_ranks(self) -> bool:
        """Return True unless bits are chosen, because no budget applies."""
        return not self.chosen_bits

    def predicts(self, geometry: Geometry) -> tuple[Whole, ...]:
        """Return all groups inside the layers if bits are chosen, else none."""
        return tuple(self._inside(geometry)) if self.chosen_bits else ()

    def claims(self, geometry: Geometry) -> tuple[Whole, ...]:
        """Claim the remaining matrices: those with a common input as one group, and each outer role by itself.

        Raises the ValueErrors of the other methods.
        """
        return (*self._inside(geometry), *(() if self.routed_only else self._outside(geometry)))

    def group(self, task: Task, layer: LayerGeometry) -> Whole:
        """Return the group of a task, which names the roles that other methods leave."""
        return self._whole(layer, task.name, task.roles, task.corrections)

    def outer_ranks(self, geometry: Geometry) -> dict[tuple[int, str], dict[str, int]]:
        """Map layer and name of each role outside the layers to its ranks, with `OUTER_BITS` if bits are chosen."""
        ranks = {WHOLE: 1, BITS: OUTER_BITS} if self.chosen_bits else {WHOLE: 1}
        return {(group.layer, group.name): dict(ranks) for group in self._outside(geometry)}

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """Return the variables of the groups inside the layers."""
        return tuple(variable for group in self._inside(geometry) for variable in group.variables())

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[RankKey, float]:
        """Return 1 for every variable."""
        return {variable.key: 1.0 for variable in self.rank_variables(geometry)}

    def groups(self, layer: LayerGeometry) -> Iterator[Whole]:
        """Return the matrices of a layer, claimed or not: those with a common input as one group."""
        for block in layer.matrix_blocks:
            for name, matrices in block.by_input.items():
                inside = (role for role in roles_of(matrices) if not self.routed_only or role in layer.routed_roles)
                free = tuple(role for role in inside if not is_skipped(role, self.skip))
                yield self._whole(layer, name, free, self._corrections(layer, block, matrices[0]))

    def _corrections(self, layer: LayerGeometry, block: Block, first: Matrix) -> tuple[Moment, ...]:
        """Return the pair at the common input of some matrices of a block, if they are corrected."""
        at_ends = first.reads in (block.input, block.writer.reads)  # not between a latent and its heads
        corrects = self.ridges is not None and at_ends and first.role not in layer.routed_roles
        return (pair(first.reads),) if corrects else ()

    def _whole(self, layer: LayerGeometry, name: str, roles: tuple[str, ...], corrections: tuple[Moment, ...]) -> Whole:
        if not corrections or self.ridges is None:
            return Whole(self.entry, layer, name, roles)
        return Corrected(self.entry, layer, name, roles, corrections=corrections, ridges=self.ridges)

    def _inside(self, geometry: Geometry) -> Iterator[Whole]:
        others = (group for other in self.others for group in other.claims(geometry))
        claimed = {(group.layer, role) for group in others for role in group.roles}
        for group in (group for layer in geometry.layers for group in self.groups(layer)):
            if free := tuple(role for role in group.roles if (group.layer, role) not in claimed):
                yield replace(group, roles=free)

    def _outside(self, geometry: Geometry) -> Iterator[Whole]:
        for layer in geometry.layers:
            roles = (role for role, _, _ in layer.outer if role in self.outer)
            yield from (Whole(self.entry, layer, role, (role,)) for role in roles)
