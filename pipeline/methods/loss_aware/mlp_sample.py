"""The sampled tokens of an MLP, or of an expert.

Legend: D hidden, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.families.blocks import MLPBlock
from pipeline.methods.method import Moment, Statistics
from pipeline.methods.work import LEAST_PROBE, LEAST_SAMPLE, PROBE_TOKENS, SAMPLE_TOKENS

BATCH = 4096  # tokens that pass the MLP at a time


class Sample(NamedTuple):
    """Tokens that pass an MLP.

    Attributes:
        inputs: (T, D).
        weights: (T,), the factor of each token's channels, if the MLP is an expert; 1 if the inputs include it.
        share: the share of the sampled tokens that pass the MLP.
    """

    inputs: Tensor
    weights: Tensor | None
    share: float

    def at(self, places: Tensor | slice) -> Sample:
        """Return some of the tokens."""
        return Sample(self.inputs[places], None if self.weights is None else self.weights[places], self.share)

    def batches(self) -> Iterator[Sample]:
        """Yield the tokens in batches."""
        return (self.at(slice(start, start + BATCH)) for start in range(0, len(self.inputs), BATCH))


def read_sample(block: MLPBlock, statistics: Statistics) -> Sample:
    """Return the sampled tokens that pass an MLP; for an expert, those with a routing weight.

    For an expert with few tokens, they include the tokens of others that complete its moments.

    Raises ValueError if tokens and routing weights differ in number.
    """
    inputs_TD = statistics.moments[sample_of(block)][0]
    if not block.routing:
        return Sample(inputs_TD, None, 1.0)
    weights_T = statistics.moments[routing_sample(block)][0, :, 0]
    if len(weights_T) != len(inputs_TD):
        raise ValueError(f"{block.name}: {len(weights_T)} routing weights for {len(inputs_TD)} sampled tokens")
    routed_t = weights_T.nonzero()[:, 0]
    inputs_tD, weights_t = inputs_TD[routed_t], weights_T[routed_t]
    if block.weighed:
        inputs_tD, weights_t = inputs_tD * weights_t[:, None].to(inputs_tD.dtype), torch.ones_like(weights_t)
    if (others := statistics.others.get(block.name)) is not None:
        factor = others.factor * (len(weights_T) / statistics.tokens) ** 0.5
        inputs_tD = torch.cat((inputs_tD, others.inputs.to(inputs_tD.dtype)))
        weights_t = torch.cat((weights_t, weights_t.new_full((len(others.inputs),), factor))) * others.scale**0.5
    return Sample(inputs_tD, weights_t, len(weights_t) / max(1, len(weights_T)))


def sample_of(block: MLPBlock) -> Moment:
    """Return the sample of the MLP's inputs, before routing weights."""
    return Moment(block.passing, kind="sample", tokens=sampled(block.width))


def routing_sample(block: MLPBlock) -> Moment:
    """Return an expert's routing weights of the tokens of `sample_of`, one number per token."""
    return Moment(block.routing, kind="sample", tokens=sampled(block.width))


def sampled(width: int) -> int:
    """Return the number of tokens on which `width` channels are fitted."""
    return max(LEAST_SAMPLE, SAMPLE_TOKENS * width)


def probe_tokens(width: int) -> int:
    """Return the number of tokens that are run through the activation with `width` channels."""
    return max(LEAST_PROBE, PROBE_TOKENS * width)
