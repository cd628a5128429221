"""Attention with a deterministic backward pass, against attention written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels.attention import deterministic_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "groups", "tokens", "width", "value"), [
    (4, 4, 1, 16, 16), (9, 3, 200, 64, 64), (2, 1, 333, 96, 96), (2, 2, 130, 24, 16),
])  # fmt: skip
def test_gradients_are_right_and_the_same_each_time(
    dtype: torch.dtype, heads: int, groups: int, tokens: int, width: int, value: int
) -> None:
    source = torch.Generator().manual_seed(0)
    shapes = (heads, width), (groups, width), (groups, value), (heads, value)
    *inputs, outgoing = (torch.randn(1, n, tokens, size, generator=source, dtype=torch.float64) for n, size in shapes)

    def gradients(dtype: torch.dtype, kernel: object) -> list[Tensor]:
        parts = [part.to(dtype).requires_grad_() for part in inputs]
        assert callable(kernel)
        return [*torch.autograd.grad(kernel(*parts), parts, outgoing.to(dtype))]

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with deterministic_attention(torch.device("cpu")):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=tokens > 1, enable_gqa=groups < heads
            )

    once, again, expected = gradients(dtype, fused), gradients(dtype, fused), gradients(torch.float64, written_out)
    for first, second, exact in zip(once, again, expected, strict=True):
        assert torch.equal(first, second)
        largest = float(exact.abs().max())
        torch.testing.assert_close(first.double(), exact, rtol=0.0, atol=TOLERANCE[dtype] * max(largest, 1.0))
