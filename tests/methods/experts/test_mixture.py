"""The experts of one layer, against loops over tokens in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.activation_lamina import Channels
from pipeline.kernels.refit import evenly_spread
from pipeline.kernels.routing import RoutingRule
from pipeline.kernels.sensitivity import Factored, factored
from pipeline.methods.experts.mixture import (
    ExpertWeights,
    Mixture,
    MixtureSample,
    SolvedExpert,
    change_loss,
    narrowed,
    solve_shape,
    weighted_moment,
    width_losses,
)
from pipeline.methods.experts.removal import remaining_shares, removal_losses
from pipeline.methods.experts.scores import kept_experts

TOKENS, HIDDEN, WIDTH, EXPERTS = 300, 8, 6, 5
RULES = {
    "softmax": RoutingRule("softmax", 2),
    "sigmoid": RoutingRule("sigmoid", 3, scale=1.5),
    "inputs": RoutingRule("sigmoid", 2, normalise=False, weighs_inputs=True),
}


def solved_experts(*arguments: Any) -> list[SolvedExpert]:
    return solve_shape(*arguments)[0]


def shape_loss(sample: MixtureSample, metric: Factored, kept: Sequence[int], solved: Sequence[SolvedExpert]) -> float:
    """The predicted loss of a solution, from the outputs of both mixtures."""
    return change_loss(sample.output() - narrowed(sample, kept, solved).output(), metric)


def make_mixture(rule: str, unseen: bool = False) -> tuple[MixtureSample, Factored]:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    def expert() -> ExpertWeights:
        biases = None if rule != "sigmoid" else (draw(WIDTH), draw(WIDTH), draw(HIDDEN))
        return ExpertWeights((draw(WIDTH, HIDDEN), draw(WIDTH, HIDDEN)), draw(HIDDEN, WIDTH) / WIDTH, biases)

    experts = tuple(expert() for _ in range(EXPERTS))
    logit_bias_E = None if rule == "softmax" else draw(EXPERTS)
    bias_E = 0.1 * draw(EXPERTS)
    bias_E[2] = -1e3 if unseen else bias_E[2]
    mixture = Mixture(experts, draw(EXPERTS, HIDDEN), bias_E, RULES[rule], Channels("silu"), logit_bias_E)
    root_DD = draw(HIDDEN, HIDDEN)
    return mixture.on(draw(TOKENS, HIDDEN)), factored(root_DD @ root_DD.T)


def plain_output(mixture: Mixture, input_D: Tensor, absent: int | None = None) -> tuple[Tensor, dict[int, float]]:
    logits_E = mixture.router @ input_D
    logits_E += 0.0 if mixture.logit_bias is None else mixture.logit_bias
    if absent is not None and mixture.rule.scores == "softmax":
        logits_E[absent] = -torch.inf
    scores_E = logits_E.softmax(dim=0) if mixture.rule.scores == "softmax" else logits_E.sigmoid()
    assert mixture.bias is not None
    choice = {e: float(scores_E[e] + mixture.bias[e]) for e in range(EXPERTS) if e != absent}
    chosen = sorted(choice, key=lambda e: -choice[e])[: mixture.rule.top_k]
    total = sum(float(scores_E[e]) for e in chosen) if mixture.rule.normalise else 1.0
    weights = {e: mixture.rule.scale * float(scores_E[e]) / total for e in chosen}
    output_D = torch.zeros(HIDDEN, dtype=torch.float64)
    for number, weight in weights.items():
        (gate, up), down, biases = mixture.experts[number]
        gate_N, up_N, down_D = biases or (0.0, 0.0, 0.0)
        inner, outer = (weight, 1.0) if mixture.rule.weighs_inputs else (1.0, weight)
        hidden_N = torch.nn.functional.silu(gate @ (inner * input_D) + gate_N) * (up @ (inner * input_D) + up_N)
        output_D += outer * (down @ hidden_N + down_D)
    return output_D, weights


@pytest.mark.slow
@pytest.mark.parametrize("rule", list(RULES))
def test_outputs_sums_and_removals_are_those_of_a_loop(rule: str) -> None:
    sample, metric = make_mixture(rule)
    mixture, metric_DD = sample.mixture, metric.scale * metric.factor @ metric.factor.T
    output_TD = sample.output()
    losses_E, tokens, weighted = torch.zeros(EXPERTS, dtype=torch.float64), [0] * EXPERTS, [0.0] * EXPERTS
    for token, input_D in enumerate(sample.inputs):
        expected_D, weights = plain_output(mixture, input_D)
        torch.testing.assert_close(output_TD[token], expected_D)
        for number, weight in weights.items():
            delta_D = plain_output(mixture, input_D, absent=number)[0] - expected_D
            losses_E[number] += 0.5 * delta_D @ metric_DD @ delta_D / TOKENS
            tokens[number] += 1
            inner, outer = (weight, 1.0) if mixture.rule.weighs_inputs else (1.0, weight)
            weighted[number] += outer * float(mixture.outputs(number, inner * input_D[None]).norm())
    torch.testing.assert_close(removal_losses(sample, metric), losses_E)
    assert sample.tokens.tolist() == tokens
    means_E = torch.tensor(weighted, dtype=torch.float64) / torch.tensor(tokens)
    torch.testing.assert_close(sample.saliencies(), means_E)


@pytest.mark.parametrize("rule", list(RULES))
def test_a_whole_mixture_stays_what_it_is(rule: str) -> None:
    sample, metric = make_mixture(rule)
    solved = solved_experts(sample, metric, range(EXPERTS), WIDTH)
    for each, expert in zip(solved, sample.mixture.experts, strict=True):
        for weight, dense in zip(each.weights.readers, expert.readers, strict=True):
            torch.testing.assert_close(weight, dense)
        torch.testing.assert_close(each.weights.writer, expert.writer)
    assert shape_loss(sample, metric, range(EXPERTS), solved) < 1e-20


@pytest.mark.parametrize(("kept", "width"), [([0, 1, 3, 4], WIDTH), ([1, 2, 4], 4), (list(range(EXPERTS)), 3)])
@pytest.mark.parametrize("rule", list(RULES))
def test_a_refit_over_the_mixture_lowers_the_error(rule: str, kept: list[int], width: int) -> None:
    sample, metric = make_mixture(rule)
    losses = []
    for refit in (False, True):
        solved = solved_experts(sample, metric, kept, width, refit)
        assert [each.weights.writer.shape for each in solved] == [(HIDDEN, width)] * len(kept)
        for each, number in zip(solved, kept, strict=True):
            assert torch.equal(each.weights.readers[0], sample.mixture.experts[number].readers[0][each.channels])
        losses.append(shape_loss(sample, metric, kept, solved))
    assert losses[1] < losses[0]


@pytest.mark.parametrize("rule", RULES)
def test_shapes_of_full_width_are_predicted_with_their_refit(rule: str) -> None:
    sample, metric = make_mixture(rule)
    removal_E, counts = removal_losses(sample, metric), [*range(sample.mixture.rule.top_k, EXPERTS + 1)]
    _, output_TD = width_losses(sample, metric, [WIDTH])
    assert torch.equal(output_TD, sample.output())
    remaining_C = remaining_shares(sample, metric, removal_E, counts, output_TD)
    assert bool((remaining_C <= 1.0).all())
    assert float(remaining_C.min()) < 0.95
    for count, remaining in zip(counts[:-1], remaining_C.tolist(), strict=False):
        kept_k = kept_experts(removal_E, count)
        predicted = remaining * float(removal_E.sum() - removal_E[kept_k].sum())
        kept = kept_k.tolist()
        solved = shape_loss(sample, metric, kept, solved_experts(sample, metric, kept, WIDTH))
        assert predicted == pytest.approx(solved) or remaining == 1.0


def test_an_expert_that_no_token_reaches_goes_first_and_is_cut_by_tokens_of_others() -> None:
    sample, metric = make_mixture("sigmoid", unseen=True)
    losses_E = removal_losses(sample, metric)
    assert float(losses_E[2]) > 0.0
    assert losses_E.argmin() == 2
    solved = solved_experts(sample, metric, range(EXPERTS), 4)
    assert solved[2].tokens == 0
    hidden_TN, writer_DN = sample.mixture.hidden(2, sample.inputs), sample.mixture.experts[2].writer
    output_TD = hidden_TN @ writer_DN.T
    cut_TD = hidden_TN[:, solved[2].channels] @ solved[2].weights.writer.T
    first_TD = hidden_TN[:, :4] @ writer_DN[:, :4].T
    assert float((output_TD - cut_TD).norm()) < 0.7 * float((output_TD - first_TD).norm())
    without = solved_experts(sample, metric, [0, 1, 3, 4], WIDTH)
    assert shape_loss(sample, metric, [0, 1, 3, 4], without) < 1e-20


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("passed", [0, 1, WIDTH - 1])
def test_tokens_of_others_complete_the_moment_of_an_expert_with_few(rule: str, passed: int) -> None:
    """(n M_e + (N - n) M_other) / N, for the first tokens that pass it and all others, counted as n tokens."""
    sample, _ = make_mixture(rule)
    mixture, (own_t, weights_t) = sample.mixture, sample.routing.of(1)
    last = int(own_t[passed])
    sample, own_t, weights_t = mixture.on(sample.inputs[:last]), own_t[:passed], weights_t[:passed]
    inputs_TD, routing = sample.inputs, sample.routing
    weight = float(routing.weights.square().mean().sqrt())
    rest_m = torch.tensor([token for token in range(last) if token not in own_t.tolist()])
    if len(rest_m) > 4 * WIDTH:
        rest_m = rest_m[evenly_spread(0, len(rest_m), len(rest_m), 4 * WIDTH)]
    inner, outer = (weight, 1.0) if mixture.rule.weighs_inputs else (1.0, weight)
    others_mN = outer * mixture.hidden(1, inner * inputs_TD[rest_m])
    own_tN = sample.served(1).values
    energy = others_mN.square().sum(dim=1).mean()
    others_mN *= ((own_tN.square().sum() + energy) / ((passed + 1) * energy)).sqrt()
    expected_NN = own_tN.T @ own_tN + (WIDTH - passed) / len(rest_m) * others_mN.T @ others_mN
    found_NN = weighted_moment(sample.served(1), last)
    torch.testing.assert_close(found_NN, max(1, passed) / WIDTH * expected_NN / last, rtol=1e-6, atol=1e-12)


def test_an_expert_with_as_many_tokens_as_channels_has_its_own_moment() -> None:
    sample, _ = make_mixture("softmax")
    first = int(sample.routing.of(1)[0][WIDTH])
    part = sample.mixture.on(sample.inputs[:first]).served(1)
    assert len(part.tokens) == WIDTH
    assert part.others is None


def test_every_token_at_one_expert() -> None:
    sample, metric = make_mixture("softmax")
    mixture, inputs_TD = sample.mixture, sample.inputs
    bias_E, rule = torch.tensor([9.0, 0, 0, 0, 0]), RoutingRule("softmax", 1)
    forced = Mixture(mixture.experts, mixture.router, bias_E, rule, mixture.channels).on(inputs_TD)
    assert forced.tokens.tolist() == [TOKENS, 0, 0, 0, 0]
    norms_T = mixture.outputs(3, inputs_TD).norm(dim=1)
    others_m = evenly_spread(0, TOKENS, TOKENS, 4 * WIDTH)
    assert float(forced.saliencies()[3]) == pytest.approx(float(norms_T[others_m].mean())), "of others"
    solved = solved_experts(forced, metric, [0, 3], 3)
    assert [each.tokens for each in solved] == [TOKENS, 0]
    assert all(
        torch.isfinite(weight).all() for each in solved for weight in (*each.weights.readers, each.weights.writer)
    )


def test_half_precision_inputs_are_enough() -> None:
    sample, metric = make_mixture("sigmoid")
    rough = solved_experts(sample.mixture.on(sample.inputs.bfloat16()), metric, [0, 1, 3], 4)
    assert shape_loss(sample, metric, [0, 1, 3], rough) < 1.2 * shape_loss(
        sample, metric, [0, 1, 3], solved_experts(sample, metric, [0, 1, 3], 4)
    )
