"""Fitted turns against rotations written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.fitted_turns import fit_turns, read_and_slope, turn_problem
from pipeline.kernels.latent import SplitKeys, complex_rows, distance_shares, split_keys, turns
from tests.kernels.test_latent import FREQUENCIES, SCALE, WIDTH, problem
from tests.tensors import random

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(groups: int, shared: int = 8, density: int = 2) -> Inputs:
    x_TD, query, key, moment, gradient = problem(groups)
    shares = distance_shares(x_TD, query, key, groups, FREQUENCIES, SCALE)
    return key, moment, gradient, FREQUENCIES, turns(FREQUENCIES, shared, density), shares


def written_out(split: SplitKeys, given: Inputs) -> float:
    """The loss of a split: the changes of each complex number at each distance."""
    key, moment, gradient, own, turned, shares = given
    groups, pairs = len(shares), len(own)
    root = torch.linalg.cholesky(moment)
    source, rest = (complex_rows(rows @ root, pairs) for rows in (key, split.rest))
    common = torch.complex(split.shared[::2], split.shared[1::2]) @ root.to(torch.complex128)
    read = torch.complex(split.read[:, ::2, :pairs], split.read[:, 1::2, :pairs]).conj()
    total = 0.0
    for group in range(groups):
        feels = gradient.diagonal().view(groups, 2, pairs)[group].sum(dim=0)
        for distance, share in enumerate(shares[group].tolist()):
            at = torch.exp(-1j * distance * own)[:, None] * source[group] - rest[group]
            at = at - read[group].T @ (torch.exp(-1j * distance * turned)[:, None] * common)
            total += 0.25 * share * float(feels @ at.abs().square().sum(dim=1))
    return total


@pytest.mark.parametrize(("groups", "shared", "density"), [(2, 8, 1), (2, 8, 2), (4, 12, 3)])
def test_the_loss_is_that_of_keys_at_every_distance(groups: int, shared: int, density: int) -> None:
    given = inputs(groups, shared, density)
    start = split_keys(*given)
    refitted, fitted = fit_turns(start, *given, steps=0), fit_turns(start, *given)
    for split in (refitted, fitted):
        assert split.loss == pytest.approx(written_out(split, given), rel=1e-5)
    assert fitted.loss < refitted.loss < written_out(start, given)


def test_the_slope_is_that_of_the_loss() -> None:
    of = turn_problem(*inputs(2))
    encode = torch.complex(random(4, WIDTH, seed=1), random(4, WIDTH, seed=2))
    step = 1e-6 * torch.complex(random(4, WIDTH, seed=3), random(4, WIDTH, seed=4))
    _, _, slope = read_and_slope(encode, of)
    ahead, behind = (read_and_slope(encode + sign * step, of)[1] for sign in (1, -1))
    assert (ahead - behind) / 2 == pytest.approx(float((slope.conj() * step).sum().real), rel=1e-4)


def test_an_exact_start_stays_and_inputs_are_unchanged() -> None:
    given = inputs(1, WIDTH, 1)
    before = [each.clone() for each in given]
    start = split_keys(*given)
    assert fit_turns(start, *given) is start
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


def test_turns_without_a_number_get_one() -> None:
    given = inputs(2, 8, 1)
    start = split_keys(*given)
    silent = torch.cat((start.shared[:4], torch.zeros_like(start.shared[4:])))
    fitted = fit_turns(start._replace(shared=silent), *given)
    assert fitted.loss == pytest.approx(fit_turns(start, *given).loss, rel=0.2)
    assert bool((fitted.shared.abs().sum(dim=1) > 0.0).all())
