"""Tensors that several methods store alike."""

from __future__ import annotations

import torch

from pipeline.methods.tensors import biases_of, channel_priority, encoded_values, factors_of
from tests.families import geometries


def test_channels_that_stay_come_first_and_then_the_last_eliminated() -> None:
    assert channel_priority(torch.tensor([4, 0, 2]), 6).tolist() == [1, 3, 5, 2, 0, 4]


def test_only_matrices_with_a_bias_give_one() -> None:
    plain, biased = (geometries.llama(name).layers[0] for name in ("gqa", "biased"))
    weights = {f"{role}.bias": torch.ones(3) for role in biased.linear_roles}
    assert biases_of(weights, plain.matrices.values()) == {}
    biases = biases_of(weights, biased.matrices.values())
    assert biases.keys() == weights.keys()
    assert all(bias.dtype == torch.float64 for bias in biases.values())


def test_values_behind_an_encoder_are_those_of_each_head() -> None:
    value = geometries.llama("biased").layers[0].attention.value
    heads, rank = 2, 3
    generator = torch.Generator().manual_seed(0)
    weight_OD = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    bias_O = torch.randn(value.outputs, generator=generator, dtype=torch.float64)
    encode_Grd = torch.randn(heads, rank, value.outputs // heads, generator=generator, dtype=torch.float64)
    tensors = encoded_values({value.weight_key: weight_OD, value.bias_key: bias_O}, value, encode_Grd)
    expected_WD = torch.cat([e @ w for e, w in zip(encode_Grd, weight_OD.chunk(heads), strict=True)])
    expected_W = torch.cat([e @ b for e, b in zip(encode_Grd, bias_O.chunk(heads), strict=True)])
    torch.testing.assert_close(tensors[value.weight_key], expected_WD)
    torch.testing.assert_close(tensors[value.bias_key], expected_W)


def test_factors_of_full_rank_give_the_weight() -> None:
    weight_mD = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solution = factors_of("q", weight_mD, 4, None)
    torch.testing.assert_close(
        solution.tensors["q.second.weight"] @ solution.tensors["q.first.weight"], weight_mD, rtol=0, atol=1e-12
    )
    assert factors_of("q", weight_mD, 2, None).report["q_error"] > solution.report["q_error"]
