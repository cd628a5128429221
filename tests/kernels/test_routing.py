"""Routing against plain loops: groups, biases, ties, experts left out, and what the removal of one costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipeline.kernels.routing import RoutingRule, add_change_, removal_sums, removals, route

RULES = {
    "mixtral": RoutingRule("softmax", 2),
    "plain": RoutingRule("softmax", 3, normalise=False),
    "one": RoutingRule("sigmoid", 1),
    "groups": RoutingRule("sigmoid", 3, scale=2.5, groups=4, top_groups=2),
    "best-of-group": RoutingRule("softmax", 2, normalise=False, scale=16.0, groups=3, top_groups=2, group_members=1),
    "all": RoutingRule("softmax", 12),
}
EXPERTS = 12


def make_logits(tokens: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, EXPERTS, generator=source, dtype=torch.float64)
    return logits_TE, 0.1 * torch.randn(EXPERTS, generator=source, dtype=torch.float64)


def plain_weights(logits: list[float], bias: list[float], rule: RoutingRule, absent: set[int]) -> list[float]:
    """Weights of one token's experts by sorting, without tensors."""
    if rule.scores == "softmax":
        total = sum(math.exp(logit) for e, logit in enumerate(logits) if e not in absent)
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    choice = {e: score + bias[e] for e, score in enumerate(scores) if e not in absent}
    width = len(logits) // rule.groups
    if rule.groups > 1:
        groups = [sorted((choice[e] for e in choice if e // width == g), reverse=True) for g in range(rule.groups)]
        by_group = [
            sum(group[: rule.group_members]) if len(group) >= rule.group_members else -math.inf for group in groups
        ]
        best = sorted(range(rule.groups), key=lambda g: -by_group[g])[: rule.top_groups]
        choice = {e: value for e, value in choice.items() if e // width in best}
    chosen = sorted(choice, key=lambda e: -choice[e])[: rule.top_k]
    total = sum(scores[e] for e in chosen) if rule.normalise else 1.0
    return [rule.scale * scores[e] / total if e in chosen else 0.0 for e in range(len(logits))]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", list(RULES))
def test_weights_are_those_of_a_loop(name: str, biased: bool) -> None:
    (logits_TE, bias_E), rule = make_logits(), RULES[name]
    before = logits_TE.clone()
    routing = route(logits_TE, rule, bias_E if biased else None)
    bias = bias_E.tolist() if biased else [0.0] * EXPERTS
    expected = torch.tensor([plain_weights(row, bias, rule, set()) for row in logits_TE.tolist()], dtype=torch.float64)
    torch.testing.assert_close(routing.dense(EXPERTS), expected)
    assert torch.equal(logits_TE, before)


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    routing = route(torch.zeros(3, 8), RoutingRule("softmax", 2, groups=4, top_groups=1))
    assert routing.experts.tolist() == [[0, 1]] * 3
    assert routing.weights.tolist() == [[0.5, 0.5]] * 3


def test_where_too_few_are_left_the_others_weigh_nothing() -> None:
    absent_E = torch.ones(EXPERTS, dtype=torch.bool).index_fill_(0, torch.tensor([5]), False)
    weights_TE = route(make_logits()[0], RoutingRule("softmax", 2), absent=absent_E).dense(EXPERTS)
    torch.testing.assert_close(weights_TE[:, 5], torch.ones(40, dtype=torch.float64))
    assert float(weights_TE.sum()) == pytest.approx(40.0)


@pytest.mark.parametrize("name", [name for name in RULES if name != "all"])
def test_a_removal_costs_what_the_output_changes(name: str) -> None:
    rule, (logits_TE, bias_E) = RULES[name], make_logits(tokens=9)
    source = torch.Generator().manual_seed(1)
    outputs_TED = torch.randn(9, EXPERTS, 5, generator=source, dtype=torch.float64)
    root_DD = torch.randn(5, 5, generator=source, dtype=torch.float64)
    found = removals(logits_TE, rule, bias_E)
    changes_Tkq = torch.zeros(*found.experts.shape, 5, dtype=torch.float64)
    for expert in range(EXPERTS):
        add_change_(changes_Tkq, found.changes[:, :, expert], outputs_TED[:, expert] @ root_DD)
    sums_E = removal_sums(found.experts, changes_Tkq, EXPERTS)
    bias, metric_DD, expected = bias_E.tolist(), root_DD @ root_DD.T, torch.zeros(EXPERTS, dtype=torch.float64)
    for token, row in enumerate(logits_TE.tolist()):
        before = plain_weights(row, bias, rule, set())
        for expert in (e for e in range(EXPERTS) if before[e]):
            after = plain_weights(row, bias, rule, {expert})
            change = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
            delta_D = change @ outputs_TED[token]
            expected[expert] += 0.5 * delta_D @ metric_DD @ delta_D
    torch.testing.assert_close(sums_E, expected)


def test_an_expert_that_no_token_chooses_costs_nothing() -> None:
    logits_TE = make_logits()[0]
    logits_TE[:, 3] = -50.0
    found = removals(logits_TE, RULES["mixtral"])
    assert not (found.experts == 3).any()
    sums_E = removal_sums(found.experts, torch.ones(40, 2, 1), EXPERTS)
    assert float(sums_E[3]) == 0.0
    assert float(sums_E.sum()) == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("logits_TE", "rule", "reason"),
    [
        (torch.zeros(3, 2), RoutingRule("softmax", 3), "suffice"),
        (torch.zeros(3, 9), RoutingRule("softmax", 3, groups=2), "divide"),
        (torch.full((3, 9), math.nan), RoutingRule("softmax", 3), "NaN"),
    ],
)
def test_wrong_logits_are_refused(logits_TE: Tensor, rule: RoutingRule, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        route(logits_TE, rule)


def test_wrong_rules_and_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot choose"):
        RoutingRule("softmax", 2, groups=2, top_groups=3)
    with pytest.raises(ValueError, match="bias"):
        route(torch.zeros(3, 9), RoutingRule("softmax", 2), torch.zeros(8))
