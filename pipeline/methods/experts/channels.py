"""Channels of all experts in one ranking by the loss of their removal alone: HEAPr. docs/methods.md#mixtures.

Statistics of an expert: the diagonal of C_e, E[(p h)²] of each channel (N,); of its layer: G (D, D).

Legend: D hidden, N channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.spectra import tail_sums
from pipeline.ranks.curves import Point

WIDTH = "width"


class RankedChannels(NamedTuple):
    """The channels of an expert in `order`, those that stay longest first, and the `losses` (N + 1,) by width."""

    order: Tensor
    losses: Tensor

    def kept(self, width: int) -> Tensor:
        """Return the channels that stay, ascending."""
        return self.order[:width].sort().values


def rank_channels(squares_N: Tensor, down_DN: Tensor, metric_DD: Tensor) -> RankedChannels:
    """Order channels by ½ E[(p h_j)²] w_jᵀ G w_j; correlations between channels do not count.

    Of equal losses, the lower index stays longer. Raises ValueError as `channel_losses`.
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


def channel_points(ranked: RankedChannels, numbers_per_channel: int, multiple: int = 1) -> list[Point]:
    """Return a point for each width that is a multiple, and for the full one.

    The losses of single channels fall, so that a choice among the points of all experts keeps the channels of largest
    loss of all.
    """
    whole = len(ranked.order)
    widths = [*range(multiple, whole, multiple), whole]
    losses = ranked.losses.tolist()
    return [Point({WIDTH: width}, width * numbers_per_channel, losses[width]) for width in widths]
