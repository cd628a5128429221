"""LeSTD: what is stored is what is claimed, reported and budgeted.

Legend: D hidden, H query heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pipeline.families.geometry import Geometry
from pipeline.methods.method import Moment, Scores, Statistics
from tests.methods.tucker_weights import (
    GEOMETRIES,
    Json,
    group_of,
    lestd,
    make_weights,
    rebuild,
    squared_error,
    stored_numbers,
)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("name", ["attention", "mlp"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_stored_tensors_make_the_reported_error(geometry: str, name: str, prune: bool, keep: float) -> None:
    where, method = GEOMETRIES[geometry], lestd(target="both", prune=prune, refine_sweeps=2)
    group = group_of(method, where, name)
    weights = make_weights(where, group.roles)
    before = {key: weight.clone() for key, weight in weights.items()}
    variable = next(variable for variable in method.rank_variables(where) if variable.key == (0, name, "size"))
    dense = sum(weight.numel() for key, weight in weights.items() if key.endswith(".weight"))
    biases = sum(weight.numel() for key, weight in weights.items() if key.endswith(".bias"))
    assert (variable.cap, variable.cost(variable.cap)) == (dense, where.layers[0].numbers(group.roles))
    size = int(keep * dense)
    solution = group.with_data(weights, Statistics()).solve({"size": size})
    total = sum(float(weight.square().sum()) for key, weight in weights.items() if key.endswith(".weight"))
    again = rebuild(solution, where, group)
    assert again.keys() == {key for key in weights if key.endswith(".weight")}
    assert squared_error(weights, again) / total == pytest.approx(solution.report["error"], rel=1e-9, abs=1e-13)
    numbers = stored_numbers(solution, where.bits)
    assert numbers == solution.report["numbers"] <= max(size, variable.cost(1) - biases)
    assert numbers <= variable.cost(size) - biases
    if solution.forms[group.roles[0]].sparse:
        # Nothing is left lying about: only cores that are whole, or one entry kept back for an empty core.
        assert numbers >= size - 1
        assert solution.report["numbers_without_index"] < numbers
    else:
        assert solution.report["numbers_without_index"] == numbers
    assert all(torch.equal(weights[key], before[key]) for key in weights)
    kept = {key: tensor for key, tensor in solution.tensors.items() if key.endswith(".bias")}
    assert kept.keys() == {key for key in weights if key.endswith(".bias")}
    assert all(torch.equal(tensor, weights[key]) for key, tensor in kept.items())


@pytest.mark.parametrize("entry", [{"target": "both"}, {"target": "both", "prune": False}, {"weighting": "input"}])
@pytest.mark.parametrize("geometry", ["gqa", "opt"])
def test_full_size_stays_dense(geometry: str, entry: Json) -> None:
    where, method = GEOMETRIES[geometry], lestd(**entry)
    for group in method.claims(where)[:2]:
        weights = make_weights(where, group.roles)
        cap = next(variable.cap for variable in method.rank_variables(where) if variable.group == group.name)
        solution = group.with_data(weights, Statistics(make_moments(where))).solve({"size": cap})
        assert solution.forms == {}
        assert solution.tensors.keys() == weights.keys()
        assert all(torch.equal(solution.tensors[key], weights[key]) for key in weights)


def test_weights_of_low_rank_come_back_exactly() -> None:
    where, method = GEOMETRIES["gqa"], lestd()
    group = group_of(method, where, "attention")
    weights = make_weights(where, group.roles, decay=0.0)  # 0 ** 0 is 1: rank 1 in D
    solution = group.with_data(weights, Statistics()).solve({"size": 4000})
    again = rebuild(solution, where, group)
    assert all(torch.allclose(again[key], weights[key], atol=1e-10) for key in again)


def test_zero_weights_and_the_smallest_size() -> None:
    for geometry in ("mha", "gqa"):
        where, method = GEOMETRIES[geometry], lestd()
        group = group_of(method, where, "attention")
        weights = {key: torch.zeros_like(weight) for key, weight in make_weights(where, group.roles).items()}
        for size in (1, 5000):
            solution = group.with_data(weights, Statistics()).solve({"size": size})
            assert solution.report["error"] == 0.0
            assert all(not weight.any() for weight in rebuild(solution, where, group).values())
        weights = make_weights(where, group.roles)
        solution = group.with_data(weights, Statistics()).solve({"size": 1})
        least = method.rank_variables(where)[0].cost(1)
        assert stored_numbers(solution, where.bits) == solution.report["numbers"] <= least
        assert rebuild(solution, where, group)


@pytest.mark.parametrize("keep", [0.15, 0.4, 0.8])
@pytest.mark.parametrize("geometry", ["mha", "gqa"])
def test_no_rank_given_does_better_than_those_searched(geometry: str, keep: float) -> None:
    """Whole-rank cores stand for smaller ones but for U₂ and U₃, which turn with R1: a tie may go either way."""
    where = GEOMETRIES[geometry]
    group = group_of(lestd(), where, "attention")
    weights = make_weights(where, group.roles)
    D, d = where.hidden, where.layers[0].attention.head_dim
    size = int(keep * sum(weights[f"{role}.weight"].numel() for role in group.roles))
    found = group_of(lestd(refine_sweeps=0), where, "attention").with_data(weights).solve({"size": size}).report
    errors = {}
    for rank in (D // 8, D // 4, 3 * D // 8, D // 2, 5 * D // 8, 3 * D // 4, 7 * D // 8, D):
        part_method = lestd(refine_sweeps=0, ranks=[rank, d, 4 if geometry == "mha" else 2])
        if size >= part_method.rank_variables(where)[0].cost(1):
            solution = group_of(part_method, where, "attention").with_data(weights).solve({"size": size})
            assert solution.report["tucker_ranks"][:2] == [rank, d]
            errors[rank] = solution.report["error"]
    assert len(errors) > 1
    assert found["error"] <= 1.001 * min(errors.values())
    assert max(errors.values()) > 1.1 * min(errors.values())
    refined = group_of(lestd(refine_sweeps=5), where, "attention").with_data(weights).solve({"size": size}).report
    assert refined["error"] <= found["error"]
    dense_core = group_of(lestd(prune=False), where, "attention").with_data(weights).solve({"size": size}).report
    assert found["error"] <= dense_core["error"]


def test_ranks_given_with_a_dense_core_are_the_size() -> None:
    where = GEOMETRIES["mha"]
    D, d, H = where.hidden, where.layers[0].attention.head_dim, where.layers[0].attention.heads
    method = lestd(ranks=[20, 10, 3], prune=False)
    assert method.fixed_ranks
    (variable, *_) = method.rank_variables(where)
    assert variable.cap == 20 * D + 10 * d + 3 * 4 + 20 * 10 * 3 * H
    assert set(method.target_ranks(where, 0.3, Scores()).values()) == {float(variable.cap)}
    group = group_of(method, where, "attention")
    solution = group.with_data(make_weights(where, group.roles), Statistics()).solve({"size": variable.cap})
    assert solution.forms["q"].as_json() == {"form": "tucker", "ranks": [20, 10, 3], "sparse": False}
    assert solution.tensors["attention.tucker.core"].shape == (20, 10, 3, H)
    assert stored_numbers(solution, 16) == variable.cap


# -- weighting: input -------------------------------------------------------------------------------------------------


def make_moments(where: Geometry, seed: int = 1) -> dict[Moment, Tensor]:
    """Of inputs with a spectrum of their own, for attention and o."""
    generator = torch.Generator().manual_seed(seed)
    D, d, H = where.hidden, where.layers[0].attention.head_dim, where.layers[0].attention.heads
    inputs_TD = torch.randn(400, D, generator=generator, dtype=torch.float64) * torch.linspace(0.05, 3, D)
    context_Td = torch.randn(400, d, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, d)
    scales_H = torch.linspace(0.2, 2, H, dtype=torch.float64)
    return {
        Moment("attention.in"): (inputs_TD.T @ inputs_TD)[None],
        Moment("o.in", heads=H, groups=H): scales_H[:, None, None] ** 2 * (context_Td.T @ context_Td),
    }


def output_errors(
    where: Geometry, weights: Mapping[str, Tensor], again: Mapping[str, Tensor], moments: Mapping[Moment, Tensor]
) -> tuple[float, float]:
    """Relative squared errors of the outputs of q, k, v together, and of o's heads."""
    moment_DD = moments[Moment("attention.in")][0]
    moment_Hdd = moments[Moment("o.in", heads=where.layers[0].attention.heads, groups=where.layers[0].attention.heads)]

    def inputs(weight: Tensor) -> float:
        return float(torch.einsum("oi,ij,oj->", weight, moment_DD, weight))

    def output(weight: Tensor) -> float:
        by_head = weight.unflatten(1, (where.layers[0].attention.heads, -1))
        return float(torch.einsum("ohi,hij,ohj->", by_head, moment_Hdd, by_head))

    names = [f"{role}.weight" for role in "qkv"]
    read = sum(inputs(weights[n] - again[n]) for n in names) / sum(inputs(weights[n]) for n in names)
    return read, output(weights["o.weight"] - again["o.weight"]) / output(weights["o.weight"])


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("geometry", ["mha", "gqa", "mqa", "biased", "opt"])
def test_weighting_lowers_the_output_error(geometry: str, prune: bool) -> None:
    where, method = GEOMETRIES[geometry], lestd(weighting="input", prune=prune, refine_sweeps=2)
    group = group_of(method, where, "attention")
    moments = make_moments(where)
    assert set(group.moments) == moments.keys()
    weights = make_weights(where, group.roles)
    size = where.layers[0].numbers(group.roles) // 2
    solution = group.with_data(weights, Statistics(moments)).solve({"size": size})
    again = rebuild(solution, where, group)
    numbers = stored_numbers(solution, where.bits)
    assert numbers <= solution.report["numbers"] + solution.report["numbers_o"] <= size
    even = {moment: torch.eye(total.shape[-1]).double().expand_as(total) for moment, total in moments.items()}
    plain = rebuild(group.with_data(weights, Statistics(even)).solve({"size": size}), where, group)
    weighted_errors = output_errors(where, weights, again, moments)
    plain_errors = output_errors(where, weights, plain, moments)
    assert weighted_errors[0] == pytest.approx(solution.report["error"], rel=1e-6)
    assert weighted_errors[0] < 0.8 * plain_errors[0]
    # One root for all heads, scaled: exact, as these covariances differ in scale only.
    assert weighted_errors[1] == pytest.approx(solution.report["error_o"], rel=1e-6)
    assert weighted_errors[1] < 0.8 * plain_errors[1]
