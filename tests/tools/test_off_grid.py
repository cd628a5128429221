"""Weights are taken off their grid by less than half of its step."""

import torch

from tools.off_grid import noisy


def test_noise_is_half_a_step_of_each_group_at_most() -> None:
    codes_OI = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(1)).float()
    codes_OI[:, ::32], codes_OI[:, 1::32] = 0.0, 15.0
    steps_OI = torch.tensor([0.5, 2.0]).repeat_interleave(32)
    moved_OI = noisy(codes_OI * steps_OI, 4, 32, torch.Generator().manual_seed(0)) / steps_OI
    assert torch.equal(moved_OI.round().clamp(0, 15), codes_OI), "the same grid is nearest"
    assert 0.2 < float((moved_OI - codes_OI).abs().mean()) < 0.3
    again_OI = noisy(codes_OI * steps_OI, 4, 32, torch.Generator().manual_seed(0)) / steps_OI
    assert torch.equal(again_OI, moved_OI)
