"""`reap`, `frequency` and `merge_experts`: what they claim, how many experts may stay, and which ones stay."""

from __future__ import annotations

import pytest
import torch

from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.experts.method import EXPERTS, sample_of
from pipeline.methods.experts.scores import SALIENCY_BY_EXPERT, TOKENS_BY_EXPERT
from pipeline.methods.method import Solution, Statistics
from pipeline.methods.registry import build_methods
from tests import factories
from tests.families.geometries import llama, manifest

GEOMETRY = geometry_of(standard_config(factories.make_config("mixtral", num_hidden_layers=2).to_dict()))
LAYER, TOKENS = GEOMETRY.layers[1], 120


def solve(entry: dict[str, object], count: int) -> Solution:
    """Solve layer 1, whose expert 0 has small weights, and whose router prefers the last experts."""
    (method,) = build_methods(manifest(entry))
    group = next(group for group in method.claims(GEOMETRY) if group.layer == 1)
    source = torch.Generator().manual_seed(3)
    weights = {
        key: torch.randn(shape, generator=source, dtype=torch.float64)
        for key, (_, shape) in LAYER.tensors(group.roles).items()
    }
    weights = {key: tensor * (1e-3 if key.startswith("experts.0.") else 1.0) for key, tensor in weights.items()}
    inputs_TD = torch.randn(TOKENS, LAYER.hidden, generator=source, dtype=torch.float64)
    inputs_TD[:, 0] = inputs_TD[:, 0].abs()
    experts = len(LAYER.experts)
    weights["router.weight"][:, 0] = torch.linspace(0.0, 3.0, experts, dtype=torch.float64)
    statistics = Statistics({sample_of(LAYER): inputs_TD[None]}, TOKENS)
    return group.with_data(weights, statistics).solve({EXPERTS: count})


def test_one_group_of_each_mixture_and_one_number_for_all() -> None:
    (method,) = build_methods(manifest({"method": "reap"}))
    assert [(group.layer, group.name) for group in method.claims(GEOMETRY)] == [(0, EXPERTS), (1, EXPERTS)]
    experts = len(LAYER.experts)
    assert {variable.cap for variable in method.rank_variables(GEOMETRY)} == {experts}
    assert set(method.target_ranks(GEOMETRY, 0.5, None).values()) == {0.5 * experts}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chosen layer has a mixture"):
        method.claims(llama())


@pytest.mark.parametrize(
    ("entry", "field"), [({"method": "reap"}, SALIENCY_BY_EXPERT), ({"method": "frequency"}, TOKENS_BY_EXPERT)]
)
def test_the_experts_of_highest_score_stay(entry: dict[str, object], field: str) -> None:
    experts = len(LAYER.experts)
    solution = solve(entry, experts - 1)
    scores = solution.report[field]
    gone = {*range(experts)} - {*solution.report["experts"]}
    assert gone == {scores.index(min(scores))}
    assert solution.tensors["router.weight"].shape == (experts - 1, LAYER.hidden)
    if field == SALIENCY_BY_EXPERT:
        assert gone == {0}, "its outputs are small"


@pytest.mark.parametrize("method", ["reap", "frequency", "merge_experts"])
def test_all_experts_are_the_dense_ones(method: str) -> None:
    assert solve({"method": method}, len(LAYER.experts)).report == {"dense": True}
