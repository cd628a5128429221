"""The choice of the experts to keep by their scores. docs/methods.md#mixtures.

Legend: E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW_TOKENS = 32  # per channel
SHARE_TOKENS = 16  # with fewer, the share of the tokens that pass an expert is not known to a quarter
TOKENS_BY_EXPERT = "tokens_by_expert"  # fields of a solution's report: a number for each dense expert of the layer
SALIENCY_BY_EXPERT, REMOVAL_LOSS_BY_EXPERT = "saliency_by_expert", "removal_loss_by_expert"


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


def few_tokens(tokens: int, width: int) -> bool:
    """Return True if an expert saw some tokens, but fewer than `FEW_TOKENS` per channel."""
    return 0 < tokens < FEW_TOKENS * width
