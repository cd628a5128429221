"""Weights that are factored one by one: what each rank stores, and where a weight stays dense."""

from __future__ import annotations

import pytest

from pipeline.kernels.lowrank import rank_limit
from pipeline.methods.registry import build_methods
from pipeline.methods.separate import SeparateMethod
from tests.families.geometries import llama, manifest, other


def method_of(name: str) -> SeparateMethod:  # type: ignore[type-arg]
    (method,) = build_methods(manifest({"method": name}))
    assert isinstance(method, SeparateMethod)
    return method


@pytest.mark.parametrize("name", ["svd", "asvd", "svd_llm"])
def test_matrices_of_one_input_are_one_group(name: str) -> None:
    geometry = llama()
    groups = [group for group in method_of(name).claims(geometry) if group.layer == 0]
    assert [group.roles for group in groups] == [("q", "k", "v"), ("o",), ("gate", "up"), ("down",)]
    assert all(len(group.moments) == (name != "svd") for group in groups)


@pytest.mark.parametrize("geometry", [llama(), llama("biased"), other("opt")], ids=["gqa", "biased", "opt"])
def test_a_rank_stores_two_factors_until_the_weight_is_smaller(geometry: object) -> None:
    variables = method_of("svd").rank_variables(geometry)  # type: ignore[arg-type]
    for variable in variables:
        matrix = geometry.layers[variable.layer].matrices[variable.name]  # type: ignore[attr-defined]
        m, D = matrix.shape
        assert variable.cap == rank_limit(m, D) + 1
        assert variable.cost(variable.cap) == m * D + matrix.biases
        assert variable.cost(2) == 2 * (m + D) + matrix.biases
        assert variable.cost(variable.cap - 1) <= variable.cost(variable.cap)


def test_a_weight_at_its_cap_stays_dense() -> None:
    geometry, method = llama(), method_of("svd")
    group = next(group for group in method.claims(geometry) if group.roles == ("q", "k", "v"))
    shapes = {role: geometry.layers[0].weight_shape(role) for role in group.roles}
    ranks = {"q": 5, "k": rank_limit(*shapes["k"]) + 1, "v": rank_limit(*shapes["v"])}
    forms = group.forms(ranks)
    assert {role: (form.form, form.rank) for role, form in forms.items()} == {
        "q": ("low_rank", 5),
        "v": ("low_rank", ranks["v"]),
    }
    targets = method.target_ranks(geometry, 0.5, None)  # type: ignore[arg-type]
    m, D = shapes["q"]
    assert targets[0, group.name, "q"] == 0.5 * m * D / (m + D)
