"""The baselines of a sweep against products written out in float64, on every family.

D inputs, m outputs, N intermediate, T tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.geometry import Geometry
from pipeline.methods.base import Group
from pipeline.methods.method import Solution, Statistics
from pipeline.methods.registry import allocate_ranks, build_methods
from tests.families.geometries import llama, manifest, other

FAMILIES = {"gqa": llama(), "biased": llama("biased"), "opt": other("opt"), "gptj": other("gptj")}
LOW_RANK: tuple[dict[str, Any], ...] = (
    {"method": "svd"},
    {"method": "asvd"},
    {"method": "asvd", "alpha": 1.0},
    {"method": "svd_llm"},
)
TOKENS = 200


def solve(entry: dict[str, Any], where: Geometry, name: str, rank: int) -> tuple[dict[str, Tensor], Tensor, Solution]:
    """Random weights of a group of layer 1, correlated inputs (T, D), and what the method makes of them."""
    (method,) = build_methods(manifest(entry))
    group = next(group for group in method.claims(where) if (group.layer, group.name) == (1, name))
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        key: normal(*shape)
        for key, (_, shape) in where.layers[1].tensors().items()
        if key.partition(".")[0] in group.roles
    }
    width = weights[f"{group.roles[0]}.weight"].shape[1]
    inputs_TD = normal(TOKENS, width) @ normal(width, width) * torch.linspace(0.05, 3, width, dtype=torch.float64)
    before = {key: weight.clone() for key, weight in weights.items()}
    moments = {moment: (inputs_TD.T @ inputs_TD)[None] for moment in group.moments}
    ranks = dict.fromkeys(group.roles, rank) | {"mlp": rank}
    solution = group.with_data(weights, Statistics(moments, TOKENS)).solve(ranks)
    assert all(torch.equal(weights[key], before[key]) for key in weights)
    return weights, inputs_TD, solution


def best(weight_mD: Tensor, scale_DD: Tensor, rank: int) -> Tensor:
    """The rank-r W' with the least ‖(W − W')S‖, by the singular vectors of W S."""
    left, values, right = torch.linalg.svd(weight_mD @ scale_DD, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank] @ torch.linalg.inv(scale_DD)


def scale_of(entry: dict[str, Any], inputs_TD: Tensor) -> Tensor:
    width = inputs_TD.shape[1]
    if entry["method"] == "svd":
        return torch.eye(width, dtype=torch.float64)
    if entry["method"] == "asvd":
        return torch.diag(inputs_TD.square().mean(dim=0).sqrt() ** entry.get("alpha", 0.5))
    return torch.linalg.cholesky(inputs_TD.T @ inputs_TD)  # as the paper whitens


@pytest.mark.parametrize("entry", LOW_RANK, ids=str)
@pytest.mark.parametrize("name", ["query_key_value", "output", "gate_up", "down"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_weight_is_the_best_of_its_rank(entry: dict[str, Any], name: str, family: str) -> None:
    weights, inputs_TD, solution = solve(entry, FAMILIES[family], name, 7)
    for key, weight in weights.items():
        role, _, kind = key.partition(".")
        if kind == "bias":
            assert solution.tensors[key] is weight
            continue
        found = solution.tensors[f"{role}.second.weight"] @ solution.tensors[f"{role}.first.weight"]
        expected = best(weight, scale_of(entry, inputs_TD), 7)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
        assert solution.forms[role] == FormSpec(form="low_rank", rank=7)


def test_whitened_factors_lose_least_on_the_text() -> None:
    lost = {}
    for entry in LOW_RANK:
        weights, inputs_TD, solution = solve(entry, FAMILIES["gqa"], "down", 9)
        found = solution.tensors["down.second.weight"] @ solution.tensors["down.first.weight"]
        lost[str(entry)] = float((inputs_TD @ (weights["down.weight"] - found).T).square().sum())
    assert min(lost, key=lost.__getitem__) == str({"method": "svd_llm"})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_channels_stay(family: str) -> None:
    weights, _, solution = solve({"method": "magnitude"}, FAMILIES[family], "mlp", 20)
    width = weights["down.weight"].shape[1]
    size = [
        sum(
            float(weights[f"{role}.weight"].select(1 if role == "down" else 0, channel).square().sum())
            for role in solution.forms
        )
        for channel in range(width)
    ]
    kept = sorted(sorted(range(width), key=lambda channel: -size[channel])[:20])
    assert torch.equal(solution.tensors["down.weight"], weights["down.weight"][:, kept])
    for role in solution.forms.keys() - {"down"}:
        assert torch.equal(solution.tensors[f"{role}.weight"], weights[f"{role}.weight"][kept])
        if f"{role}.bias" in weights:
            assert torch.equal(solution.tensors[f"{role}.bias"], weights[f"{role}.bias"][kept])
    assert solution.report["dropped_magnitude"] == pytest.approx(1 - sum(size[c] for c in kept) / sum(size))


@pytest.mark.parametrize("entry", [{"method": "svd"}, {"method": "magnitude"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_cost_is_what_is_stored(entry: dict[str, Any], family: str) -> None:
    where = FAMILIES[family]
    (method,) = build_methods(manifest(entry))
    for variable in method.rank_variables(where):
        if variable.layer != 1:
            continue
        for rank in {1, 2, variable.cap // 2, variable.cap - 1, variable.cap}:
            _, _, solution = solve(entry, where, variable.group, rank)
            ours = {key: tensor for key, tensor in solution.tensors.items() if _of(variable.name, key)}
            assert sum(tensor.numel() for tensor in ours.values()) == variable.cost(rank), (variable.key, rank)


def _of(name: str, key: str) -> bool:
    return name == "mlp" or key.startswith(f"{name}.")


@pytest.mark.parametrize("entry", [*LOW_RANK, {"method": "magnitude"}], ids=str)
@pytest.mark.parametrize("keep", [0.8, 0.55])
def test_the_budget_is_met(entry: dict[str, Any], keep: float) -> None:
    where, job = FAMILIES["gqa"], manifest(entry, keep=keep)
    (method,) = build_methods(job)
    assert isinstance(method.claims(where)[0], Group)
    ranks = allocate_ranks(job, (method,), where, _no_scores())
    stored = sum(
        variable.cost(ranks[f"{variable.layer}/0/{variable.group}"][variable.name])
        for variable in method.rank_variables(where)
    )
    claimed = sum(where.layers[0].numbers(group.roles) for group in method.claims(where))
    total = where.decoder_numbers()
    assert keep * total - 200 < stored + total - claimed <= keep * total


def _no_scores() -> Any:
    from pipeline.methods.method import Scores

    return Scores()


def test_inputs_that_are_always_nought() -> None:
    (method,) = build_methods(manifest({"method": "asvd"}))
    found: Any = method
    roots = found.roots(torch.diag(torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64)))
    assert roots.clipped == 1
    torch.testing.assert_close(roots.root @ roots.inverse, torch.eye(3, dtype=torch.float64))
    nothing = found.roots(torch.zeros(3, 3, dtype=torch.float64))
    torch.testing.assert_close(nothing.root, torch.eye(3, dtype=torch.float64))
