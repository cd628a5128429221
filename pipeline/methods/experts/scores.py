"""Scores of the experts of a layer, and the choice of the experts to keep. docs/methods.md#mixtures.

Legend: E experts, p the router's weight of a token, f(m) the expert's output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FEW_TOKENS = 32  # per channel
SHARE_TOKENS = 16  # with fewer, the share of the tokens that pass an expert is not known to a quarter
TOKENS_BY_EXPERT = "tokens_by_expert"  # fields of a solution's report: a number for each dense expert of the layer
SALIENCY_BY_EXPERT, REMOVAL_LOSS_BY_EXPERT = "saliency_by_expert", "removal_loss_by_expert"


class ExpertSums(NamedTuple):
    """Sums over the tokens of each expert, (E,) float64: their number, Σ p, Σ ‖f(m)‖ and Σ p‖f(m)‖.

    `others`, `weighted_others`: for an expert with few tokens, 1 and the mean of p‖f(m)‖ over tokens of other experts;
    else 0.
    """

    tokens: Tensor
    weights: Tensor
    outputs: Tensor
    weighted_outputs: Tensor
    others: Tensor
    weighted_others: Tensor


def reap_scores(sums: ExpertSums) -> Tensor:
    """Return the mean of p‖f(m)‖ over each expert's tokens, with few over one of others as well: REAP's saliency."""
    return (sums.weighted_outputs + sums.weighted_others) / (sums.tokens + sums.others).clamp_min(1.0)


def frequency_scores(sums: ExpertSums) -> Tensor:
    """Return the number of tokens of each expert."""
    return sums.tokens


def kept_experts(scores_E: Tensor, count: int, groups: int = 1) -> Tensor:
    """Return the `count` experts with the highest scores, ascending, the same number from each of the router's groups.

    Among equal scores, the lower index is kept. Raises ValueError on NaN, or unless `count` is a positive multiple of
    `groups` and at most the number of experts.
    """
    num_experts = len(scores_E)
    if bool(torch.isnan(scores_E).any()):
        raise ValueError(f"scores: {int(torch.isnan(scores_E).sum())} of {num_experts} are NaN")
    if num_experts % groups or count % groups or not 0 < count <= num_experts:
        raise ValueError(f"{count} of {num_experts} experts cannot be kept in {groups} equal groups")
    best_Gn = scores_E.view(groups, -1).sort(dim=1, descending=True, stable=True).indices
    first_G1 = torch.arange(groups, device=scores_E.device)[:, None] * (num_experts // groups)
    return (best_Gn[:, : count // groups] + first_G1).flatten().sort().values


def expert_counts(num_experts: int, top_k: int, groups: int = 1, multiple: int = 1) -> list[int]:
    """Return the allowed numbers of experts, ascending; the last is the dense number.

    Each is a multiple of the number of groups and of `multiple`, and leaves at least `top_k` experts.
    """
    step = groups
    while step % multiple:
        step += groups
    return sorted({*range(step * -(-top_k // step), num_experts, step), num_experts})


def few_tokens(tokens: int, width: int, least: int = FEW_TOKENS) -> bool:
    """Return True if an expert saw some tokens, but fewer than `least` per channel."""
    return 0 < tokens < least * width
