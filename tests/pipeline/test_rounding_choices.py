"""Bits chosen with ranks: what rounding is predicted to cost, against matrices rounded and multiplied out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from manifests.quantize import Quantize
from pipeline.kernels.packing import scaled, unpack
from pipeline.kernels.rounding import round_with_feedback
from pipeline.methods.method import Group, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, from_columns, to_columns
from pipeline.rounding.choices import BITS, SAMPLED, UNDERSTATED, gradient_moments, with_bits
from pipeline.rounding.solutions import input_moments, round_solution

ROWS, COLUMNS, TOKENS = 96, 64, 500
GROUP = Group(0, "output", ("o",))
QUANTIZE = Quantize(bits="auto", group=32)
FELT = 0.3  # of every output alike, so that relative errors carry over from the dense matrix exactly


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def moment() -> Tensor:
    mix = torch.randn(TOKENS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mix *= torch.linspace(0.2, 2.0, COLUMNS, dtype=torch.float64)
    return mix.T @ mix


@pytest.fixture(scope="module")
def statistics(moment: Tensor) -> Statistics:
    (read,), (felt,) = input_moments(GROUP.roles), gradient_moments(GROUP.roles)
    return Statistics({read: moment[None], felt: torch.full((1, ROWS), FELT, dtype=torch.float64)}, TOKENS)


def solve(weight: Tensor, ranks: Ranks) -> Solution:
    if ranks["output"] >= COLUMNS:
        return Solution({"o.weight": weight}, {})
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    rank = ranks["output"]
    tensors = {"o.first.weight": right[:rank], "o.second.weight": left[:, :rank] * values[:rank]}
    return Solution(tensors, {"o": {"form": "low_rank", "rank": rank}})


def product(solution: Solution) -> Tensor:
    parts = [solution.tensors[f"o.{name}.weight"].double() for name in ("second", "first")]
    return parts[0] @ parts[1]


def rounded_product(solution: Solution, weight: Tensor, statistics: Statistics, bits: int) -> Tensor:
    tensors = round_solution(solution, QUANTIZE, bits, statistics.moments, {"o.weight": weight}).solution.tensors
    parts = []
    for name in ("second", "first"):
        columns = int(tensors[f"o.{name}.weight_shape"][1])
        codes = unpack(tensors[f"o.{name}.weight_packed"], bits, columns)
        parts.append(scaled(codes, tensors[f"o.{name}.weight_scale"].double()))
    return parts[0] @ parts[1]


def loss(change: Tensor, moment: Tensor) -> float:
    return 0.5 * FELT * float(((change @ (moment / TOKENS)) * change).sum())


def curve_points(weight: Tensor) -> list[Point]:
    sizes = {rank: rank * (ROWS + COLUMNS) for rank in (16, 32)} | {64: ROWS * COLUMNS}
    return [Point({"output": rank}, numbers, 0.01 * (64 - rank)) for rank, numbers in sizes.items()]


def test_a_point_costs_what_its_factors_lose(weight: Tensor, moment: Tensor, statistics: Statistics) -> None:
    points = curve_points(weight)
    assert [round(point.numbers / points[-1].numbers, 2) for point in points] == [0.42, 0.83, 1.0]
    assert SAMPLED == (0.5, 0.8)  # so that both of the smaller points are solved
    curve, weights = to_columns(points), {"o.weight": weight}
    found = from_columns(with_bits(curve, GROUP, QUANTIZE, weights, statistics, partial(solve, weight), 32))
    assert {point.ranks[BITS] for point in found} == {3, 4, 8}
    for point in found:
        rank, bits = point.ranks["output"], point.ranks[BITS]
        if rank == COLUMNS:
            change = round_with_feedback(weight, moment, bits, 32, weight.dtype).values - weight.double()
        else:
            solution = solve(weight, point.ranks)
            change = rounded_product(solution, weight, statistics, bits) - product(solution)
        expected = UNDERSTATED * 0.01 * (64 - rank) + loss(change, moment)
        assert point.loss == pytest.approx(expected, rel=1e-6)


def test_errors_are_those_of_what_a_role_gives(weight: Tensor, moment: Tensor, statistics: Statistics) -> None:
    solution = solve(weight, {"output": 32})
    before, after = product(solution), rounded_product(solution, weight, statistics, 4)
    found = round_solution(solution, QUANTIZE, 4, statistics.moments, {"o.weight": weight})
    assert found.errors[("o",)].relative == pytest.approx(loss(after - before, moment) / loss(before, moment), rel=1e-6)
    assert found.solution.report["rounding_error"] == found.errors[("o",)].relative
