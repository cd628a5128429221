"""Values' basis and output projection fitted together, against the Kronecker system written out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipeline.kernels.value_output import fit_value_output, output_of, value_output_problem

SHAPES = [(24, 4, 4, 6), (24, 4, 2, 6), (20, 4, 1, 5), (16, 1, 1, 8), (7, 6, 3, 4)]  # D, H, G, d


def problem(hidden: int, heads: int, width: int, tokens: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, metric and moment with correlated heads."""
    dice = torch.Generator().manual_seed(seed)
    features = heads * width
    mixing = torch.randn(features, features, generator=dice, dtype=torch.float64) * torch.logspace(
        0, -2, features, dtype=torch.float64
    )
    context = torch.randn(tokens, features, generator=dice, dtype=torch.float64) @ mixing.T
    gradient = torch.randn(3 * hidden, hidden, generator=dice, dtype=torch.float64)
    weight = torch.randn(hidden, features, generator=dice, dtype=torch.float64)
    return weight, gradient.T @ gradient / (3 * hidden), context.T @ context / tokens


def start(groups: int, rank: int, width: int, seed: int = 1) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(groups, width, rank, generator=dice, dtype=torch.float64)).Q.mT.contiguous()


class Fitted(NamedTuple):
    encode: Tensor
    output: Tensor
    loss: float


def fitted(weight: Tensor, metric: Tensor, moment: Tensor, encode: Tensor, *args: Any, **named: Any) -> Fitted:
    prepared = value_output_problem(weight, metric, moment)
    found = fit_value_output(prepared, encode, *args, **named)
    spread = found.outputs @ found.outputs.T * prepared.scale
    output = output_of(weight, prepared, found)
    # What a rank of o is told from: the outputs' moment as the loss feels it, nothing where they never move.
    expected = torch.trace(metric @ output @ wide_moment(prepared.moment, found.encode) @ output.T)
    torch.testing.assert_close(spread.trace(), expected * (moment.any() > 0))
    return Fitted(found.encode, output, found.loss)


def wide_moment(moment: Tensor, encode: Tensor) -> Tensor:
    heads = len(moment) // encode.shape[2]
    wide = torch.block_diag(*encode.repeat_interleave(heads // len(encode), dim=0))
    return wide @ moment @ wide.T


def loss_of(weight: Tensor, metric: Tensor, moment: Tensor, encode: Tensor, output: Tensor) -> float:
    heads = weight.shape[1] // encode.shape[2]
    wide = torch.block_diag(*encode.repeat_interleave(heads // len(encode), dim=0))
    change = weight - output @ wide
    return 0.5 * float(torch.trace(metric @ change @ moment @ change.T))


def best_encoder(weight: Tensor, metric: Tensor, moment: Tensor, encode: Tensor, output: Tensor) -> Tensor:
    """All groups at once, as one dense linear system over vec(E_g)."""
    groups, rank, width = encode.shape
    heads = weight.shape[1] // width
    columns = []
    for group in range(groups):
        for i in range(rank):
            for j in range(width):
                unit = torch.zeros_like(encode)
                unit[group, i, j] = 1.0
                columns.append(output @ torch.block_diag(*unit.repeat_interleave(heads // groups, dim=0)))
    basis = torch.stack(columns)
    weighed = torch.einsum("de,nef,fg->ndg", metric, basis, moment)
    system = torch.einsum("ndg,mdg->nm", weighed, basis)
    target = torch.einsum("ndg,dg->n", weighed, weight)
    return torch.linalg.solve(system, target).reshape(groups, rank, width)


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "heads", "groups", "width"), SHAPES)
def test_the_loss_is_that_of_what_is_returned_and_no_turn_is_worse(
    hidden: int, heads: int, groups: int, width: int
) -> None:
    weight, metric, moment = problem(hidden, heads, width)
    kept = [tensor.clone() for tensor in (weight, metric, moment)]
    for rank in range(1, width):
        losses = []
        for turns in (0, 1, 2, 8):
            found = fitted(weight, metric, moment, start(groups, rank, width), turns, least_gain=0.0)
            assert found.encode.shape == (groups, rank, width)
            assert found.output.shape == (hidden, heads * rank)
            torch.testing.assert_close(found.encode @ found.encode.mT, torch.eye(rank).double().expand(groups, -1, -1))
            whole = 0.5 * float(torch.trace(metric @ weight @ moment @ weight.T))
            assert found.loss == pytest.approx(
                loss_of(weight, metric, moment, found.encode, found.output), rel=1e-4, abs=1e-6 * whole
            )
            losses.append(found.loss)
        assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, (weight, metric, moment), strict=True))


@pytest.mark.parametrize(("hidden", "heads", "groups", "width"), SHAPES)
def test_one_turn_is_the_dense_linear_system(hidden: int, heads: int, groups: int, width: int) -> None:
    weight, metric, moment = problem(hidden, heads, width)
    rank = max(1, width // 2)
    before = fitted(weight, metric, moment, start(groups, rank, width), turns=0)
    encode = best_encoder(weight, metric, moment, before.encode, before.output)
    least = loss_of(weight, metric, moment, encode, before.output)
    after = fitted(weight, metric, moment, start(groups, rank, width), turns=1)
    assert after.loss <= least * (1 + 1e-6)  # the refit that follows can only gain
    again = fitted(weight, metric, moment, encode, turns=0)
    assert after.loss == pytest.approx(again.loss, rel=1e-3)


def test_beside_decoders_within_each_head_the_refit_gains() -> None:
    weight, metric, moment = problem(24, 4, 6)
    encode = start(2, 3, 6)
    within = torch.block_diag(*encode.repeat_interleave(2, dim=0).mT)
    repeat_groups = loss_of(weight, metric, moment, encode, weight @ within)
    assert fitted(weight, metric, moment, encode, turns=0).loss < 0.9 * repeat_groups


def test_at_the_full_rank_nothing_is_lost() -> None:
    weight, metric, moment = problem(24, 4, 6)
    found = fitted(weight, metric, moment, start(2, 6, 6))
    wide = torch.block_diag(*found.encode.repeat_interleave(2, dim=0))
    torch.testing.assert_close(found.output @ wide, weight)
    assert found.loss == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-60, 1.0, 1e60])
@pytest.mark.parametrize("tokens", [3, 400])
def test_singular_tiny_and_huge_moments(scale: float, tokens: int) -> None:
    weight, metric, moment = problem(24, 4, 6, tokens)
    plain = fitted(weight, metric, moment, start(2, 3, 6))
    found = fitted(weight, metric * scale, moment / scale**0.5, start(2, 3, 6))
    assert found.output.isfinite().all()
    whole = 0.5 * float(torch.trace(metric @ weight @ moment @ weight.T))
    assert found.loss / scale**0.5 == pytest.approx(plain.loss, rel=0.05, abs=1e-12 * whole)


def test_a_moment_that_rounding_has_left_indefinite() -> None:
    weight, metric, moment = problem(24, 4, 6, tokens=3)
    values, vectors = torch.linalg.eigh(moment)
    rounded = vectors @ torch.diag(values - 1e-7 * values[-1]) @ vectors.T
    problems = [value_output_problem(weight, metric, each) for each in (moment, rounded)]
    plain, found = (fit_value_output(each, start(2, 3, 6)) for each in problems)
    whole = 0.5 * float(torch.trace(metric @ weight @ moment @ weight.T))
    assert found.loss == pytest.approx(plain.loss, abs=1e-4 * whole)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        value_output_problem(weight, metric, torch.diag(values - values[-1] / 2))


@pytest.mark.parametrize("noise", [1e-9, 1e-8, 1e-7, 1e-6])
def test_no_fit_gains_from_eigenvalues_below_zero(noise: float) -> None:
    """Values of heads from a latent of few numbers: their moment is singular, and its products are rounded."""
    weight, metric, _ = problem(24, 4, 6)
    dice = torch.Generator().manual_seed(2)
    context = torch.randn(400, 12, generator=dice, dtype=torch.float64) @ torch.randn(
        12, 24, generator=dice, dtype=torch.float64
    )
    moment = context.T @ context / 400
    rounding = torch.randn(24, 24, generator=dice, dtype=torch.float64)
    rounded = moment + noise * moment.diagonal().mean() * (rounding + rounding.T)
    whole = 0.5 * float(torch.trace(metric @ weight @ moment @ weight.T))
    for rank in (1, 2, 3, 5):
        exact, found = (fitted(weight, metric, each, start(2, rank, 6)) for each in (moment, rounded))
        true = loss_of(weight, metric, moment, found.encode, found.output)
        assert found.loss == pytest.approx(true, rel=1e-3, abs=1e2 * noise * whole)
        assert true < 1.05 * exact.loss + 1e3 * noise * whole


def test_a_dead_layer_keeps_its_start() -> None:
    weight, metric, _ = problem(24, 4, 6)
    found = fitted(weight, metric, torch.zeros(24, 24), start(2, 3, 6))
    assert found.output.isfinite().all()
    assert fitted(weight, metric * 0, torch.eye(24), start(2, 3, 6)).loss == 0.0


def test_wrong_input_is_refused() -> None:
    weight, metric, moment = problem(24, 4, 6)
    with pytest.raises(ValueError, match="does not fit 24"):
        fitted(weight, metric, moment, start(3, 3, 6))
    with pytest.raises(ValueError, match="do not fit"):
        fitted(weight[:, :-1], metric, moment, start(2, 3, 6))
    for position in range(3):
        bad = [weight.clone(), metric.clone(), moment.clone()]
        bad[position][0, 0] = float("nan")
        with pytest.raises(ValueError, match="NaN"):
            fitted(*bad, start(2, 3, 6))
