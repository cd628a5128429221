"""Channels ranked by the loss of removing each alone, after HEAPr. docs/methods.md#baselines.

Statistics: E[h²] of each channel (N,), for an expert E[(p h)²] averaged over all tokens; G (D, D), the moment of the
gradient at the outputs.

Legend: D hidden, N channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.spectra import tail_sums


class RankedChannels(NamedTuple):
    """The channels in `order`, the most important first, and the `losses` (N + 1,) by width."""

    order: Tensor
    losses: Tensor

    def kept(self, width: int) -> Tensor:
        """Return the `width` most important channels, ascending."""
        return self.order[:width].sort().values


def rank_channels(squares_N: Tensor, down_DN: Tensor, metric_DD: Tensor) -> RankedChannels:
    """Order channels by ½ E[(p h_j)²] w_jᵀ G w_j; correlations between channels do not count.

    Of equal losses, the lower index comes first. Raises the errors of `channel_losses`.
    """
    sorted_N = channel_losses(squares_N, down_DN, metric_DD).sort(descending=True, stable=True)
    return RankedChannels(sorted_N.indices, tail_sums(sorted_N.values))


def channel_losses(squares_N: Tensor, down_DN: Tensor, metric_DD: Tensor) -> Tensor:
    """Return the predicted loss of each channel's removal without a refit (N,), nats per token, float64.

    w_j are the columns of the writer. Raises ValueError on shapes that do not fit.
    """
    if down_DN.shape != (len(metric_DD), len(squares_N)):
        raise ValueError(f"writer {tuple(down_DN.shape)} and squares {tuple(squares_N.shape)} do not fit")
    down_DN, metric_DD = down_DN.to(torch.float64), metric_DD.to(torch.float64)
    return 0.5 * squares_N.to(torch.float64) * (down_DN * (metric_DD @ down_DN)).sum(dim=0)
