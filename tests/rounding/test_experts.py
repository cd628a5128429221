"""Experts that were chosen together are rounded one after another, as each would be alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.quantize import Quantize
from pipeline.methods.method import Moment, Solution
from pipeline.rounding.experts import round_by_expert
from pipeline.rounding.solutions import round_solution

QUANTIZE = Quantize(bits=4, group=32)
ROLES = ("gate", "up", "down")
READS = {f"experts.{expert}.{role}": "mlp.in" for expert in range(3) for role in ROLES}
READS |= {f"experts.{expert}.down": f"experts.{expert}.down.in" for expert in range(3)}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(experts: int) -> dict[str, Tensor]:
    """Return matrices of experts of 32 channels, and of a router before them."""
    weights = {"router.weight": normal(experts, 64, seed=0)}
    for number, (expert, role) in enumerate((expert, role) for expert in range(experts) for role in ROLES):
        shape = (64, 32) if role == "down" else (32, 64)
        weights[f"experts.{expert}.{role}.weight"] = normal(*shape, seed=1 + number)
    return weights


def moments_of(experts: int) -> dict[Moment, Tensor]:
    """Return the moments of what the experts read, of 100 tokens."""
    points = {"mlp.in": 64} | {f"experts.{expert}.down.in": 32 for expert in range(experts)}
    inputs = {Moment(point): normal(100, width, seed=99).double() for point, width in points.items()}
    return {moment: (values.T @ values)[None] for moment, values in inputs.items()}


class Offloads:
    """Counts tensors whose numbers went out of memory, and gives them back."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.shapes.append(tuple(tensor.shape))
        return lambda: tensor


def rounded(solution: Solution, quantize: Quantize = QUANTIZE, **of: Any) -> tuple[Solution, Any, Offloads]:
    experts, offload = of.get("experts", 3), Offloads()
    moments = of.get("moments", moments_of(experts))
    found, schemes = round_by_expert(solution, quantize, 4, moments, weights_of(experts), READS, offload)
    return found, schemes, offload


def test_every_expert_is_rounded_as_it_would_be_alone() -> None:
    """The router is not rounded, and everything that is stored is out of memory."""
    weights = weights_of(3)
    found, schemes, offload = rounded(Solution(weights, {}, {"error": 0.25}))
    assert torch.equal(found.tensors["router.weight"], weights["router.weight"])
    worst = []
    for expert in range(3):
        own = {key: weight for key, weight in weights.items() if key.startswith(f"experts.{expert}.")}
        alone = round_solution(Solution(own, {}, {}), QUANTIZE, 4, moments_of(3), weights, READS)
        for name, tensor in alone[0].tensors.items():
            assert torch.equal(found.tensors[name], tensor), name
        assert {path: schemes[path] for path in alone[1]} == alone[1]
        worst.append(alone[0].report["rounding_error"])
    assert len(schemes) == 9
    assert found.report == {"error": 0.25, "rounding_error": max(worst)}
    assert len({*worst}) == 3
    assert len(offload.shapes) == len(found.tensors) == 1 + 9 * 3


def test_a_router_alone_has_no_codes() -> None:
    weight = weights_of(3)["router.weight"]
    found, schemes, _ = rounded(Solution({"router.weight": weight}, {}, {"error": 0.5}))
    assert (schemes, found.report) == ({}, {"error": 0.5})
    assert torch.equal(found.tensors["router.weight"], weight)


def test_an_expert_that_no_token_reached_is_named() -> None:
    """Its writer has no moment, so that its numbers go to the nearest codes."""
    moments = moments_of(3)
    del moments[Moment("experts.1.down.in")]
    found, _, _ = rounded(Solution(weights_of(3), {}, {}), moments=moments)
    assert found.report["nearest"] == ["experts.1.down"]


def test_kinds_of_levels_of_all_experts_are_named_once() -> None:
    found, schemes, _ = rounded(Solution(weights_of(2), {}, {}), Quantize(bits=4, group=32, levels="normal"), experts=2)
    assert found.report["levels"] == ["normal"]
    assert {scheme.levels for scheme in schemes.values()} == {"normal"}
    assert "experts.0.down.weight_levels" in found.tensors


def test_skipped_matrices_stay() -> None:
    weights = weights_of(2)
    quantize = Quantize(bits=4, group=32, skip=("experts.down",))
    found, schemes, _ = rounded(Solution(weights, {}, {}), quantize, experts=2)
    assert {path.rpartition(".")[2] for path in schemes} == {"gate", "up"}
    assert torch.equal(found.tensors["experts.1.down.weight"], weights["experts.1.down.weight"])


def test_one_expert_is_in_memory_at_a_time() -> None:
    """The tensors of the next one are read when those of the one before are out of memory."""
    weights, events = weights_of(2), list[str]()

    class Watched(dict[str, Tensor]):
        def __iter__(self) -> Iterator[str]:
            return iter(weights)

        def __getitem__(self, key: str) -> Tensor:
            events.append(key.rpartition(".")[0].rpartition(".")[0] or "router")
            return weights[key]

    def offload(tensor: Tensor) -> Callable[[], Tensor]:
        events.append("out")
        return lambda: tensor

    round_by_expert(Solution(Watched(weights), {}, {}), QUANTIZE, 4, moments_of(2), weights, READS, offload)
    assert events == ["router", "out", *["experts.0"] * 3, *["out"] * 9, *["experts.1"] * 3, *["out"] * 9]


def test_a_matrix_that_is_not_finite_is_named() -> None:
    weights = weights_of(2)
    weights["experts.1.up.weight"][3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"experts\.1\.up\.weight"):
        rounded(Solution(weights, {}, {}), experts=2)
