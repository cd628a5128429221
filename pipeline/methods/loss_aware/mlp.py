"""The MLP: channels removed, gate and up at a joint rank on those that stay, down at a rank. METHODS §6.3, MLP.

Legend: D hidden, N intermediate, k channels kept (S), m rows of the stack of gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from manifests.schema import LossAware
from pipeline.families.family import Geometry
from pipeline.kernels.nystrom import eliminate, nested_losses, nystrom_refit
from pipeline.kernels.sensitivity import (
    Directions,
    input_directions,
    output_directions,
    projection_losses,
    pulled,
    pushed,
)
from pipeline.kernels.spectra import symmetric_root
from pipeline.methods.loss_aware.stacks import Stack, biases_of
from pipeline.methods.method import Form, Moment, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, merged

WIDTH, GATE_UP, DOWN = "width", "gate_up", "down"
INPUT, HIDDEN = Moment("mlp.in"), Moment("down.in")
METRIC = Moment("out", kind="gradient")


def roles(geometry: Geometry) -> tuple[str, ...]:
    """(gate), up, down."""
    return (*readers(geometry), "down")


def readers(geometry: Geometry) -> tuple[str, ...]:
    """The roles that read the MLP's input."""
    return tuple(role for role in ("gate", "up") if role in geometry.roles)


def moments(geometry: Geometry) -> tuple[Moment, ...]:
    """The diagonal suffices for the gradient at gate and up."""
    return (INPUT, HIDDEN, METRIC, *(_gradient(role) for role in readers(geometry)))


def points(entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics) -> list[Point]:
    """Ranks of gate/up and of down on each of a few widths."""
    solver = _Solver(entry, geometry, weights, found)
    options = []
    for width in _widths(entry, geometry):
        kept = solver.kept(width)
        pruned = Point({WIDTH: width}, _bias_numbers(geometry, width), float(solver.width_losses[width]))
        upper = _reader_stack(entry, geometry, width).points(solver.reader_losses(kept), entry.rank_multiple)
        lower = _down_stack(entry, geometry, width).points(solver.down_losses(kept), entry.rank_multiple)
        options += merged([pruned], merged(upper, lower))
    return options


def least_numbers(entry: LossAware, geometry: Geometry) -> int:
    """Stored at the smallest width and ranks."""
    width, multiple = min(_widths(entry, geometry)), entry.rank_multiple
    stacks = (_reader_stack(entry, geometry, width), _down_stack(entry, geometry, width))
    return sum(stack.least(multiple) for stack in stacks) + _bias_numbers(geometry, width)


def solve(
    entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics, ranks: Ranks
) -> Solution:
    """Prunes to `width`, refits down, then cuts gate/up and down to their ranks."""
    solver, width = _Solver(entry, geometry, weights, found), ranks[WIDTH]
    upper, lower = _reader_stack(entry, geometry, width), _down_stack(entry, geometry, width)
    if width >= geometry.intermediate and ranks[GATE_UP] >= upper.full and ranks[DOWN] >= lower.full:
        return Solution(dict(weights), {}, {"dense": True})
    kept = solver.kept(width)
    tensors: dict[str, Tensor] = {}
    pruned: Form = {"form": "pruned", "rank": width}
    forms = dict.fromkeys(roles(geometry), pruned) if width < geometry.intermediate else {}
    parts = {role: weights[f"{role}.weight"][kept].double() for role in readers(geometry)}
    if ranks[GATE_UP] >= upper.full:
        tensors |= {f"{role}.weight": part for role, part in parts.items()}
    else:
        directions, rank = solver.reader_directions(kept), ranks[GATE_UP]
        second_mr = torch.cat(list(parts.values())) @ directions.decode[:, :rank]
        stored, of_readers = upper.store(parts, directions.encode[:rank], second_mr)
        tensors, forms = tensors | stored, forms | of_readers
    refit_Dk, report = solver.refit(kept)
    if ranks[DOWN] >= lower.full:
        tensors["down.weight"] = refit_Dk
    else:
        directions, rank = solver.down_directions(kept, refit_Dk), ranks[DOWN]
        stored, of_down = lower.store(
            {"down": refit_Dk}, directions.encode[:rank] @ refit_Dk, directions.decode[:, :rank]
        )
        tensors, forms = tensors | stored, forms | of_down
    tensors |= {name: bias[kept] for name, bias in biases_of(weights, readers(geometry)).items()}
    return Solution(tensors | biases_of(weights, ("down",)), forms, report)


class _Solver:
    """What curve and solution of one MLP share."""

    def __init__(self, entry: LossAware, geometry: Geometry, weights: Mapping[str, Tensor], found: Statistics) -> None:
        self.entry, self.geometry, self.weights = entry, geometry, weights
        self.by_loss = entry.weighting == "loss"
        self.down_DN = weights["down.weight"].double()
        self.input_DD, self.hidden_NN = found.mean(INPUT)[0], found.mean(HIDDEN)[0]
        self.metric_DD = found.mean(METRIC)[0]
        self.gradients_N = {role: found.mean(_gradient(role))[0] for role in readers(geometry)}

    @cached_property
    def priority(self) -> Tensor:
        """All channels: those that stay longest first."""
        rows_DN = symmetric_root(self.metric_DD)[0] @ self.down_DN if self.by_loss else self.down_DN
        order = eliminate(self.hidden_NN, rows_DN, min(_widths(self.entry, self.geometry))).order
        stays_N = torch.ones(self.geometry.intermediate, dtype=torch.bool, device=order.device)
        return torch.cat((stays_N.index_fill(0, order, False).nonzero()[:, 0], order.flip(0)))

    @cached_property
    def width_losses(self) -> Tensor:
        """Predicted loss by width."""
        return nested_losses(self.hidden_NN, self.down_DN, self.metric_DD, self.priority)

    def kept(self, width: int) -> Tensor:
        """The channels that stay, ascending."""
        if width >= self.geometry.intermediate:
            return torch.arange(self.geometry.intermediate, device=self.down_DN.device)
        return self.priority[:width].sort().values

    def reader_directions(self, kept_k: Tensor) -> Directions:
        """Of the stack of gate and up on the channels that stay."""
        return input_directions(self.input_DD, self._pull(kept_k, by_loss=self.by_loss))

    def reader_losses(self, kept_k: Tensor) -> Tensor:
        """Predicted loss by rank of gate/up."""
        found = self.reader_directions(kept_k)
        pull_DD = self._pull(kept_k, by_loss=True)
        return projection_losses(pull_DD, self.input_DD, found.encode[None], found.decode[None])

    def refit(self, kept_k: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """down on the channels that stay."""
        refit_Dk, report = nystrom_refit(self.down_DN, self.hidden_NN, kept_k)
        return refit_Dk, dict(report)

    def down_directions(self, kept_k: Tensor, refit_Dk: Tensor) -> Directions:
        """Of the refitted down."""
        metric_DD = self.metric_DD if self.by_loss else torch.eye(len(self.metric_DD)).to(self.metric_DD)
        return output_directions(refit_Dk, self._moment(kept_k), metric_DD)

    def down_losses(self, kept_k: Tensor) -> Tensor:
        """Predicted loss by rank of down."""
        refit_Dk, _ = self.refit(kept_k)
        found, spread_DD = self.down_directions(kept_k, refit_Dk), pushed(refit_Dk, self._moment(kept_k))
        return projection_losses(self.metric_DD, spread_DD, found.encode[None], found.decode[None])

    def _moment(self, kept_k: Tensor) -> Tensor:
        return self.hidden_NN.index_select(0, kept_k).index_select(1, kept_k)

    def _pull(self, kept_k: Tensor, by_loss: bool) -> Tensor:
        pulls = [
            pulled(
                self.weights[f"{role}.weight"][kept_k],
                square_N[kept_k] if by_loss else torch.ones_like(square_N[kept_k]),
            )
            for role, square_N in self.gradients_N.items()
        ]
        return torch.stack(pulls).sum(dim=0)


def _gradient(role: str) -> Moment:
    return Moment(f"{role}.out", kind="gradient", diagonal=True)


def _reader_stack(entry: LossAware, geometry: Geometry, width: int) -> Stack:
    """gate and up at a width."""
    names, pivoted = readers(geometry), entry.factors == "pivoted"
    rows = len(names) * width
    return Stack(GATE_UP, names, rows, geometry.hidden, geometry.bits, pivoted, _width_of_form(geometry, width))


def _down_stack(entry: LossAware, geometry: Geometry, width: int) -> Stack:
    """down at a width."""
    pivoted, widths = entry.factors == "pivoted", _width_of_form(geometry, width)
    return Stack(DOWN, (DOWN,), geometry.hidden, width, geometry.bits, pivoted, widths)


def _width_of_form(geometry: Geometry, width: int) -> dict[str, int]:
    return {} if width >= geometry.intermediate else {"width": width}


def _bias_numbers(geometry: Geometry, width: int) -> int:
    """Of all roles."""
    biased = geometry.biases
    return width * sum(role in biased for role in readers(geometry)) + geometry.hidden * (DOWN in biased)


def _widths(entry: LossAware, geometry: Geometry) -> list[int]:
    """A few widths, evenly up to the full one."""
    whole, multiple, count = geometry.intermediate, entry.rank_multiple, entry.widths
    even = {max(1, round(whole * share / count / multiple)) * multiple for share in range(1, count)}
    return [*sorted(width for width in even if width < whole), whole]
