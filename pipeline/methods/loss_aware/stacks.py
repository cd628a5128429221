"""Stacks of weights with a common input, stored together at low rank: their size, tensors and forms.

Legend: m rows of the stack, F inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import FormSpec
from pipeline.kernels.pivoted import pivoted, pivoted_numbers
from pipeline.methods.base import Group
from pipeline.ranks.curves import Point, steps

NO_WIDTHS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Stack:
    """A stack of weights, (m, F) together.

    Attributes:
        name: the name of its rank, and of tensors that several roles share.
        roles: the roles in the order of the rows.
        bits: the bits of a stored number; indices are counted in such numbers.
        pivoted: store rows of the matrix and coefficients instead of two factors.
        widths: `value_rank` and `width` of the roles' forms, if they differ from the dense sizes.
    """

    name: str
    roles: tuple[str, ...]
    outputs: int
    inputs: int
    bits: int
    pivoted: bool
    widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def full(self) -> int:
        """Return the rank at which the weights stay dense."""
        return min(self.outputs, self.inputs)

    def numbers(self, rank: int) -> int:
        """Count the numbers stored at a rank, without biases."""
        if rank >= self.full:
            return self.outputs * self.inputs
        if self.pivoted:
            return pivoted_numbers(self.outputs, self.inputs, rank, self.bits)
        return min(rank * (self.outputs + self.inputs), self.outputs * self.inputs)

    def least(self, multiple: int) -> int:
        """Count the numbers stored at the smallest rank, or the dense ones if they are fewer."""
        return min(self.numbers(min(multiple, self.full)), self.numbers(self.full))

    def points(self, losses: Tensor, multiple: int) -> list[Point]:
        """Return a point for each rank that stores fewer numbers, and the dense one.

        `losses`: the predicted loss of each rank below the full one, at which it is 0.
        """
        ranks = steps(self.full, multiple)
        predicted = [*losses[torch.tensor(ranks[:-1], dtype=torch.int64, device=losses.device)].tolist(), 0.0]
        points = [
            Point({self.name: rank}, self.numbers(rank), loss) for rank, loss in zip(ranks, predicted, strict=True)
        ]
        return [point for point in points[:-1] if point.numbers < points[-1].numbers] + points[-1:]

    def store(
        self, parts: Mapping[str, Tensor], first_rF: Tensor, second_mr: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, FormSpec]]:
        """Return tensors and forms of second @ first. `parts`: the roles' dense weights, in stack order."""
        rank = first_rF.shape[0]
        if self.pivoted:
            factors = pivoted(first_rF, second_mr)
            path = f"{self.name}.pivoted"
            tensors = {
                f"{path}.rows.weight": factors.rows,
                f"{path}.coefficients.weight": factors.coefficients,
                f"{path}.indices": factors.indices.to(torch.int32),
            }
            form = self._form("pivoted", rank, self.name)
            return tensors, dict.fromkeys(self.roles, form)
        seconds = second_mr.split([parts[role].shape[0] for role in self.roles])
        tensors = {f"{self.roles[0]}.first.weight": first_rF.contiguous()}
        tensors |= {f"{role}.second.weight": part.contiguous() for role, part in zip(self.roles, seconds, strict=True)}
        if len(self.roles) == 1:
            return tensors, {self.roles[0]: self._form("low_rank", rank)}
        joint = self._form("joint_low_rank", rank, self.name)
        return tensors, dict.fromkeys(self.roles, joint)

    def _form(self, form: str, rank: int, group: str | None = None) -> FormSpec:
        value_rank, width = self.widths.get("value_rank"), self.widths.get("width")
        return FormSpec(form=form, rank=rank, group=group, value_rank=value_rank, width=width)


class Stacked(Group[LossAware]):
    """A group whose weights are stored as stacks, and whose ranks are points of its curve."""

    @property
    def by_loss(self) -> bool:
        """Return True if factors minimise the predicted loss, not the error of outputs."""
        return self.entry.weighting == "loss"

    def stack(
        self, name: str, roles: tuple[str, ...], outputs: int, inputs: int, widths: Mapping[str, int] = NO_WIDTHS
    ) -> Stack:
        """Return a stack as the entry stores it."""
        return Stack(name, roles, outputs, inputs, self.geometry.bits, self.entry.factors == "pivoted", widths)
