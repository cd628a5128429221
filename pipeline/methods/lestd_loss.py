"""What a Tucker decomposition of a size costs the model's loss. docs/methods.md#curves for LeSTD.

Legend: D hidden, F outputs of a projection, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from manifests.records import Curve
from pipeline.families.family import LayerGeometry
from pipeline.kernels.sensitivity import change_loss
from pipeline.methods.method import Moment, Statistics
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, steps, to_columns

READS = {"q": "attention.in", "k": "attention.in", "v": "attention.in", "o": "o.in"} | {
    "gate": "mlp.in",
    "up": "mlp.in",
    "down": "down.in",
}
AFTER = {"o": "mid", "down": "out"}
SEEN = (0.03, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)  # shares of the way from the least size to the largest
CHOICES = 64


def moments(roles: tuple[str, ...]) -> tuple[Moment, ...]:
    """Of what each role reads; of the gradient, the residual stream in full and the inner projections' diagonal."""
    return tuple(dict.fromkeys([Moment(READS[role]) for role in roles] + [_gradient(role) for role in roles]))


def loss_of(changes: Mapping[str, Tensor], found: Statistics) -> float:
    """½ tr(G Δ C Δᵀ), summed over the roles as if their errors were not correlated; changes as (out, in)."""
    return sum(
        change_loss(change, found.mean(Moment(READS[role]))[0], found.mean(_gradient(role))[0])
        for role, change in changes.items()
    )


def role_changes(roles: tuple[str, ...], errors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """role -> (out, in), from its error (D, width, H) of the tensor that its weight was stacked into."""
    return {
        role: errors[role].permute(0, 2, 1).flatten(1) if role in AFTER else errors[role].permute(2, 1, 0).flatten(0, 1)
        for role in roles
    }


def curve(variable: RankVariable, geometry: LayerGeometry, loss_at: Callable[[int], float]) -> Curve:
    """A few sizes are solved; between them the logarithm of the loss is taken as linear. At the cap nothing is lost."""
    least, cap = variable.least, variable.cap
    while variable.cost(least) == variable.cost(min(least * 2, cap)) and least * 2 < cap:
        least *= 2  # sizes below the smallest that can be stored cost the same
    sizes = sorted({round(least + share * (cap - least)) for share in SEEN} - {cap})
    seen = [(size, loss_at(size)) for size in sizes]
    choices = [size for size in steps(cap, variable.multiple, CHOICES, sizes[0]) if size < cap]
    cache = 0 if variable.group.endswith("mlp") else geometry.cache_numbers
    points = [Point({variable.name: size}, round(variable.cost(size)), _between(seen, size), cache) for size in choices]
    return to_columns([*points, Point({variable.name: cap}, round(variable.cost(cap)), 0.0, cache)])


def _between(seen: list[tuple[int, float]], size: int) -> float:
    below = max((pair for pair in seen if pair[0] <= size), default=seen[0])
    above = min((pair for pair in seen if pair[0] > size), default=seen[-1])
    if below[0] == above[0] or min(below[1], above[1]) <= 0.0:
        return below[1]
    share = (size - below[0]) / (above[0] - below[0])
    return math.exp((1.0 - share) * math.log(below[1]) + share * math.log(above[1]))


def _gradient(role: str) -> Moment:
    if role in AFTER:
        return Moment(AFTER[role], kind="gradient")
    return Moment(f"{role}.out", kind="gradient", diagonal=True)
