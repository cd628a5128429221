"""Merging of experts that compute alike."""

from __future__ import annotations

import pytest
import torch

from lamina.activation_lamina import Channels
from pipeline.kernels.routing import RoutingRule
from pipeline.methods.experts.merging import busiest, cluster, mean_outputs, merge, refit
from pipeline.methods.experts.mixture import ExpertWeights, Mixture


def test_the_nearest_are_joined_by_the_mean_distance_of_their_members() -> None:
    outputs_ED = torch.tensor([[0.0], [10.0], [0.1], [10.4], [4.0]])
    assert cluster(outputs_ED, 5) == [[0], [1], [2], [3], [4]]
    assert cluster(outputs_ED, 3) == [[0, 2], [1, 3], [4]]
    assert cluster(outputs_ED, 2) == [[0, 2, 4], [1, 3]]
    assert cluster(torch.zeros(3, 1), 2) == [[0, 1], [2]]
    assert cluster(torch.tensor([[0.0], [9.0], [0.1], [0.1]]), 2, groups=2) == [[0, 1], [2, 3]]
    assert busiest([[0, 2], [1, 3]], torch.tensor([1, 5, 4, 5])) == [2, 1]
    with pytest.raises(ValueError, match="cannot form"):
        cluster(outputs_ED, 0)
    with pytest.raises(ValueError, match="NaN"):
        cluster(outputs_ED * float("nan"), 2)


def random_expert(source: torch.Generator) -> ExpertWeights:
    gate_ND, up_ND, down_DN = (torch.randn(*shape, generator=source) for shape in ((3, 4), (3, 4), (4, 3)))
    return ExpertWeights((gate_ND, up_ND), down_DN)


def test_merged_weights_are_means_by_tokens_and_the_busiest_keeps_its_row() -> None:
    source = torch.Generator().manual_seed(0)
    experts = tuple(random_expert(source) for _ in range(4))
    rule = RoutingRule("sigmoid", 2)
    mixture = Mixture(experts, torch.randn(4, 4, generator=source), torch.arange(4.0), rule, Channels("silu"))
    merged = merge(mixture, [[0, 3], [1, 2]], torch.tensor([1, 0, 0, 3]))
    torch.testing.assert_close(merged.experts[0].writer, (0.25 * experts[0].writer + 0.75 * experts[3].writer).double())
    torch.testing.assert_close(
        merged.experts[1].readers[0], ((experts[1].readers[0] + experts[2].readers[0]) / 2).double()
    )
    assert merged.bias is not None
    assert merged.bias.tolist() == [3.0, 1.0]
    same = Mixture((experts[0], experts[0]), mixture.router[:2], None, rule, mixture.channels)
    inputs_TD = torch.randn(20, 4, generator=source)
    means_ED = mean_outputs(same.on(inputs_TD))
    torch.testing.assert_close(means_ED[0], same.outputs(0, inputs_TD).double().mean(dim=0))
    assert torch.equal(means_ED[0], means_ED[1])


def test_a_refit_brings_merged_experts_nearer_to_the_output_of_all() -> None:
    source = torch.Generator().manual_seed(1)
    experts = tuple(random_expert(source) for _ in range(4))
    mixture = Mixture(experts, torch.randn(4, 4, generator=source), None, RoutingRule("softmax", 2), Channels("silu"))
    sample = mixture.on(torch.randn(200, 4, generator=source))
    merged = merge(mixture, [[0, 1], [2], [3]], torch.ones(4))
    errors = [
        float((sample.output() - each.on(sample.inputs).output()).square().sum())
        for each in (merged, refit(sample, merged))
    ]
    assert errors[1] < 0.9 * errors[0]
    assert torch.equal(refit(sample, merged).experts[0].readers[0], merged.experts[0].readers[0])
