"""budget.multiple: the ranks that a budget chooses are multiples of it, in every method, and the budget holds."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.errors import InputError
from manifests.method_entry import WIDE
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.methods.lestd_sizes import ProblemShape, Rule, choices
from pipeline.methods.loss_aware.shapes import Shape
from pipeline.methods.method import Scores
from pipeline.methods.registry import allocate_ranks, build_methods, claim_tasks
from pipeline.ranks.curves import from_columns
from tests.families.geometries import llama, manifest, other
from tests.methods.loss_aware_weights import make_statistics, make_weights
from tests.methods.test_registry import LLAMA2_7B, stored

BY_RATIO: dict[str, dict[str, Any]] = {
    "flat_llm": {"method": "flat_llm", "query_key": "head_pca"},
    "flat_llm-uniform": {"method": "flat_llm", "allocation": "uniform"},
    "joint_rank_k": {"method": "joint_rank_k"},
    "joint_rank_k-separate": {"method": "joint_rank_k", "query_key": "separate", "mlp": "separate"},
    "lorc": {"method": "lorc"},
}


def budgeted(*entries: dict[str, Any], **budget: Any) -> Manifest:
    return manifest(*entries, budget=budget or None, calibration={"text": {"files": ["a.txt"]}})


def chosen(job: Manifest, geometry: Geometry) -> dict[str, dict[str, int]]:
    scores = Scores(importance={layer: 0.1 + 0.01 * layer for layer in range(geometry.num_layers)})
    return allocate_ranks(job, build_methods(job), geometry, scores)


def ranks_and_caps(job: Manifest, geometry: Geometry) -> list[tuple[int, int]]:
    ranks = chosen(job, geometry)
    return [
        (ranks[f"{variable.layer}/{position}/{variable.group}"][variable.name], variable.cap)
        for position, method in enumerate(build_methods(job))
        for variable in method.rank_variables(geometry)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BY_RATIO)
@pytest.mark.parametrize(("multiple", "keep"), [(32, 0.8), (64, 0.7)])
def test_ranks_are_multiples_and_the_budget_holds(name: str, multiple: int, keep: float) -> None:
    job = budgeted(BY_RATIO[name], keep=keep if name != "lorc" else 0.9, multiple=multiple)
    pairs = ranks_and_caps(job, LLAMA2_7B)
    assert all(rank % multiple == 0 or rank == cap for rank, cap in pairs)
    assert any(rank % multiple == 0 and rank < cap for rank, cap in pairs)
    assert job.budget is not None
    target = job.budget.share * LLAMA2_7B.scope_numbers("decoder")
    found = stored(job, LLAMA2_7B, chosen(job, LLAMA2_7B))
    steps = [
        variable.cost(above) - variable.cost(rank)
        for method in build_methods(job)
        for variable, (rank, _) in zip(method.rank_variables(LLAMA2_7B), pairs, strict=True)
        if (above := variable.above(rank)) is not None
    ]
    assert found <= target < found + min(steps) + 1, "exact: not one step more would fit"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BY_RATIO)
def test_wide_models_have_multiples_of_16_unless_told_otherwise(name: str) -> None:
    assert LLAMA2_7B.hidden >= WIDE > llama().hidden
    wide = ranks_and_caps(budgeted(BY_RATIO[name], keep=0.8 if name != "lorc" else 0.9), LLAMA2_7B)
    assert all(rank % 16 == 0 or rank == cap for rank, cap in wide)
    exact = ranks_and_caps(budgeted(BY_RATIO[name], keep=0.8 if name != "lorc" else 0.9, multiple=1), LLAMA2_7B)
    assert any(rank % 16 for rank, cap in exact if rank < cap)
    (method,) = build_methods(budgeted(BY_RATIO[name], keep=0.8))
    assert {variable.multiple for variable in method.rank_variables(llama())} == {1}


def test_an_entry_s_rank_multiple_goes_before_the_budget_s() -> None:
    first, second = {"layers": [0], "rank_multiple": 4}, {"layers": "last:5"}
    job = budgeted({"method": "flat_llm", **first}, {"method": "flat_llm", **second}, keep=0.8, multiple=8)
    one, other = build_methods(job)
    assert {variable.multiple for variable in one.rank_variables(llama())} == {4}
    assert {variable.multiple for variable in other.rank_variables(llama())} == {8}


@pytest.mark.parametrize(("shapes", "decides"), [("free", 1), ("layer", None), ("stock", None)])
def test_a_default_multiple_of_experts_is_no_number_of_the_model(shapes: str, decides: int | None) -> None:
    """Widths of one shape have another default than other ranks, so that it is another job than the same number."""
    document = {"method": "loss_aware", "shapes": shapes}
    (usual,), (given,) = (budgeted(entry, keep=0.8).methods for entry in (document, {**document, "rank_multiple": 8}))
    assert usual.deciding_multiple(64) == decides
    assert given.deciding_multiple(64) == 8


@pytest.mark.parametrize(("bits", "multiple"), [(16, 8), (32, 4)])
def test_rows_of_one_shape_are_multiples_of_16_bytes(bits: int, multiple: int) -> None:
    geometry = other("qwen3_moe", bits)  # experts of 24 channels
    job = budgeted({"method": "loss_aware", "shapes": "stock"}, keep=0.8)
    (method,) = build_methods(job)
    (group,) = method.groups(geometry.layers[0])
    assert isinstance(group, Shape)
    assert group.widths == [*range(multiple, 25, multiple)]


@pytest.mark.parametrize(("scope", "padding"), [("decoder", 1), ("experts", 0)])
def test_padding_of_the_shared_expert_is_no_number_of_routed_ones(scope: str, padding: int) -> None:
    """An export of 16 of 24 channels pads a shared expert of 24 to two of 16: 8 channels of three rows of 48."""
    layer = other("deepseek_v3").layers[1]
    (method,) = build_methods(budgeted({"method": "loss_aware", "shapes": "stock"}, keep=0.8, scope=scope))
    group = next(group for group in method.groups(layer) if group.name == "experts")
    assert isinstance(group, Shape)
    assert group.counted_numbers(6, 16) - group.numbers(6, 16) == padding * 8 * 3 * 48


@pytest.mark.parametrize("allocation", ["uniform", "progressive"])
@pytest.mark.parametrize(("share", "multiple"), [(0.5, 64), (0.3, 64), (0.61, 32), (0.9, 16)])
def test_a_share_of_the_cache_in_multiples(allocation: str, share: float, multiple: int) -> None:
    """Latents that a quantised cache can group: never more than the share together, and within a step of it."""
    entry = {"method": "lorc", "cache_keep": share, "allocation": allocation}
    job = budgeted(entry, multiple=multiple)
    methods = build_methods(job)
    measured = {f"{layer}/0/condition": {"log_condition": [1.0 + layer, 2.0]} for layer in range(32)}
    ranks = allocate_ranks(job, methods, LLAMA2_7B, Scores(measured=measured))
    cached = [rank for found in ranks.values() for rank in found.values()]
    assert all(rank % multiple == 0 for rank in cached)
    wanted = share * 4096 * len(cached)
    assert wanted - multiple < sum(cached) <= wanted


def test_a_share_of_the_cache_below_one_step_is_refused() -> None:
    job = budgeted({"method": "lorc", "cache_keep": 0.01}, multiple=64)
    with pytest.raises(InputError, match=r"cache_keep: 0\.01 of 4096 cached numbers is less than .* 64; give at least"):
        claim_tasks(build_methods(job), LLAMA2_7B)


def test_a_budget_may_give_the_multiple_alone() -> None:
    job = budgeted({"method": "flat_llm", "keep": 0.5}, multiple=8)
    assert all(rank % 8 == 0 or rank == cap for rank, cap in ranks_and_caps(job, llama()))
    with pytest.raises(InputError, match=r"budget: missing; give budget\.keep"):
        chosen(budgeted({"method": "flat_llm"}, multiple=8), llama())


def test_tucker_ranks_are_multiples() -> None:
    shape = ProblemShape(96, 40, ((4, 3),), 16)
    for prune, whole in ((True, True), (False, True)):
        rule = Rule(None, prune=prune, whole=whole, search_width=True, multiple=16)
        for size in range(rule.least(shape), shape.dense, shape.dense // 40):
            found = [choice.ranks for choice in choices(shape, rule, size)]
            assert found
            assert all(first % 16 == 0 for first, _, _ in found)
            assert all(second % 16 == 0 or second == 40 for _, second, _ in found)


def test_a_tucker_core_wants_no_more_than_its_multiples_allow() -> None:
    """With a multiple the least size is that of one multiple, and it is what a size below it is raised to."""
    shape = ProblemShape(96, 40, ((4, 3),), 16)
    fine, coarse = (Rule(None, True, True, True, multiple) for multiple in (1, 16))
    assert fine.least(shape) < coarse.least(shape)
    assert {choice.ranks[0] for choice in choices(shape, coarse, 1)} == {16}


@pytest.mark.parametrize("part", ["query_key", "attention", "mlp"])
def test_every_point_of_loss_aware_is_at_multiples(part: str) -> None:
    where = llama("gqa")
    (method,) = build_methods(budgeted({"method": "loss_aware"}, keep=0.8, multiple=4))
    group = next(group for group in method.claims(where) if group.name == part)
    statistics, weights = make_statistics(where, group), make_weights(where, group.roles)
    points = from_columns(group.with_data(weights, statistics).curve())
    whole = {where.hidden, where.layers[0].attention.head_dim, where.layers[0].mlps[0].width}
    found = {rank for point in points for rank in point.ranks.values()}
    assert all(rank % 4 == 0 or rank in whole for rank in found)
    assert any(rank % 4 == 0 and rank not in whole for rank in found)
