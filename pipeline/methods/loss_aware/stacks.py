"""Weights that read one input, stored at low rank together: what that takes, and the tensors and forms.

Legend: m rows of the stack, F inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.blocks import Matrix
from pipeline.kernels.pivoted import pivoted, pivoted_numbers
from pipeline.ranks.curves import Point, steps


@dataclass(frozen=True)
class Stack:
    """A stack of weights (m, F) in all.

    Attributes:
        name: of its rank, and of the tensors that belong to no single role.
        roles: in the order of the rows.
        bits: of a stored number, by which indices are counted.
        pivoted: how a rank is stored: rows of the matrix and coefficients, or two plain factors.
        widths: what the roles' forms say besides, where they are not of the dense sizes.
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
        """The rank at which the weights stay as they are."""
        return min(self.outputs, self.inputs)

    def numbers(self, rank: int) -> int:
        """Numbers stored at a rank, without biases."""
        if rank >= self.full:
            return self.outputs * self.inputs
        if self.pivoted:
            return pivoted_numbers(self.outputs, self.inputs, rank, self.bits)
        return min(rank * (self.outputs + self.inputs), self.outputs * self.inputs)

    def least(self, multiple: int) -> int:
        """Numbers stored at the smallest rank, or dense if that is less."""
        return min(self.numbers(min(multiple, self.full)), self.numbers(self.full))

    def points(self, losses: Tensor, multiple: int) -> list[Point]:
        """One point for each rank; `losses` (at least full + 1) predicted by rank, and nothing lost at the full one."""
        ranks = steps(self.full, multiple)
        predicted = [*losses[torch.tensor(ranks[:-1], dtype=torch.int64, device=losses.device)].tolist(), 0.0]
        lost = zip(ranks, predicted, strict=True)
        points = [Point({self.name: rank}, self.numbers(rank), loss) for rank, loss in lost]
        return [point for point in points[:-1] if point.numbers < points[-1].numbers] + points[-1:]

    def store(self, parts: Mapping[str, Tensor], first_rF: Tensor, second_mr: Tensor) -> tuple[Stored, Forms]:
        """Tensors and forms of second @ first; `parts` are the roles' dense weights, whose rows say where roles end."""
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


Stored = dict[str, Tensor]
Forms = dict[str, FormSpec]


def biases_of(weights: Mapping[str, Tensor], matrices: Iterable[Matrix]) -> Stored:
    """Return the biases of some matrices, float64."""
    return {matrix.bias_key: weights[matrix.bias_key].double() for matrix in matrices if matrix.bias}
