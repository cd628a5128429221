"""`uniform: true`: one rank for all layers of a group, and the budget still holds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from manifests.errors import InputError
from pipeline.methods.method import Scores
from pipeline.methods.registry import allocate_ranks, build_methods
from pipeline.methods.registry import predict_tasks as predicted
from pipeline.ranks.curves import Point, choose, from_columns, predicted_loss, summed, to_columns
from tests.families.geometries import llama
from tests.methods.test_multiples import budgeted
from tests.methods.test_registry import LLAMA2_7B, stored


@pytest.mark.parametrize("keep", [0.9, 0.75, 0.6])
@pytest.mark.parametrize("entry", [{}, {"allocation": "uniform", "query_key": "head_pca"}, {"mlp": False}])
def test_one_rank_for_all_layers(keep: float, entry: dict[str, Any]) -> None:
    keep = keep if entry != {"mlp": False} else 1 - (1 - keep) / 4
    job = budgeted({"method": "flat_llm", "uniform": True, **entry}, keep=keep)
    (method,) = build_methods(job)
    assert method.scores == frozenset()
    ranks = allocate_ranks(job, (method,), LLAMA2_7B, Scores())
    by_group: dict[str, set[int]] = {}
    steps: dict[str, float] = {}
    for variable in method.rank_variables(LLAMA2_7B):
        rank = ranks[f"{variable.layer}/0/{variable.group}"][variable.name]
        by_group.setdefault(variable.name, set()).add(rank)
        if (above := variable.above(rank)) is not None:
            step = variable.cost(above) - variable.cost(rank)
            steps[variable.name] = steps.get(variable.name, 0.0) + step
    assert all(len(found) == 1 for found in by_group.values()), by_group
    found, target = stored(job, LLAMA2_7B, ranks), keep * LLAMA2_7B.scope_numbers("decoder")
    assert found <= target < found + min(steps.values()) + 1


@pytest.mark.slow
def test_by_loss_it_is_the_best_common_rank() -> None:
    """Against every common pair of ranks that fits."""
    where = llama()
    job = budgeted({"method": "flat_llm", "uniform": True, "allocation": "loss"}, keep=0.8)
    (method,) = methods = build_methods(job)
    curves = {}
    for task in predicted(methods, where):
        (variable,) = [v for v in method.rank_variables(where) if v.key[:2] == (task.layer, task.name)]
        hard = 1.0 + task.layer
        points = [
            Point({variable.name: rank}, round(variable.cost(rank)), hard * (1 - rank / variable.cap) ** 2)
            for rank in range(1, variable.cap + 1)
        ]
        curves[task.key] = to_columns(points)
    ranks = allocate_ranks(job, methods, where, Scores(curves=curves))
    values = {found["value"] for key, found in ranks.items() if key.endswith("attention")}
    widths = {found["mlp"] for key, found in ranks.items() if key.endswith("mlp")}
    assert len(values) == len(widths) == 1
    target = 0.8 * where.scope_numbers("decoder")
    assert stored(job, where, ranks) <= target
    best = min(
        predicted_loss(curves, pair)
        for value in range(1, where.layers[0].attention.head_dim + 1)
        for width in range(1, where.layers[0].mlps[0].width + 1)
        if stored(job, where, pair := _everywhere(ranks, value, width)) <= target
    )
    assert predicted_loss(curves, ranks) <= best * 1.02


def _everywhere(ranks: dict[str, dict[str, int]], value: int, width: int) -> dict[str, dict[str, int]]:
    return {key: {"value": value} if key.endswith("attention") else {"mlp": width} for key in ranks}


def test_curves_add_up_at_the_ranks_they_share() -> None:
    one = [Point({"r": 1}, 10, 3.0, 1), Point({"r": 2}, 20, 1.0, 2), Point({"r": 4}, 40, 0.0, 4)]
    other = [Point({"r": 1}, 11, 5.0, 1), Point({"r": 3}, 30, 2.0, 3), Point({"r": 4}, 44, 0.0, 4)]
    assert summed([one, other]) == [Point({"r": 1}, 21, 8.0, 2), Point({"r": 4}, 84, 0.0, 8)]
    assert choose({"all": summed([one, other])}, 50)["all"].ranks == {"r": 1}
    assert from_columns(to_columns(summed([one])))[0] == one[0]


@pytest.mark.parametrize("entry", [{"layers": "last:2"}, {"ranks": {"mlp": 9}}])
def test_what_uniform_does_not_go_with(entry: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=re.escape("uniform goes with layers: all, and with a budget")):
        budgeted({"method": "flat_llm", "uniform": True, **entry}, keep=0.8)
