"""A layer's tensors as a mixture, and one shape for its experts as tensors and forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.kernels.routing import RoutingRule
from pipeline.methods.experts.removal import removal_losses
from pipeline.methods.experts.solutions import (
    metric_of,
    mixture_from,
    rule_of,
    sample_of,
    solve,
)
from pipeline.methods.method import Statistics
from pipeline.methods.moments import factored_mean
from tests.methods.experts.test_mixture import shape_loss, solved_experts

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 6, 8, 200
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


def make_block(expert: int) -> MLPBlock:
    name = f"experts.{expert}"
    readers = tuple(Matrix(f"{name}.{r}", WIDTH, HIDDEN, False, "mlp.in", f"{name}.down.in") for r in ("gate", "up"))
    writer = Matrix(f"{name}.down", HIDDEN, WIDTH, False, f"{name}.down.in", "out")
    return MLPBlock(name, readers, writer, WIDTH, "silu", f"{name}.weight")


BLOCKS = [make_block(expert) for expert in range(EXPERTS)]


def make_layer() -> tuple[dict[str, Tensor], Statistics]:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    weights = {matrix.weight_key: draw(*matrix.shape) for block in BLOCKS for matrix in block.matrices}
    weights |= {"router.weight": draw(EXPERTS, HIDDEN), "router_bias.e_score_correction_bias": 0.1 * draw(EXPERTS)}
    root_DD = draw(HIDDEN, HIDDEN)
    moments = {sample_of(BLOCKS, TOKENS): draw(1, TOKENS, HIDDEN), metric_of(BLOCKS): (root_DD @ root_DD.T)[None]}
    return weights, Statistics(moments, TOKENS)


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
    weights, statistics = make_layer()
    before = {key: tensor.clone() for key, tensor in weights.items()}
    mixture = mixture_from(BLOCKS, weights, rule_of(DEEPSEEK))
    solution = solve(BLOCKS, mixture, statistics, TOKENS, kept, width)
    stays = {f"experts.{number}.{role}.weight" for number in kept for role in ("gate", "up", "down")}
    assert solution.tensors.keys() == stays | {"router.weight", "router_bias"}
    assert torch.equal(solution.tensors["router.weight"], weights["router.weight"][kept])
    assert len(solution.forms) == (0 if width == WIDTH else 3 * len(kept))
    inputs_TD = statistics.moments[sample_of(BLOCKS, TOKENS)][0]
    metric = factored_mean(statistics, metric_of(BLOCKS))
    expected = shape_loss(mixture, inputs_TD, metric, kept, solved_experts(mixture, inputs_TD, metric, kept, width))
    assert solution.report["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-18)
    assert all(torch.equal(weights[key], tensor) for key, tensor in before.items())


def test_experts_with_few_tokens_or_none_are_named() -> None:
    weights, statistics = make_layer()
    weights["router_bias.e_score_correction_bias"] = torch.tensor([5.0, 5.0, -5.0, 0.0])
    mixture = mixture_from(BLOCKS, weights, RoutingRule("sigmoid", 2))
    inputs_TD = statistics.moments[sample_of(BLOCKS, TOKENS)][0]
    losses_E = removal_losses(mixture, inputs_TD, factored_mean(statistics, metric_of(BLOCKS)))
    assert max(losses_E[2:]) < min(losses_E[:2])
    report = solve(BLOCKS, mixture, statistics, TOKENS, range(EXPERTS), 4).report
    assert report["unseen"] == ["experts.2", "experts.3"]
    assert report["few_tokens"] == {}
    few = {sample_of(BLOCKS, 50): statistics.moments[sample_of(BLOCKS, TOKENS)][:, :50], **statistics.moments}
    report = solve(BLOCKS, mixture, Statistics(few, 50), 50, [0, 1, 2], 4).report
    assert report["few_tokens"] == {"experts.0": 50, "experts.1": 50}
