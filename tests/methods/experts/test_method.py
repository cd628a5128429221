"""A layer's tensors as a mixture, and one shape for its experts as tensors and forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from manifests.methods import LossAware
from pipeline.families.registry import geometry_of, standard_config
from pipeline.kernels.routing import RoutingRule
from pipeline.methods.experts.method import Experts, sample_of
from pipeline.methods.experts.mixture import rule_of
from pipeline.methods.experts.removal import removal_losses
from pipeline.methods.loss_aware.shapes import ShapedExperts
from pipeline.methods.method import Statistics
from pipeline.methods.moments import OUTPUT_GRADIENT, factored_mean
from tests import factories
from tests.methods.experts.test_mixture import shape_loss, solved_experts

EXPERTS, WIDTH, TOKENS = 4, 6, 200
DEEPSEEK = {
    "score": "sigmoid",
    "renormalise": True,
    "scale": 2.5,
    "groups": 2,
    "top_groups": 1,
    "group_score": "top2",
    "top_k": 2,
    "weighs": "channels",
}


def make_group(groups: int) -> Experts[object]:
    """Return the experts of a layer, with weights and statistics."""
    sizes = {"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "n_group": groups, "topk_group": 1}
    config = factories.make_config("deepseek_v3", num_hidden_layers=2, **sizes)
    layer = geometry_of(standard_config(config.to_dict())).layers[1]
    (group,) = ShapedExperts(LossAware(method="loss_aware", shapes="layer", attention=False)).groups(layer)
    assert isinstance(group, Experts)
    source = torch.Generator().manual_seed(0)
    weights = {
        key: torch.randn(shape, generator=source, dtype=torch.float64) * (0.1 if "bias" in key else 1.0)
        for key, (_, shape) in layer.tensors(group.roles).items()
    }
    inputs_TD = torch.randn(TOKENS, layer.hidden, generator=source, dtype=torch.float64)
    root_DD = torch.randn(layer.hidden, layer.hidden, generator=source, dtype=torch.float64)
    moments = {sample_of(layer): inputs_TD[None], OUTPUT_GRADIENT: (root_DD @ root_DD.T)[None]}
    return group.with_data(weights, Statistics(moments, TOKENS))


@pytest.mark.parametrize(
    ("mixture", "rule"),
    [
        (DEEPSEEK, RoutingRule("sigmoid", 2, True, 2.5, 2, 1, 2)),
        ({**DEEPSEEK, "score": "softmax", "group_score": "max"}, RoutingRule("softmax", 2, True, 2.5, 2, 1, 1)),
        (
            {**DEEPSEEK, "renormalise": False, "weighs": "inputs"},
            RoutingRule("sigmoid", 2, False, 2.5, 2, 1, 2, weighs_inputs=True),
        ),
    ],
)
def test_the_rule_is_that_of_the_config(mixture: dict[str, object], rule: RoutingRule) -> None:
    assert rule_of(mixture) == rule


@pytest.mark.parametrize(("kept", "width"), [([0, 1, 2, 3], WIDTH), ([1, 3], WIDTH), ([0, 3], 4)])
def test_a_solution_has_the_experts_that_stay_and_their_rows(kept: list[int], width: int) -> None:
    group = make_group(groups=2)
    sample, weights = group.sample, group.weights
    before = {key: tensor.clone() for key, tensor in weights.items()}
    solution = group.keep(sample, kept, width, True, {"figure": 1})
    stays = {f"experts.{place}.{role}.weight" for place in range(len(kept)) for role in ("gate", "up", "down")}
    assert solution.tensors.keys() == stays | {"router.weight", "router_bias.e_score_correction_bias"}
    assert torch.equal(solution.tensors["router.weight"], weights["router.weight"][kept])
    forms = (0 if width == WIDTH else 3 * len(kept)) + (len(kept) < EXPERTS)
    assert len(solution.forms) == forms
    metric = factored_mean(group.statistics, OUTPUT_GRADIENT)
    solved = solved_experts(sample, metric, kept, width)
    for place, each in enumerate(solved):
        assert torch.equal(solution.tensors[f"experts.{place}.gate.weight"], each.weights.readers[0])
    expected = shape_loss(sample, metric, kept, solved)
    assert solution.report["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-18)
    assert (solution.report["experts"], solution.report["figure"]) == (kept, 1)
    assert all(torch.equal(weights[key], tensor) for key, tensor in before.items())


def test_experts_with_few_tokens_or_none_are_named() -> None:
    group = make_group(groups=1)
    bias_E = torch.tensor([5.0, 5.0, -5.0, 0.0])
    group = replace(group, weights={**group.weights, "router_bias.e_score_correction_bias": bias_E})
    losses_E = removal_losses(group.sample, factored_mean(group.statistics, OUTPUT_GRADIENT))
    assert max(losses_E[2:]) < min(losses_E[:2])
    report = group.keep(group.sample, range(EXPERTS), 4, True, {}).report
    assert report["unseen"] == ["experts.2", "experts.3"]
    assert report["few_tokens"] == {}
    few = {**group.statistics.moments, group.moments[0]: group.sample.inputs[None, :50]}
    group = replace(group, statistics=Statistics(few, 50))
    assert group.keep(group.sample, [0, 1, 2], 4, True, {}).report["few_tokens"] == {"experts.0": 50, "experts.1": 50}
