"""Channels in one ranking, against zeroing each on its tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.channel_ranking import RankedChannels, channel_losses, rank_channels
from pipeline.ranks.curves import Point, choose


def test_a_channels_loss_is_that_of_zeroing_it() -> None:
    source = torch.Generator().manual_seed(0)
    hidden_TN = torch.randn(50, 4, generator=source, dtype=torch.float64)
    down_DN = torch.randn(3, 4, generator=source, dtype=torch.float64)
    root_DD = torch.randn(3, 3, generator=source, dtype=torch.float64)
    found = channel_losses(hidden_TN.square().mean(dim=0), down_DN, root_DD @ root_DD.T)
    for channel in range(4):
        delta_TD = hidden_TN[:, channel, None] * down_DN[:, channel]
        expected = 0.5 * (delta_TD @ root_DD).square().sum(dim=1).mean()
        assert float(found[channel]) == pytest.approx(float(expected))
    with pytest.raises(ValueError, match="do not fit"):
        channel_losses(torch.ones(3), down_DN, torch.eye(3))


def make_expert(seed: int, channels: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    squares_N = torch.rand(channels, generator=source, dtype=torch.float64)
    return squares_N, torch.randn(3, channels, generator=source, dtype=torch.float64), torch.eye(3, dtype=torch.float64)


def points_of(ranked: RankedChannels) -> list[Point]:
    return [Point({"width": width}, 9 * width, float(ranked.losses[width])) for width in range(1, 7)]


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
def test_a_budget_keeps_the_channels_of_largest_loss_of_all_experts(share: float) -> None:
    experts = {str(seed): make_expert(seed) for seed in range(3)}
    ranked = {key: rank_channels(*expert) for key, expert in experts.items()}
    chosen = choose({key: points_of(each) for key, each in ranked.items()}, share * 18 * 9)
    kept = {(key, int(c)) for key, point in chosen.items() for c in ranked[key].kept(point.ranks["width"])}
    every = sorted(
        ((-float(loss), key, c) for key, expert in experts.items() for c, loss in enumerate(channel_losses(*expert))),
    )
    expected = {(key, c) for _, key, c in every[: len(kept)]}
    assert len(kept) == int(share * 18)
    assert kept == expected


def test_equal_channels_stay_by_index() -> None:
    ranked = rank_channels(torch.ones(5), torch.ones(2, 5), torch.eye(2))
    assert ranked.kept(3).tolist() == [0, 1, 2]
    assert ranked.losses.tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
