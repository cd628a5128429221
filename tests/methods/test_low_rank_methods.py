"""LoRC and Joint rank-k against products written out in float64.

D hidden, H query heads, G key/value heads, d head_dim, r rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.errors import InputError
from manifests.methods import LoRC
from manifests.records import FormSpec
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.base import Method
from pipeline.methods.method import Moment, Scores, Solution, Statistics
from pipeline.methods.registry import allocate_ranks, build_methods, claim_tasks
from tests.families.geometries import manifest

D, d, N = 24, 4, 40


def geometry(heads: int = 6, kv_heads: int = 2, **config: Any) -> Geometry:
    sizes = {"hidden_size": D, "head_dim": d, "intermediate_size": N, "num_hidden_layers": 3, "vocab_size": 11}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return geometry_of(standard_config({"model_type": "llama", **sizes, **heads_of, **config}))


def solve(
    entry: dict[str, Any], where: Geometry, name: str, rank: int, seed: int = 0
) -> tuple[dict[str, Tensor], Solution]:
    """Random weights of a group of layer 0 and what the method makes of them."""
    (method,) = build_methods(manifest(entry))
    group = next(group for group in method.claims(where) if group.name == name and group.layer == 0)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        key: torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, (_, shape) in where.layers[0].tensors().items()
        if key.partition(".")[0] in group.roles
    }
    before = {key: weight.clone() for key, weight in weights.items()}
    inputs_TD = torch.randn(60, D, generator=generator, dtype=torch.float64) * torch.linspace(
        0.1, 3, D, dtype=torch.float64
    )
    moments: dict[Moment, Tensor] = {moment: (inputs_TD.T @ inputs_TD)[None] for moment in group.moments}
    solution = group.with_data(weights, Statistics(moments)).solve({name: rank})
    assert all(torch.equal(weights[key], before[key]) for key in weights)
    return weights, solution


def stored(solution: Solution) -> int:
    return sum(tensor.numel() for tensor in solution.tensors.values())


def cost(method: Method[Any], where: Geometry, name: str, rank: int) -> float:
    return next(
        variable.cost(rank)
        for variable in method.rank_variables(where)
        if variable.group == name and variable.layer == 0
    )


@pytest.mark.parametrize("rank", [5, 7])
def test_latent_key_is_the_best_of_its_rank(rank: int) -> None:
    weights, solution = solve({"method": "lorc", "cache_keep": 0.6}, geometry(), "key", rank)
    rebuilt = solution.tensors["k.second.weight"] @ solution.tensors["k.first.weight"]
    error = (weights["k.weight"] - rebuilt).square().sum()
    values = torch.linalg.svdvals(weights["k.weight"])
    torch.testing.assert_close(error, values[rank:].square().sum())
    assert solution.report["error"] == pytest.approx(float(values[rank:].square().sum() / values.square().sum()))
    assert torch.linalg.matrix_norm(weights["k.weight"] - rebuilt, 2) <= values[rank] * (1 + 1e-9)
    assert solution.forms == {"k": FormSpec(form="latent", rank=rank)}


@pytest.mark.parametrize("bias", [False, True])
def test_absorbed_values_give_what_rebuilt_ones_give(bias: bool) -> None:
    where = geometry(attention_bias=bias)
    weights, solution = solve({"method": "lorc", "cache_keep": 0.3}, where, "value", 2)
    assert solution.forms["o"] == FormSpec(form="absorbed", rank=2)
    first_rD, output = solution.tensors["v.first.weight"], solution.tensors["o.weight"]
    left, values, right = torch.linalg.svd(weights["v.weight"], full_matrices=False)
    value_CD = left[:, :2] @ torch.diag(values[:2]) @ right[:2]
    x_D, shares_H = torch.randn(D, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    latent_r = first_rD @ x_D  # every head reads the same latents, with its own attention weight
    got = output @ torch.cat([share * latent_r for share in shares_H]) + solution.tensors.get("o.bias", torch.zeros(D))
    bias_C = weights.get("v.bias", torch.zeros(8, dtype=torch.float64))
    heads = (value_CD @ x_D).reshape(2, d), bias_C.reshape(2, d)
    read = torch.cat([shares_H[h] * heads[0][h // 3] + heads[1][h // 3] for h in range(6)])
    torch.testing.assert_close(got, weights["o.weight"] @ read + weights.get("o.bias", torch.zeros(D)))


def test_lorc_weighting_lowers_the_output_error() -> None:
    errors = {}
    for weighting in ("none", "input"):
        weights, solution = solve({"method": "lorc", "cache_keep": 0.5, "weighting": weighting}, geometry(), "key", 4)
        rebuilt = solution.tensors["k.second.weight"] @ solution.tensors["k.first.weight"]
        generator = torch.Generator().manual_seed(0)
        for shape in ((8, D),):
            torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = torch.linspace(0.1, 3, D, dtype=torch.float64)
        errors[weighting] = float(((weights["k.weight"] - rebuilt) * scale).square().sum())
    assert errors["input"] < errors["none"]


@pytest.mark.parametrize("cache_keep", [0.8, 0.6, 0.3, 1.0])
@pytest.mark.parametrize("allocation", ["progressive", "uniform"])
def test_the_mean_cache_share_is_what_is_asked_for(cache_keep: float, allocation: str) -> None:
    where = geometry(num_hidden_layers=6)
    job = manifest({"method": "lorc", "cache_keep": cache_keep, "allocation": allocation})
    methods = build_methods(job)
    scores = Scores(measured={f"{layer}/0/condition": {"log_condition": [1.0 + layer, 2.0]} for layer in range(6)})
    ranks = allocate_ranks(job, methods, where, scores)
    shares = [rank / (where.layers[0].attention.kv_heads * d) for chosen in ranks.values() for rank in chosen.values()]
    assert sum(shares) / len(shares) == pytest.approx(cache_keep, abs=0.5 / (where.layers[0].attention.kv_heads * d))
    if allocation == "progressive" and cache_keep == 0.6:
        assert ranks["0/0/key"]["key"] > ranks["5/0/key"]["key"]


@pytest.mark.parametrize("cache_keep", [0.05, 0.15, 0.28, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("allocation", ["progressive", "uniform"])
def test_a_cache_wider_than_the_hidden_state(cache_keep: float, allocation: str) -> None:
    """C = 80 > D = 24: the share is of C, too; latents of D numbers lose nothing, and wider ones there are not."""
    where = geometry(heads=8, kv_heads=8, head_dim=10, num_hidden_layers=6)
    job = manifest({"method": "lorc", "cache_keep": cache_keep, "allocation": allocation})
    (method,) = build_methods(job)
    scores = Scores(measured={f"{layer}/0/condition": {"log_condition": [1.0 + layer, 2.0]} for layer in range(6)})
    chosen = allocate_ranks(job, (method,), where, scores)
    ranks = {
        key: rank for name, found in chosen.items() if name.endswith("key") for key, rank in [(name, found["key"])]
    }
    if cache_keep == 1.0:
        assert set(ranks.values()) == {80}
        assert solve(job.methods[0].model_dump(), where, "key", 80)[1].report == {"dense": True}
        return
    assert sum(ranks.values()) / 6 == pytest.approx(min(cache_keep, D / 80) * 80, abs=0.5)
    assert max(ranks.values()) <= D
    *remarks, decoding = method.remarks(where)
    kept = min(cache_keep, D / 80) * 80
    assert decoding.startswith(f"keys of rank {round(kept)} take {round(kept) * 80:,} products for each cached token")
    assert len(remarks) == (cache_keep > 0.3)
    if remarks:
        assert set(ranks.values()) == {D}
        assert f"cache_keep: {cache_keep:g} is not reached" in remarks[0]
        assert "it becomes 0.3, without loss" in remarks[0]
        weights, solution = solve(job.methods[0].model_dump(), where, "key", D)
        rebuilt = solution.tensors["k.second.weight"] @ solution.tensors["k.first.weight"]
        torch.testing.assert_close(rebuilt, weights["k.weight"])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"cache_keep": 0.01}, "cache_keep: 0.01 of .* is less than the smallest rank, 1"),
        ({"cache_keep": 0.5, "skip_above": 1e-9}, "methods.0 .lorc.: cache_keep 0.5 is out of reach"),
    ],
)
def test_a_share_of_the_cache_that_no_ranks_give(entry: dict[str, Any], words: str) -> None:
    job, where = manifest({"method": "lorc", **entry}), geometry()

    def allocate() -> None:
        methods = build_methods(job)
        claim_tasks(methods, where)
        allocate_ranks(job, methods, where, Scores(dict.fromkeys(range(where.num_layers), 1.0)))

    with pytest.raises(InputError, match=words):
        allocate()


@pytest.mark.parametrize(
    "entry",
    [
        {"method": "lorc", "cache_keep": 0.5},
        {"method": "lorc"},
        {"method": "joint_rank_k", "query_key": "joint", "mlp": "joint"},
        {"method": "joint_rank_k", "query_key": "separate", "mlp": "separate"},
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_cost_is_what_is_stored(entry: dict[str, Any], bias: bool) -> None:
    where = geometry(attention_bias=bias)
    (method,) = build_methods(manifest(entry))
    for variable in method.rank_variables(where):
        if variable.layer == 0:
            for rank in range(1, variable.cap + 1):
                _, solution = solve(entry, where, variable.group, rank)
                assert stored(solution) == variable.cost(rank), (variable.group, rank)


def test_joint_factors_are_never_worse_than_the_best_of_the_stack() -> None:
    weights, solution = solve({"method": "joint_rank_k"}, geometry(), "mlp", 9)
    stack = torch.cat([weights["gate.weight"], weights["up.weight"]])
    seconds = torch.cat([solution.tensors["gate.second.weight"], solution.tensors["up.second.weight"]])
    error = (stack - seconds @ solution.tensors["gate.first.weight"]).square().sum()
    torch.testing.assert_close(error, torch.linalg.svdvals(stack)[9:].square().sum())
    assert "up.first.weight" not in solution.tensors


def test_joint_per_head_pairs_each_query_head_with_its_key_head() -> None:
    where = geometry(heads=3, kv_heads=3, hidden_size=D)
    weights, solution = solve({"method": "joint_rank_k", "query_key": "joint_per_head"}, where, "query_key", 3)
    first_HkD = solution.tensors["q.first.weight"].reshape(3, 3, D)
    error = torch.zeros((), dtype=torch.float64)
    for role in ("q", "k"):
        rebuilt_HdD = torch.bmm(solution.tensors[f"{role}.second"], first_HkD)
        error += (weights[f"{role}.weight"].reshape(3, d, D) - rebuilt_HdD).square().sum()
    pairs = torch.cat([weights["q.weight"].reshape(3, d, D), weights["k.weight"].reshape(3, d, D)], dim=1)
    torch.testing.assert_close(error, torch.linalg.svdvals(pairs)[:, 3:].square().sum())


@pytest.mark.parametrize(
    ("entry", "config", "reason"),
    [
        ({"query_key": "joint_per_head"}, {}, "6 query and 2 key heads"),
        (
            {"ranks": {"query_key": 20, "mlp": 4}},
            {},
            "ranks.query_key: 20 saves nothing; the largest rank that does is",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(entry: dict[str, Any], config: dict[str, Any], reason: str) -> None:
    methods = build_methods(manifest({"method": "joint_rank_k", **entry}))
    with pytest.raises(ValueError, match=reason):
        claim_tasks(methods, geometry(**config))


def test_gate_and_up_need_a_gate() -> None:
    sizes = {"hidden_size": D, "ffn_dim": N, "num_hidden_layers": 1, "num_attention_heads": 6, "vocab_size": 11}
    where = geometry_of(standard_config({"model_type": "opt", "word_embed_proj_dim": D, **sizes}))
    with pytest.raises(ValueError, match="MLP without gate"):
        claim_tasks(build_methods(manifest({"method": "joint_rank_k"})), where)


def test_two_claims_on_a_tensor_name_both() -> None:
    methods = build_methods(manifest({"method": "flat_llm"}, {"method": "lorc", "cache_keep": 0.5}))
    with pytest.raises(ValueError, match=r"methods\.0 \(flat_llm, attention\) and by methods\.1 \(lorc, value\)"):
        claim_tasks(methods, geometry())


def test_joint_ranks_follow_the_importance_that_shares_their_budget() -> None:
    """IPRS where another method of the budget asks for it; one ratio for all layers alone, or with a `keep`."""
    where, scores = geometry(), Scores({layer: 0.1 + 0.1 * layer for layer in range(geometry().num_layers)})
    joint = {"method": "joint_rank_k", "mlp": False}

    def ranks(entry: dict[str, Any], scores: Scores) -> list[float]:
        (method,) = build_methods(manifest(entry))
        return list(method.target_ranks(where, 0.4, scores).values())

    assert ranks(joint, scores) == sorted(set(ranks(joint, scores)))
    assert len(set(ranks(joint, Scores()))) == len(set(ranks({**joint, "keep": 0.4}, scores))) == 1
    assert sum(ranks(joint, scores)) == pytest.approx(sum(ranks(joint, Scores())))


@pytest.mark.parametrize(
    ("entry", "allocation"),
    [({}, "uniform"), ({"skip_above": 30.0}, "progressive"), ({"allocation": "progressive"}, "progressive")],
)
def test_ranks_of_lorc_are_uniform_unless_a_threshold_means_otherwise(entry: dict[str, Any], allocation: str) -> None:
    (lorc,) = manifest({"method": "lorc", "cache_keep": 0.5, **entry}).methods
    assert isinstance(lorc, LoRC)
    assert lorc.allocation == allocation
