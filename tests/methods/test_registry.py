"""Claims, and ranks that meet budgets: over geometries, options and several entries."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.schema import Manifest
from pipeline.families.geometry import Geometry
from pipeline.methods.method import Moment, Scores, Task
from pipeline.methods.registry import (
    allocate_ranks,
    build_methods,
    claim_tasks,
    layer_importance,
    tasks_by_layer,
)
from tests.families.geometries import SIZES, llama, manifest, other

pytestmark = pytest.mark.sample(3)

LLAMA2_7B = llama(
    "mha",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
)
FLAT = {layer: 0.2 for layer in range(32)}


def stored(job: Manifest, geometry: Geometry, ranks: dict[str, dict[str, int]]) -> float:
    """Numbers stored in the budget's scope at these ranks."""
    methods = build_methods(job)
    total = float(geometry.scope_numbers(job.budget.scope if job.budget else "decoder"))
    for position, method in enumerate(methods):
        total -= sum(geometry.layers[group.layer].numbers(group.roles) for group in method.claims(geometry))
        for variable in method.rank_variables(geometry):
            total += variable.cost(ranks[f"{variable.layer}/{position}/{variable.group}"][variable.name])
    return total


def allocate(
    job: Manifest, geometry: Geometry, importance: dict[int, float] | None = None
) -> dict[str, dict[str, int]]:
    return allocate_ranks(job, build_methods(job), geometry, Scores(importance or FLAT))


def assert_fits(
    job: Manifest, geometry: Geometry, ranks: dict[str, dict[str, int]], share: float | None = None
) -> None:
    """Never above the target, and no step of any variable that shares the budget would fit."""
    assert job.budget is not None
    target = job.budget.keep * geometry.scope_numbers(job.budget.scope)
    found = stored(job, geometry, ranks)
    assert found <= target * (1 + 1e-11)
    steps = []
    for position, method in enumerate(build_methods(job)):
        if method.entry.keep is not None or method.fixed_ranks:
            continue
        for variable in method.rank_variables(geometry):
            rank = ranks[f"{variable.layer}/{position}/{variable.group}"][variable.name]
            assert 1 <= rank <= variable.cap
            assert rank == variable.cap or rank % variable.multiple == 0
            above = variable.above(rank)
            if above is not None:
                steps.append(variable.cost(above) - variable.cost(rank))
    if steps:
        assert target - found < min(steps) + 1, "another step would have fitted"
    if share is not None:
        assert found >= target * (1 - share)


# Claims ---------------------------------------------------------------------------------------------------------------


def test_tasks_are_by_layer() -> None:
    job = manifest({"layers": [0, 2], "query_key": "head_pca"}, {"layers": [1], "mlp": False})
    tasks = claim_tasks(build_methods(job), llama())
    assert [(task.layer, task.method, task.name) for task in tasks] == [
        (0, 0, "attention"), (0, 0, "mlp"), (0, 0, "query_key"), (1, 1, "attention"),
        (2, 0, "attention"), (2, 0, "mlp"), (2, 0, "query_key"),
    ]  # fmt: skip
    assert [task.key for task in tasks][3] == "1/1/attention"
    assert tasks[0].roles == ("v", "o")
    assert tasks[1].roles == ("gate", "up", "down")
    assert tasks[2].roles == ("q", "k")


@pytest.mark.parametrize("model_type", ["opt", "gptj"])
def test_an_mlp_without_gate(model_type: str) -> None:
    (task, *_) = claim_tasks(build_methods(manifest({"attention": False})), other(model_type))
    assert task.roles == ("up", "down")


def test_a_tensor_claimed_twice_names_both() -> None:
    job = manifest({"attention": False}, {"layers": "last:2", "mlp": True, "attention": False})
    with pytest.raises(InputError) as raised:
        claim_tasks(build_methods(job), llama())
    assert str(raised.value) == (
        "layer 4: gate is claimed by methods.0 (flat_llm, mlp) and by methods.1 (flat_llm, mlp); "
        "a tensor is claimed once"
    )


def test_disjoint_claims_of_one_layer() -> None:
    job = manifest({"attention": False}, {"mlp": False})
    assert len(claim_tasks(build_methods(job), llama())) == 12


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"layers": [0, 6]}, "methods.0 (flat_llm): layers: [0, 6]; the model has layers 0 to 5"),
        ({"layers": "last:7"}, "layers: last:7 asks for 7 of 6"),
        ({"ranks": {"value": 17}}, "ranks.value: 17 is above the full rank 16"),
        ({"ranks": {"mlp": 81}}, "ranks.mlp: 81 is above the full rank 80"),
        ({"ranks": {"query_key": 4}}, "ranks.query_key: 4 is given, but this entry does not compress it"),
        ({"mlp": False, "ranks": {"value": 4, "mlp": 3}}, "ranks.mlp: 3 is given"),
    ],
)
def test_impossible_claims_are_wrong_input(entry: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        claim_tasks(build_methods(manifest(entry)), llama())


def test_moments_of_a_layer_are_each_taken_once() -> None:
    job = manifest({"query_key": "head_pca"})
    tasks = claim_tasks(build_methods(job), llama())
    assert tasks_by_layer(tasks)[0].moments == (
        Moment("down.in"), Moment("k.out", 2, 2), Moment("o.in", 4, 2), Moment("q.out", 4, 4),
    )  # fmt: skip
    assert 6 not in tasks_by_layer(tasks)
    twice = (Task(0, "a", ("v",), (Moment("q.in"),), method=0),) * 2
    assert tasks_by_layer(twice)[0].moments == (Moment("q.in"),)
    by_value = claim_tasks(build_methods(manifest({"basis": "value", "mlp": False})), llama())
    assert tasks_by_layer(by_value)[0].moments == (Moment("v.out", 2, 2),)


# Budgets --------------------------------------------------------------------------------------------------------------

ENTRIES: dict[str, tuple[dict[str, Any], ...]] = {
    "default": ({},),
    "uniform": ({"allocation": "uniform"},),
    "attention": ({"mlp": False},),
    "mlp": ({"attention": False},),
    "all": ({"query_key": "head_pca"},),
    "query-key": ({"attention": False, "mlp": False, "query_key": "head_pca"},),
    "multiples": ({"rank_multiple": 4, "query_key": "head_pca"},),
    "last-half": ({"layers": "last:0.5"},),
    "two-entries": ({"layers": [0, 1, 2]}, {"layers": [3, 4, 5], "allocation": "uniform", "query_key": "head_pca"}),
    "split-roles": ({"attention": False, "rank_multiple": 8}, {"mlp": False, "allocation": "uniform"}),
    "one-fixed": ({"layers": [0, 1], "ranks": {"value": 5, "mlp": 33}}, {"layers": [2, 3, 4, 5]}),
    "one-own": ({"layers": [0, 1], "keep": 0.9}, {"layers": [2, 3, 4, 5]}),
}
UNEVEN = {0: 0.31, 1: 0.05, 2: 0.18, 3: 0.0, 4: 0.22, 5: 0.45}


@pytest.mark.parametrize("size", [*SIZES, "opt", "gptj", "qwen2", "qwen3"])
@pytest.mark.parametrize("entries", list(ENTRIES))
def test_budgets_are_met(size: str, entries: str) -> None:
    geometry = llama(size) if size in SIZES else other(size)
    for keep, scope, importance in (
        (0.97, "decoder", UNEVEN), (0.9, "decoder", FLAT), (0.8, "decoder", UNEVEN), (0.65, "decoder", FLAT),
        (0.5, "decoder", UNEVEN), (0.85, "model", UNEVEN), (0.6, "model", FLAT),
    ):  # fmt: skip
        job = manifest(*ENTRIES[entries], keep=keep, scope=scope)
        try:
            ranks = allocate(job, geometry, dict(importance))
        except InputError:
            assert keep < 0.97, "only small budgets are out of reach; the tests below hold the message to its word"
            continue
        assert_fits(job, geometry, ranks)


def test_keep_1_keeps_everything() -> None:
    ranks = allocate(manifest({"query_key": "head_pca"}, keep=1.0), llama())
    assert ranks["0/0/attention"] == {"value": 16}
    assert ranks["0/0/mlp"] == {"mlp": 80}
    assert ranks["0/0/query_key"] == {"query_key": 16}


@pytest.mark.parametrize(("keep", "ratio"), [(0.9, 0.88), (0.8, 0.76), (0.7, 0.64), (0.6, 0.52), (0.5, 0.40)])
def test_llama_2_7b_as_in_methods(keep: float, ratio: float) -> None:
    """docs/methods.md#budget: the untouched query and key count."""
    job = manifest({"allocation": "uniform", "rank_multiple": 1}, keep=keep)
    ranks = allocate(job, LLAMA2_7B)
    values = [ranks[f"{layer}/0/attention"]["value"] / 128 for layer in range(32)]
    widths = [ranks[f"{layer}/0/mlp"]["mlp"] / 11008 for layer in range(32)]
    assert sum(values) / 32 == pytest.approx(ratio, abs=0.008)
    assert sum(widths) / 32 == pytest.approx(ratio, abs=0.008)
    assert_fits(job, LLAMA2_7B, ranks, share=1e-3)
    assert (stored(job, LLAMA2_7B, ranks) - 32 * LLAMA2_7B.layers[0].numbers(("q", "k", "input_norm", "mlp_norm"))) / (
        32 * LLAMA2_7B.layers[0].numbers(("v", "o", "gate", "up", "down"))
    ) == pytest.approx(ratio, abs=2e-3)


@pytest.mark.parametrize("multiple", [1, 8, 64])
def test_llama_2_7b_by_importance(multiple: int) -> None:
    importance = {layer: 0.35 if layer in (0, 31) else 0.05 + 0.1 * abs(layer - 16) / 16 for layer in range(32)}
    job = manifest({"rank_multiple": multiple}, keep=0.8)
    ranks = allocate(job, LLAMA2_7B, importance)
    assert_fits(job, LLAMA2_7B, ranks, share=1e-3)
    widths = {layer: ranks[f"{layer}/0/mlp"]["mlp"] for layer in range(32)}
    assert min(widths[0], widths[31]) >= 11008 - multiple  # clipped at the full width, then adjusted
    assert widths[16] == min(widths.values())
    order = sorted(range(1, 31), key=lambda layer: importance[layer])
    assert all(widths[a] <= widths[b] + 64 for a, b in itertools.pairwise(order))


def test_one_common_ratio_over_entries() -> None:
    """Two entries that split the layers get what one entry over all of them gets."""
    whole = allocate(manifest({"allocation": "uniform"}, keep=0.8), LLAMA2_7B)
    parts = allocate(
        manifest(
            {"allocation": "uniform", "layers": list(range(16))},
            {"allocation": "uniform", "layers": "last:16"},
            keep=0.8,
        ),
        LLAMA2_7B,
    )
    for layer in range(32):
        for group, name in (("attention", "value"), ("mlp", "mlp")):
            one, other_part = whole[f"{layer}/0/{group}"][name], parts[f"{layer}/{layer // 16}/{group}"][name]
            assert abs(one - other_part) <= 1


def test_a_fixed_entry_leaves_the_rest_to_the_others() -> None:
    job = manifest({"layers": [0], "ranks": {"value": 4}}, {"layers": [1, 2, 3, 4, 5]}, keep=0.8)
    ranks = allocate(job, llama())
    assert ranks["0/0/attention"] == {"value": 4}
    assert ranks["0/0/mlp"] == {"mlp": 80}  # not said: the full width
    assert_fits(job, llama(), ranks)


def test_an_entry_s_own_keep_is_of_what_it_claims() -> None:
    geometry = llama()
    job = manifest({"layers": [0], "keep": 0.5}, {"layers": [1, 2, 3, 4, 5], "ranks": {"mlp": 40, "value": 8}})
    ranks = allocate(job, geometry)
    (first, second) = build_methods(job)
    numbers = sum(
        variable.cost(ranks[f"0/0/{variable.group}"][variable.name]) for variable in first.rank_variables(geometry)
    )
    dense = sum(geometry.layers[group.layer].numbers(group.roles) for group in first.claims(geometry))
    assert 0.5 * dense - 144 < numbers <= 0.5 * dense
    assert {variable.name for variable in second.rank_variables(geometry)} == {"value", "mlp"}
    assert {ranks[f"{layer}/1/mlp"]["mlp"] for layer in range(1, 6)} == {40}


def test_ranks_do_not_hang_on_the_order_of_importance() -> None:
    shuffled = dict(reversed(list(UNEVEN.items())))
    job = manifest(keep=0.8)
    assert allocate(job, llama(), dict(UNEVEN)) == allocate(job, llama(), shuffled)


def test_no_budget_at_all() -> None:
    with pytest.raises(
        InputError, match=r"budget: missing; give budget\.keep \(in a sweep: keep\), or `keep` or `ranks`"
    ):
        allocate(manifest(), llama())
    assert allocate(manifest({"ranks": {"value": 3}}), llama())["2/0/attention"] == {"value": 3}


# Budgets out of reach -------------------------------------------------------------------------------------------------

REACH = re.compile(r"^(?P<field>[\w.]+): .*reachable is (?P<low>[\d.]+) to 1$", re.DOTALL)
OUT_OF_REACH: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    **{name: (entries, "budget.keep") for name, entries in ENTRIES.items()},
    "own": (({"layers": [1], "keep": 0.01}, {"layers": [2], "ranks": {"value": 1}}), "methods.0.keep"),
    "own-multiple": (({"keep": 0.01, "rank_multiple": 16, "query_key": "head_pca"},), "methods.0.keep"),
}


@pytest.mark.parametrize("scope", ["decoder", "model"])
@pytest.mark.parametrize("size", ["gqa", "biased"])
@pytest.mark.parametrize("name", list(OUT_OF_REACH))
def test_the_range_that_is_said_to_be_reachable_is(name: str, size: str, scope: str) -> None:
    entries, field = OUT_OF_REACH[name]
    geometry = llama(size)

    def with_keep(keep: float) -> Manifest:
        if field == "budget.keep":
            return manifest(*entries, keep=keep, scope=scope)
        return manifest({**entries[0], "keep": keep}, *entries[1:], keep=1.0, scope=scope)

    with pytest.raises(InputError) as raised:
        allocate(with_keep(0.001), geometry)
    found = REACH.match(str(raised.value))
    assert found, str(raised.value)
    assert found["field"] == field
    low = float(found["low"])
    for keep in (low, min(1.0, low + 0.001), 1.0):
        ranks = allocate(with_keep(keep), geometry)
        if field == "budget.keep":
            assert_fits(with_keep(keep), geometry, ranks)
    # It is the true end, not merely a safe one.
    with pytest.raises(InputError):
        allocate(with_keep(low - 0.002), geometry)


def test_what_is_out_of_reach_is_told_with_its_numbers() -> None:
    with pytest.raises(InputError) as raised:
        allocate(manifest({"mlp": False}, keep=0.3), llama())
    message = str(raised.value)
    assert "budget.keep: 0.3 leaves 0 numbers" in message
    assert "take at least 1,728 (27,648 dense)" in message
    assert "claim more tensors or keep more" in message


def test_importance_of_layers() -> None:
    assert layer_importance([1.0, 0.0, -1.0]) == {0: 0.0, 1: 0.5, 2: 1.0}
