"""Rounded linears in training: the weight, its gradients, and the codes that are stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.levels_lamina import TableLinear, scaled_levels
from pipeline.healing.rounded import TrainedTable
from pipeline.kernels.packing import pack

LEVELS = torch.tensor([-1.0, -0.5, -0.2, 0.0, 0.1, 0.3, 0.6, 1.0])


def stored_table(levels_n: torch.Tensor = LEVELS, group: int | None = 16) -> TableLinear:
    """Return a linear of random codes with 3 bits and scales of both signs."""
    generator = torch.Generator().manual_seed(0)
    table = TableLinear(nn.Linear(64, 24, bias=False), 3, group)
    table.weight_packed = pack(torch.randint(-4, 4, (24, 64), generator=generator), 3)
    table.weight_scale = torch.randn(table.weight_scale.shape, generator=generator)
    table.weight_levels = levels_n
    return table


@pytest.mark.parametrize("group", [16, None])
@pytest.mark.parametrize("order", ["rising", "mixed"])
def test_a_latent_weight_begins_at_the_stored_codes(group: int | None, order: str) -> None:
    levels_n = LEVELS if order == "rising" else LEVELS[torch.randperm(8)]
    stored = stored_table(levels_n, group)
    packed, x = stored.weight_packed.clone(), torch.randn(5, 64)
    table = TrainedTable(stored, 3, group, even=False, codes=True)
    torch.testing.assert_close(table(x), stored(x))
    assert torch.equal(table.pack_codes(), packed)


def test_codes_follow_the_latent_weight() -> None:
    stored = stored_table()
    table = TrainedTable(stored, 3, 16, even=False, codes=True)
    with torch.no_grad():
        table.latent.copy_(torch.randn(24, 64))
    nearest_OI = scaled_levels(table.pack_codes(), table.weight_scale, LEVELS, 64)
    per_level_nOI = table.weight_scale.repeat_interleave(16, dim=1) * LEVELS[:, None, None]
    torch.testing.assert_close(nearest_OI, table.rows(slice(None)))
    least_OI = (per_level_nOI - table.latent).abs().amin(dim=0)
    torch.testing.assert_close((nearest_OI - table.latent).abs(), least_OI)


def test_earlier_codes_are_taken_back() -> None:
    table = TrainedTable(stored_table(), 3, 16, even=False, codes=True)
    packed, weight_OI = table.pack_codes().clone(), table.rows(slice(None)).detach()
    with torch.no_grad():
        table.latent.copy_(torch.randn(24, 64))
    assert not torch.equal(table.pack_codes(), packed)
    table.take_codes(packed)
    assert torch.equal(table.pack_codes(), packed)
    torch.testing.assert_close(table.rows(slice(None)).detach(), weight_OI)


def test_gradients_pass_the_rounding() -> None:
    table = TrainedTable(stored_table(), 3, 16, even=False, codes=True)
    with torch.no_grad():
        table.latent.add_(0.01 * torch.randn(24, 64))
    for name in ("latent", "weight_scale", "weight_levels"):
        getattr(table, name).requires_grad_(True)
    gradient_OI = torch.randn(24, 64)
    (table.rows(slice(None)) * gradient_OI).sum().backward()
    scale_OI = table.weight_scale.detach().repeat_interleave(16, dim=1)
    latent_OI = table.latent.detach()
    level_OI = table.rows(slice(None)).detach() / scale_OI
    torch.testing.assert_close(table.latent.grad, gradient_OI)
    expected_OS = (gradient_OI * (level_OI - latent_OI / scale_OI)).unflatten(1, (4, 16)).sum(2)
    torch.testing.assert_close(table.weight_scale.grad, expected_OS, rtol=1e-4, atol=1e-4)
    sums_n = torch.stack([(gradient_OI * scale_OI)[(level_OI - level).abs() < 1e-4].sum() for level in LEVELS])
    torch.testing.assert_close(table.weight_levels.grad, sums_n, rtol=1e-4, atol=1e-4)


def test_even_steps_keep_their_levels() -> None:
    stored = stored_table()
    table = TrainedTable(stored, 3, 16, even=True, codes=False)
    assert {name for name, _ in table.named_parameters()} == {"weight_packed", "weight_scale"}
    assert torch.equal(table.weight_levels, torch.arange(-4.0, 4.0))
