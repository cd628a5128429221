"""Several sizes of a group, solved one after another from what they share: the bytes of each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from manifests.methods import ASVD, SVD, SVDLLM, LossAware
from pipeline.methods.base import Group
from pipeline.methods.loss_aware.method import LossAwareMethod
from pipeline.methods.method import Moment, Ranks, Statistics
from pipeline.methods.separate import ASVDMethod, SVDLLMMethod, SVDMethod
from pipeline.ranks.curves import from_columns
from tests.families.geometries import llama
from tests.methods.loss_aware_weights import make_statistics, make_weights
from workers.solving import GroupProblem, NamedSolution, solve_group, solve_sizes

WHERE = llama("gqa")
METHODS = {
    "svd": SVDMethod(SVD(method="svd")),
    "asvd": ASVDMethod(ASVD(method="asvd")),
    "svd_llm": SVDLLMMethod(SVDLLM(method="svd_llm")),
    "loss_aware": LossAwareMethod(LossAware(method="loss_aware")),
}


def sizes_of(method: Any, group: Group[Any], weights: dict[str, torch.Tensor], statistics: Statistics) -> list[Ranks]:
    """From large to small, and one of them twice."""
    if method.name == "loss_aware":
        points = from_columns(group.with_data(weights, statistics).curve())
        ranks: list[Ranks] = [point.ranks for point in reversed(points)]
        return [*ranks[:: max(1, len(ranks) // 6)], ranks[1]]
    return [dict.fromkeys(group.roles, rank) for rank in (9, 5, 3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_each_has_the_bytes_that_it_has_alone(name: str) -> None:
    method = METHODS[name]
    for group in (group for group in method.claims(WHERE) if group.layer == 0):
        weights, statistics = make_weights(WHERE, group.roles), make_statistics(WHERE, group)
        sizes = sizes_of(method, group, weights, statistics)
        problem = GroupProblem(group.with_data(weights, statistics))
        alone = [solve_group(problem, ranks) for ranks in sizes]
        shared = solve_sizes(problem, sizes)
        for expected, found in zip(alone, shared, strict=True):
            assert same(found, expected)


def same(found: NamedSolution, expected: NamedSolution) -> bool:
    """Tensors, forms and figures, to the bit."""
    (factors, solution, _), (others, other, _) = found, expected
    tensors = factors.keys() == others.keys() and all(torch.equal(factors[name], others[name]) for name in others)
    return tensors and (solution.forms, solution.report) == (other.forms, other.report)


def test_a_group_whose_inputs_no_token_reached_stays_dense() -> None:
    method = METHODS["loss_aware"]
    group = next(group for group in method.claims(WHERE) if group.name == "mlp")
    weights, statistics = make_weights(WHERE, group.roles), make_statistics(WHERE, group)
    (ranks, *_) = sizes_of(method, group, weights, statistics)[2:]
    unseen = replace(statistics, passed={Moment("down.in"): 0})
    problem = GroupProblem(group.with_data(weights, unseen))
    alone = solve_group(problem, ranks)
    (shared,) = solve_sizes(problem, [ranks])
    for factors, solution, _ in (alone, shared):
        assert (solution.forms, solution.report) == ({}, {"unseen": ["down.in"]})
        names = {WHERE.layers[0].tensor_name(key, group.roles): weight for key, weight in weights.items()}
        assert factors.keys() == names.keys()
        assert all(torch.equal(factors[name], weight) for name, weight in names.items())
