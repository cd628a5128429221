"""Shrinking gradient moments: against the formula written out sequence by sequence, and its limits."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.shrinkage import shrink, shrink_share


def sequence_sums(sequences: int, features: int, length: int = 5, groups: int = 2) -> torch.Tensor:
    torch.manual_seed(sequences * 100 + features)
    values = torch.randn(sequences, groups, length, features, dtype=torch.float64)
    return values.transpose(2, 3) @ values


def stored(sums_SGFF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    return sums_SGFF.sum(dim=0), sums_SGFF.square().sum(dim=(2, 3)).sum(dim=0), sums_SGFF.shape[0]


@pytest.mark.parametrize("sequences", [2, 3, 17])
@pytest.mark.parametrize("features", [2, 6])
@pytest.mark.parametrize("scale", [1.0, 1e-120, 1e70])
def test_share_is_the_formula(sequences: int, features: int, scale: float) -> None:
    sums = sequence_sums(sequences, features)
    mean = sums.mean(dim=0)
    outside = mean - torch.diag_embed(mean.diagonal(dim1=1, dim2=2))
    chance = (sums - mean).square().sum(dim=(2, 3)).sum(dim=0) / (sequences * (sequences - 1))
    expected = (chance / outside.square().sum(dim=(1, 2))).clamp(0.0, 1.0)
    total, norms, count = stored(sums * scale)
    torch.testing.assert_close(shrink_share(total, norms, count), expected, rtol=1e-9, atol=1e-12)


def test_shrunk_mean_keeps_the_diagonal_and_scales_the_rest() -> None:
    common = torch.tensor([[5.0, 3.0, 0.0], [3.0, 5.0, 2.0], [0.0, 2.0, 5.0]], dtype=torch.float64)
    total, norms, count = stored(sequence_sums(4, 3) + common)
    before = total.clone(), norms.clone()
    share = shrink_share(total, norms, count)
    assert ((share > 0) & (share < 1)).any()
    shrunk = shrink(total, norms, count, tokens=20)
    torch.testing.assert_close(shrunk.diagonal(dim1=1, dim2=2), total.diagonal(dim1=1, dim2=2) / 20)
    torch.testing.assert_close(shrunk[:, 0, 1], total[:, 0, 1] / 20 * (1 - share))
    assert (torch.linalg.eigvalsh(shrunk) >= -1e-12).all()
    assert torch.equal(total, before[0])
    assert torch.equal(norms, before[1])


def test_more_sequences_shrink_less() -> None:
    shares = [shrink_share(*stored(sequence_sums(count, 4, groups=1) + 1.0)).item() for count in (20, 200, 2000)]
    assert shares[0] > shares[1] > shares[2] > 0.0
    assert shares[2] < 0.01


@pytest.mark.parametrize("sequences", [1, 3])
def test_what_tells_nothing(sequences: int) -> None:
    zero = torch.zeros(1, 3, 3)
    assert shrink_share(zero, torch.zeros(1), sequences).item() == 0.0
    diagonal = torch.eye(3)[None] * 4.0
    assert shrink_share(diagonal, torch.full((1,), 48.0), sequences).item() == 0.0
    single, norms, _ = stored(sequence_sums(1, 3, groups=1))
    assert shrink_share(single, norms, 1).item() == 1.0


def test_a_diagonal_moment_is_divided() -> None:
    torch.testing.assert_close(
        shrink(torch.tensor([[2.0, 4.0]]), torch.zeros(1), 1, 8), torch.tensor([[0.25, 0.5]], dtype=torch.float64)
    )


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        shrink_share(torch.zeros(2, 3, 3), torch.zeros(1), 2)
    with pytest.raises(ValueError, match="sequences must be"):
        shrink_share(torch.zeros(1, 3, 3), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="tokens must be"):
        shrink(torch.zeros(1, 3, 3), torch.zeros(1), 2, 0)
    with pytest.raises(ValueError, match="NaN"):
        shrink(torch.full((1, 3, 3), float("nan")), torch.zeros(1), 2, 4)


def test_sums_of_any_type_are_reckoned_in_float64() -> None:
    sums = sequence_sums(3, 4).to(torch.float32)
    total, norms, count = stored(sums.double())
    single = shrink(total.float(), norms.float(), count, tokens=1)
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, shrink(total.float().double(), norms.float().double(), count, tokens=1))
    for sequences in (1, 3):
        assert shrink_share(total.float(), norms.float(), sequences).dtype == torch.float64
        assert shrink_share(torch.zeros(2, 4, 4), torch.zeros(2), sequences).dtype == torch.float64


def test_a_peak_of_one_is_a_moment_like_any_other() -> None:
    total, norms, count = stored(sequence_sums(3, 4))
    peak = float(total.abs().max())
    expected = shrink_share(total, norms, count)
    assert bool((expected > 0).all())
    torch.testing.assert_close(shrink_share(total / peak, norms / peak**2, count), expected)
