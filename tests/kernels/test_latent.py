"""Latent attention against attention written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.latent import (
    _loss_and_slope,
    distance_shares,
    fit_latents,
    head_rows,
    query_rows,
    split_keys,
    turns,
)
from tests.tensors import random

T, D, HEADS, WIDTH = 40, 24, 4, 8
FREQUENCIES = torch.tensor([1.0, 0.3, 0.09, 0.027], dtype=torch.float64)
SCALE = WIDTH**-0.5


def turned(values_THd: Tensor, angles_J: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the pairs of a head by position: dimensions j and j + J, or neighbours."""
    angle_T1J = torch.arange(len(values_THd), dtype=torch.float64)[:, None, None] * angles_J
    half = (values_THd[..., ::2], values_THd[..., 1::2]) if interleaved else values_THd.chunk(2, dim=-1)
    real, imaginary = half
    return torch.cat(
        (
            real * angle_T1J.cos() - imaginary * angle_T1J.sin(),
            imaginary * angle_T1J.cos() + real * angle_T1J.sin(),
        ),
        dim=-1,
    )


def source_scores(x_TD: Tensor, query_QD: Tensor, key_CD: Tensor, angles_J: Tensor) -> Tensor:
    queries, keys = ((x_TD @ weight.T).unflatten(1, (-1, WIDTH)) for weight in (query_QD, key_CD))
    keys = turned(keys, angles_J).repeat_interleave(HEADS // keys.shape[1], dim=1)
    return torch.einsum("mhd,nhd->hmn", turned(queries, angles_J), keys)


def split_scores(x_TD: Tensor, query_QD: Tensor, split: object, angles_I: Tensor) -> Tensor:
    """Scores as DeepSeek's class makes them: rotated shared dimensions, and the others as they are."""
    shared, read, rest = split.shared, split.read, split.rest  # type: ignore[attr-defined]
    rows = (x_TD @ query_rows(query_QD, read, 1.0).T).unflatten(1, (HEADS, -1))
    still, moving = rows[..., :WIDTH], turned(rows[..., WIDTH:], angles_I, interleaved=True)
    keys = (x_TD @ rest.T).unflatten(1, (-1, WIDTH))
    keys = keys.repeat_interleave(HEADS // keys.shape[1], dim=1)
    common = turned((x_TD @ shared.T)[:, None], angles_I, interleaved=True)[:, 0]
    return torch.einsum("mhd,nhd->hmn", still, keys) + torch.einsum("mhd,nd->hmn", moving, common)


def problem(groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x_TD = random(T, D, seed=seed)
    query, key = random(HEADS * WIDTH, D, seed=seed + 1), random(groups * WIDTH, D, seed=seed + 2)
    gradient = random(200, groups * WIDTH, seed=seed + 3)
    return x_TD, query, key, x_TD.T @ x_TD / T, gradient.T @ gradient / 200


@pytest.mark.parametrize("shared", [2, 4, 8])
def test_without_rotation_every_split_gives_the_scores(shared: int) -> None:
    x_TD, query, key, moment, gradient = problem(groups=2)
    near = torch.eye(1, T, dtype=torch.float64).expand(2, T)  # all attention at distance 0, where nothing turns
    split = split_keys(key, moment, gradient, FREQUENCIES, FREQUENCIES[: shared // 2], near)
    still = torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(
        split_scores(x_TD, query, split, still[: shared // 2]), source_scores(x_TD, query, key, still)
    )
    assert split.loss == pytest.approx(0.0, abs=1e-12)


def test_one_key_head_keeps_its_rotation() -> None:
    x_TD, query, key, moment, gradient = problem(groups=1)
    shares = distance_shares(x_TD, query, key, 1, FREQUENCIES, SCALE)
    split = split_keys(key, moment, gradient, FREQUENCIES, FREQUENCIES, shares)
    torch.testing.assert_close(
        split_scores(x_TD, query, split, FREQUENCIES), source_scores(x_TD, query, key, FREQUENCIES)
    )
    assert split.loss < 1e-12


def test_more_rotated_dimensions_lose_less() -> None:
    x_TD, query, key, moment, gradient = problem(groups=2)
    shares = distance_shares(x_TD, query, key, 2, FREQUENCIES, SCALE)
    losses = [
        split_keys(key, moment, gradient, FREQUENCIES, FREQUENCIES[: shared // 2], shares).loss
        for shared in (2, 4, 6, 8)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0.0  # two heads, and one number of both is rotated


def test_turns_are_powers_between_the_source_s() -> None:
    turned = turns(FREQUENCIES, 12, 3)
    torch.testing.assert_close(turned[::3], FREQUENCIES[:2])
    torch.testing.assert_close(turned[1:] / turned[:-1], turned[1].expand(5))
    assert torch.equal(turns(FREQUENCIES, 6, 1), FREQUENCIES[:3])


@pytest.mark.parametrize("heads", [2, 3])
def test_the_loss_is_that_of_scores_at_every_distance(heads: int) -> None:
    """Of heads with one frequency, of which turns near it rotate a number each."""
    own, turned = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.3, 0.36], dtype=torch.float64)
    x_TD, key, gradient = random(T, D), random(heads * 2, D, seed=1), random(200, heads * 2, seed=2)
    moment, gradient = x_TD.T @ x_TD / T, gradient.T @ gradient / 200
    shares = random(1, 12, seed=3).abs().expand(heads, 12) / random(1, 12, seed=3).abs().sum()
    split = split_keys(key, moment, gradient, own, turned, shares)
    numbers = [(x_TD @ rows.T).unflatten(1, (-1, 2)) for rows in (key, split.rest, split.shared)]
    source, rest, common = (torch.complex(*each.unbind(dim=-1)) for each in numbers)
    read = torch.complex(split.read[:, ::2, 0], split.read[:, 1::2, 0]).conj()
    at = torch.arange(12, dtype=torch.float64)[:, None, None]
    change = torch.exp(-1j * at * own) * source - rest - torch.exp(-1j * at * turned) * common @ read.T
    feels = gradient.unflatten(0, (heads, 2)).unflatten(2, (heads, 2))
    feels = feels[:, 0, :, 0] + feels[:, 1, :, 1] + 1j * (feels[:, 1, :, 0] - feels[:, 0, :, 1])
    each = torch.einsum("wtg,gh,wth->w", change.conj(), feels, change).real / T
    assert split.loss == pytest.approx(0.25 * float(shares[0] @ each), rel=1e-9)
    alone = split_keys(key, moment, gradient, own, own, shares)
    assert split.loss < alone.loss


def test_a_key_head_s_numbers_take_one_turn_each() -> None:
    """Two heads without offsets: two turns of one frequency rotate all that both heads have of it."""
    x_TD, query, key, moment, gradient = problem(groups=2)
    shares = distance_shares(x_TD, query, key, 2, FREQUENCIES, SCALE)
    twice = FREQUENCIES.repeat_interleave(2)
    split = split_keys(key, moment, gradient, FREQUENCIES, twice, shares)
    torch.testing.assert_close(split_scores(x_TD, query, split, twice), source_scores(x_TD, query, key, FREQUENCIES))
    assert split.loss < 1e-12


def test_shares_are_those_of_attention() -> None:
    x_TD, query, key, _, _ = problem(groups=2)
    shares = distance_shares(x_TD, query, key, 2, FREQUENCIES, SCALE)
    scores = SCALE * source_scores(x_TD, query, key, FREQUENCIES)
    attention = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    expected = torch.stack([attention[:2].diagonal(-w, 1, 2).sum() for w in range(T)])
    torch.testing.assert_close(shares[0], expected / expected.sum())


def test_the_slope_is_that_of_the_loss() -> None:
    rows, white, outputs = random(5, D, seed=1), random(T * 5, D, seed=2), random(T * 5, 7, seed=3)
    loss, slope = _loss_and_slope(rows, white, outputs)
    step = 1e-6 * random(5, D, seed=4)
    ahead, behind = (_loss_and_slope(rows + sign * step, white, outputs)[0] for sign in (1, -1))
    assert (ahead - behind) / 2 == pytest.approx(float((slope * step).sum()), rel=1e-4)
    assert loss > 0.0


def test_the_fit_treats_the_norm_and_lowers_the_loss() -> None:
    x_TD, outputs, metric = random(2000, D, seed=1), random(12, D, seed=2), random(12, 12, seed=3)
    metric = metric @ metric.T
    latents = fit_latents(x_TD, x_TD.T @ x_TD / 2000, outputs, metric, outputs[:6])
    z = x_TD @ latents.encode.T
    error = x_TD @ outputs.T - z / z.square().mean(dim=1, keepdim=True).sqrt() @ latents.decode.T
    assert 0.5 * float(((error @ metric) * error).sum(dim=1).mean()) == pytest.approx(latents.loss, rel=1e-6)
    assert latents.loss < latents.before
    assert z.square().mean(dim=1).sqrt().mean() == pytest.approx(8.0)


def test_inputs_of_constant_norm_lose_nothing_at_full_rank() -> None:
    x_TD = random(2000, D, seed=1)
    x_TD = x_TD / x_TD.square().mean(dim=1, keepdim=True).sqrt()
    outputs, metric = random(12, D, seed=2), torch.eye(12, dtype=torch.float64)
    latents = fit_latents(x_TD, x_TD.T @ x_TD / 2000, outputs, metric, torch.eye(D, dtype=torch.float64))
    whole = 0.5 * float((x_TD @ outputs.T).square().sum(dim=1).mean())
    assert latents.loss < 1e-5 * whole


def test_the_output_of_a_norm_with_gains_loses_nothing_at_full_rank() -> None:
    x_TD = random(2000, D, seed=1) * random(D, seed=4).exp()  # tokens of correlated numbers
    x_TD = x_TD @ random(D, D, seed=5)
    x_TD = x_TD / x_TD.square().mean(dim=1, keepdim=True).sqrt() * random(D, seed=3).exp()
    outputs, metric = random(12, D, seed=2), torch.eye(12, dtype=torch.float64)
    latents = fit_latents(x_TD, x_TD.T @ x_TD / 2000, outputs, metric, outputs.T @ outputs)
    whole = 0.5 * float((x_TD @ outputs.T).square().sum(dim=1).mean())
    assert latents.loss < 1e-10 * whole


def test_rows_of_heads() -> None:
    decode = random(2 * 2 * WIDTH, 3)
    rows = head_rows(decode, HEADS, 2).view(HEADS, 2, WIDTH, 3)
    for head in range(HEADS):
        torch.testing.assert_close(rows[head, 0], decode.view(2, 2, WIDTH, 3)[0, head // 2])
        torch.testing.assert_close(rows[head, 1], decode.view(2, 2, WIDTH, 3)[1, head // 2])


def test_wrong_numbers_are_refused() -> None:
    x_TD, query, key, moment, gradient = problem(groups=1)
    shares = distance_shares(x_TD, query, key, 1, FREQUENCIES, SCALE)
    key[0, 0] = torch.nan
    with pytest.raises(ValueError, match="keys: 1 of"):
        split_keys(key, moment, gradient, FREQUENCIES, FREQUENCIES[:2], shares)
