"""FLAT-LLM's groups against a naive second writing of docs/methods.md#flat-llm, on random weights and moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group
from pipeline.methods.flat_llm import FlatLLMMethod
from pipeline.methods.method import Moment, Solution, Statistics
from pipeline.methods.registry import build_methods
from tests.families.geometries import SIZES, alone, llama, manifest, other
from tests.methods import naive_flat_llm as naive

pytestmark = pytest.mark.sample(3)

SMALL = {"hidden_size": 24, "intermediate_size": 18, "num_hidden_layers": 1}
HEAD_DIMS = {"mha": 6, "gqa": 8, "mqa": 6, "biased": 6, "wide-heads": 20}
VALUES = [(basis, weighting) for basis in ("value", "context") for weighting in ("none", "output")]


def geometry_of_size(name: str) -> LayerGeometry:
    return (llama(name, **SMALL, head_dim=HEAD_DIMS[name]) if name in SIZES else other(name)).layers[0]


@pytest.fixture(params=[*SIZES, "opt", "gptj", "qwen2"])
def geometry(request: pytest.FixtureRequest) -> LayerGeometry:
    return geometry_of_size(request.param)


def method_of(**entry: Any) -> FlatLLMMethod:
    (method,) = build_methods(manifest(entry))
    assert isinstance(method, FlatLLMMethod)
    return method


def weights_of(
    geometry: LayerGeometry, roles: tuple[str, ...], dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"{role}.{part}": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for role in roles
        for part, shape in geometry.role_shapes(role).items()
    }


def moments_of(geometry: LayerGeometry, group: Group[Any]) -> dict[Moment, Tensor]:
    """Well-conditioned moments of uneven spectra."""
    generator = torch.Generator().manual_seed(4)
    found = {}
    for moment in group.moments:
        role, _, side = moment.point.partition(".")
        width = geometry.weight_shape(role)[1 if side == "in" else 0] // moment.heads
        scale = torch.linspace(0.3, 2.0, width, dtype=torch.float64)
        rows = torch.randn(moment.groups, 4 * width, width, generator=generator, dtype=torch.float64) * scale
        found[moment] = rows.transpose(1, 2) @ rows
    return found


def compress(
    method: FlatLLMMethod, geometry: LayerGeometry, name: str, rank: int, dtype: torch.dtype = torch.float64
) -> Any:
    """(group, weights, moments, solution) of one group at a rank."""
    (group,) = (group for group in method.claims(alone(geometry)) if group.layer == 0 and group.name == name)
    weights, moments = weights_of(geometry, group.roles, dtype), moments_of(geometry, group)
    before = [tensor.clone() for tensor in (*weights.values(), *moments.values())]
    ranks = {"attention": "value", "mlp": "mlp", "query_key": "query_key"}[name]
    solution = group.with_data(weights, Statistics(moments)).solve({ranks: rank})
    for tensor, copy in zip((*weights.values(), *moments.values()), before, strict=True):
        assert torch.equal(tensor, copy), "an input was changed"
    copied = group.mlp.roles[:-1] if name == "mlp" else ()  # rows of the readers are those of the weights
    for key, tensor in solution.tensors.items():
        assert tensor.dtype == (dtype if key.startswith(copied) or key.endswith("down.bias") else torch.float64)
    return group, weights, moments, solution


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-8, atol=1e-8 * expected.abs().max().item())


# Value and output -----------------------------------------------------------------------------------------------------


def products(solution: Solution, geometry: LayerGeometry, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Of every query head: W̃_o^h W̃_v^g (D × D) and W̃_o^h b̃_v^g, whatever basis lies between them."""
    value, out = solution.tensors["v.weight"], solution.tensors["o.weight"]
    bias = solution.tensors.get("v.bias", torch.zeros(value.shape[0], dtype=torch.float64))
    found = []
    for h in range(geometry.attention.heads):
        g = h // (geometry.attention.heads // geometry.attention.kv_heads)
        rows = slice(g * rank, (g + 1) * rank)
        block = out[:, h * rank : (h + 1) * rank]
        found.append((block @ value[rows], block @ bias[rows]))
    return found


@pytest.mark.parametrize(("basis", "weighting"), VALUES)
def test_value_and_output(geometry: LayerGeometry, basis: str, weighting: str) -> None:
    method, d = method_of(basis=basis, weighting=weighting), geometry.attention.head_dim
    for rank in sorted({1, d // 2, d - 1, d}):
        group, weights, moments, solution = compress(method, geometry, "attention", rank)
        (moment,) = moments.values()
        assert group.moments[0] == (
            Moment("o.in", geometry.attention.heads, geometry.attention.kv_heads) if basis == "context"
            else Moment("v.out", geometry.attention.kv_heads, geometry.attention.kv_heads)
        )  # fmt: skip
        project, error = naive.projections(moment, weights["o.weight"], geometry.attention.heads, rank, weighting)
        for h, (product, bias) in enumerate(products(solution, geometry, rank)):
            g = h // (geometry.attention.heads // geometry.attention.kv_heads)
            out = weights["o.weight"][:, h * d : (h + 1) * d] @ project[g]
            equal(product, out @ weights["v.weight"][g * d : (g + 1) * d])
            if "v.bias" in weights:
                equal(bias, out @ weights["v.bias"][g * d : (g + 1) * d])
        assert ("o.bias" in solution.tensors) == ("o.bias" in weights)
        if "o.bias" in weights:
            equal(solution.tensors["o.bias"], weights["o.bias"])
        assert solution.report == {"error": pytest.approx(error, abs=1e-9), "spectrum": solution.report["spectrum"]}
        assert solution.forms == dict.fromkeys(("v", "o"), FormSpec(form="head_pca", rank=rank))
        assert solution.tensors["v.weight"].shape == (geometry.attention.kv_heads * rank, geometry.hidden)
        assert solution.tensors["o.weight"].shape == (geometry.hidden, geometry.attention.heads * rank)
        assert solution.tensors["o.weight"].is_contiguous()


@pytest.mark.parametrize(("basis", "weighting"), VALUES)
def test_value_and_output_at_full_rank_are_the_dense_ones(geometry: LayerGeometry, basis: str, weighting: str) -> None:
    d = geometry.attention.head_dim
    _, weights, _, solution = compress(method_of(basis=basis, weighting=weighting), geometry, "attention", d)
    for h, (product, _) in enumerate(products(solution, geometry, d)):
        g = h // (geometry.attention.heads // geometry.attention.kv_heads)
        equal(product, weights["o.weight"][:, h * d : (h + 1) * d] @ weights["v.weight"][g * d : (g + 1) * d])
    assert solution.report["error"] == pytest.approx(0.0, abs=1e-12)


def test_the_paper_s_theorem(geometry: LayerGeometry) -> None:
    """Σ‖y − Q̃Q̃ᵀy‖² over values equals the dropped eigenvalues (docs/methods.md#value-and-output), y by weights."""
    method, d, rank = (
        method_of(basis="value", weighting="none"),
        geometry.attention.head_dim,
        geometry.attention.head_dim // 2,
    )
    (group, *_) = method.claims(alone(geometry))
    weights = weights_of(geometry, group.roles)
    x_TD = torch.randn(300, geometry.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y_TGd = (x_TD @ weights["v.weight"].T).reshape(300, geometry.attention.kv_heads, d)
    moment_Gdd = torch.einsum("tgd,tge->gde", y_TGd, y_TGd)
    solution = group.with_data(weights, Statistics({group.moments[0]: moment_Gdd})).solve({"value": rank})
    # The rows of W̃_v are Q̃ᵀ W_v: kept energy is that of the latents, as Q̃ is orthonormal.
    latent = x_TD @ solution.tensors["v.weight"].T
    lost = y_TGd.square().sum() - latent.square().sum()
    assert solution.report["error"] == pytest.approx((lost / y_TGd.square().sum()).item(), rel=1e-9)
    dropped = sum(naive.leading(moment_Gdd[g], rank)[1][rank:].sum().item() for g in range(geometry.attention.kv_heads))
    assert lost.item() == pytest.approx(dropped, rel=1e-9)


# MLP ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["leverage", "eliminate"])
@pytest.mark.parametrize("width", [1, 7, 17])
def test_mlp(geometry: LayerGeometry, selection: str, width: int) -> None:
    ridge = 0.7
    if geometry.mlps[0].width > 20 and selection == "eliminate":
        width = geometry.mlps[0].width - 2  # the naive elimination takes a while
    group, weights, moments, solution = compress(
        method_of(selection=selection, ridge=ridge), geometry, "mlp", min(width, geometry.mlps[0].width)
    )
    width = min(width, geometry.mlps[0].width)
    moment, down = moments[Moment("down.in")][0], weights["down.weight"]
    kept = naive.leverage(moment, width, ridge) if selection == "leverage" else naive.eliminate(moment, down, width)
    new, error = naive.refit(moment, down, kept)
    equal(solution.tensors["down.weight"], new)
    for role in group.roles[:-1]:
        for part in ("weight", "bias"):
            name = f"{role}.{part}"
            assert (name in solution.tensors) == (name in weights)
            if name in weights:
                assert torch.equal(solution.tensors[name], weights[name][kept])
    if "down.bias" in weights:
        assert torch.equal(solution.tensors["down.bias"], weights["down.bias"])
    assert solution.report["error"] == pytest.approx(error, rel=1e-6)
    assert solution.report.keys() == {"error", "jitter", "condition", "fallback", "dropped"}
    assert (solution.report["fallback"], solution.report["jitter"], solution.report["dropped"]) == (False, 0.0, 0)
    assert solution.forms == dict.fromkeys(group.roles, FormSpec(form="pruned", rank=width))


@pytest.mark.parametrize("selection", ["leverage", "eliminate"])
def test_mlp_at_full_width_is_the_dense_one(geometry: LayerGeometry, selection: str) -> None:
    _, weights, _, solution = compress(method_of(selection=selection), geometry, "mlp", geometry.mlps[0].width)
    for name, weight in weights.items():
        equal(solution.tensors[name], weight)
    assert solution.report["error"] == 0.0


def test_mlp_of_fewer_tokens_than_channels_says_so() -> None:
    geometry = geometry_of_size("gqa")
    method = method_of()
    (group,) = (group for group in method.claims(alone(geometry)) if group.name == "mlp")
    rows = torch.randn(4, geometry.mlps[0].width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    solution = group.with_data(
        weights_of(geometry, group.roles), Statistics({Moment("down.in"): (rows.T @ rows)[None]})
    ).solve({"mlp": 9})
    assert solution.report["fallback"] is True
    assert solution.report["dropped"] == 9 - 4
    assert solution.report["error"] < 1e-6


# Query and key --------------------------------------------------------------------------------------------------------


def test_query_and_key(geometry: LayerGeometry) -> None:
    method, d, D = method_of(query_key="head_pca"), geometry.attention.head_dim, geometry.hidden
    limit = d * D / (d + D)
    for rank in range(1, d + 1):
        _, weights, moments, solution = compress(method, geometry, "query_key", rank)
        if rank >= limit:  # two factors would not be smaller
            assert solution.report == {"dense": True}
            assert solution.forms == {}
            assert solution.tensors.keys() == weights.keys()
            for name, weight in weights.items():
                equal(solution.tensors[name], weight)
            continue
        assert solution.forms == dict.fromkeys(("q", "k"), FormSpec(form="head_low_rank", rank=rank))
        for role, heads in (("q", geometry.attention.heads), ("k", geometry.attention.kv_heads)):
            moment = moments[Moment(f"{role}.out", heads, heads)]
            first, second = solution.tensors[f"{role}.first.weight"], solution.tensors[f"{role}.second"]
            assert first.shape == (heads * rank, D)
            assert second.shape == (heads, d, rank)
            dropped = whole = 0.0
            for h in range(heads):
                basis, values = naive.leading(moment[h], rank)
                project = basis @ basis.T
                rows = slice(h * d, (h + 1) * d)
                equal(second[h] @ first[h * rank : (h + 1) * rank], project @ weights[f"{role}.weight"][rows])
                if f"{role}.bias" in weights:
                    equal(solution.tensors[f"{role}.bias"][rows], project @ weights[f"{role}.bias"][rows])
                dropped, whole = dropped + values[rank:].sum().item(), whole + values.sum().item()
            assert solution.report[f"{role}_error"] == pytest.approx(dropped / whole, abs=1e-9)


# What all groups have in common ---------------------------------------------------------------------------------------

GROUPS = {"attention": "value", "mlp": "mlp", "query_key": "query_key"}


@pytest.mark.parametrize("name", list(GROUPS))
def test_cost_is_what_is_stored(geometry: LayerGeometry, name: str) -> None:
    """The variable's cost, with which budgets are met, equals the numbers of the factors: at every rank."""
    method = method_of(query_key="head_pca", selection="leverage")
    (variable,) = (
        variable for variable in method.rank_variables(alone(geometry)) if (variable.layer, variable.group) == (0, name)
    )
    ranks = range(1, variable.cap + 1) if variable.cap < 30 else (1, 2, 29, variable.cap - 1, variable.cap)
    dense = geometry.numbers(next(group for group in method.claims(alone(geometry)) if group.name == name).roles)
    for rank in ranks:
        *_, solution = compress(method, geometry, name, rank)
        assert variable.cost(rank) == sum(tensor.numel() for tensor in solution.tensors.values())
        assert variable.cost(rank) <= dense
    assert variable.cost(variable.cap) == dense
    assert variable.name == GROUPS[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(GROUPS))
def test_weights_of_any_dtype_are_taken_in_float64(name: str, dtype: torch.dtype) -> None:
    geometry = geometry_of_size("biased")
    method = method_of(query_key="head_pca")
    group, weights, moments, solution = compress(method, geometry, name, 3, dtype)
    exact = {key: weight.double() for key, weight in weights.items()}
    expected = group.with_data(exact, Statistics(moments)).solve({GROUPS[name]: 3})
    for key, tensor in expected.tensors.items():
        equal(solution.tensors[key], tensor)


@pytest.mark.parametrize("name", list(GROUPS))
def test_the_same_bits_every_time(name: str) -> None:
    geometry = geometry_of_size("gqa")
    method = method_of(query_key="head_pca")
    *_, first = compress(method, geometry, name, 3)
    *_, second = compress(method, geometry, name, 3)
    assert first.report == second.report
    for key, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[key])


def test_more_rank_is_less_error(geometry: LayerGeometry) -> None:
    method = method_of()
    for name, full in (("attention", geometry.attention.head_dim), ("mlp", geometry.mlps[0].width)):
        ranks = sorted({1, full // 4 or 1, full // 2, full})
        errors = [compress(method, geometry, name, rank)[3].report["error"] for rank in ranks]
        assert errors == sorted(errors, reverse=True)


def test_output_weighting_is_better_for_outputs() -> None:
    """What the weighting is for: less error behind W_o, at the same rank."""
    geometry = geometry_of_size("gqa")
    d, rank = geometry.attention.head_dim, 3
    found = {}
    for weighting in ("none", "output"):
        method = method_of(basis="context", weighting=weighting)
        _, weights, moments, solution = compress(method, geometry, "attention", rank)
        (moment,) = moments.values()
        project, _ = naive.projections(moment, weights["o.weight"], geometry.attention.heads, rank, weighting)
        lost = 0.0
        for h in range(geometry.attention.heads):
            g = h // (geometry.attention.heads // geometry.attention.kv_heads)
            residual = weights["o.weight"][:, h * d : (h + 1) * d] @ (torch.eye(d, dtype=torch.float64) - project[g])
            lost += torch.trace(residual @ moment[g] @ residual.T).item()
        found[weighting] = lost
        assert solution.report["error"] > 0
    assert found["output"] < found["none"]


def test_dead_values_are_no_error() -> None:
    geometry = geometry_of_size("gqa")
    for weighting in ("none", "output"):
        method = method_of(weighting=weighting)
        (group, *_) = method.claims(alone(geometry))
        zero = torch.zeros(
            geometry.attention.kv_heads, geometry.attention.head_dim, geometry.attention.head_dim, dtype=torch.float64
        )
        solution = group.with_data(weights_of(geometry, group.roles), Statistics({group.moments[0]: zero})).solve(
            {"value": 2}
        )
        assert solution.report["error"] == 0.0
        assert all(torch.isfinite(tensor).all() for tensor in solution.tensors.values())


def test_settings_decide_what_is_claimed() -> None:
    geometry = geometry_of_size("gqa")
    assert method_of().scores == {"importance"}
    assert method_of(allocation="uniform").scores == frozenset()
    fixed = method_of(ranks={"value": 2})
    assert fixed.fixed_ranks
    assert fixed.scores == frozenset()
    assert method_of(keep=0.5).entry.keep == 0.5
    assert [group.name for group in method_of(mlp=False).claims(alone(geometry))] == ["attention"]
    assert [group.name for group in method_of(attention=False).claims(alone(geometry))] == ["mlp"]
    only = method_of(attention=False, mlp=False, query_key="head_pca").claims(alone(geometry))
    assert [(group.name, group.roles) for group in only] == [("query_key", ("q", "k"))]
