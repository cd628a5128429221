"""A narrower latent behind an RMS norm, against the norm and the reader written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from pipeline.kernels.narrow_latent import NarrowedLatent, narrowed_latent
from pipeline.kernels.sensitivity import Directions, input_directions

EPS = 1e-6
D, BEHIND, K, TOKENS = 20, 3, 17, 4000


def normed(c_TL: Tensor, weight_L: Tensor) -> Tensor:
    return weight_L * c_TL * (c_TL.square().mean(dim=1, keepdim=True) + EPS).rsqrt()


class Problem:
    """A latent of L numbers of random text, and everything that a method knows of it."""

    def __init__(self, width: int, true_width: int | None = None, bias: bool = False, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.inputs_TD = draw(TOKENS, D) * torch.linspace(0.2, 2.0, D, dtype=torch.float64)
        inner = true_width or width
        basis_LL = torch.linalg.qr(draw(width, width)).Q
        self.writer = torch.cat((basis_LL[:, :inner] @ draw(inner, D), draw(BEHIND, D)))
        self.bias = torch.cat((basis_LL[:, :inner] @ draw(inner), draw(BEHIND))) if bias else None
        self.norm, self.reader = 1.0 + 0.3 * draw(width), draw(K, width)
        self.latent_TL = self.written(self.writer, self.bias)[:, :width]
        self.normed_TL = normed(self.latent_TL, self.norm)
        metric_KK = draw(K, K)
        self.metric_KK = metric_KK @ metric_KK.T
        self.moment_LL = self.latent_TL.T @ self.latent_TL / TOKENS

    def written(self, writer: Tensor, bias: Tensor | None) -> Tensor:
        return self.inputs_TD @ writer.T + (0.0 if bias is None else bias)

    def narrowed(self, rank: int) -> NarrowedLatent:
        seen_LL = self.normed_TL.T @ self.normed_TL / TOKENS
        d = input_directions(seen_LL, self.reader.T @ self.metric_KK @ self.reader)
        cut = Directions(d.values, d.encode[:rank], d.decode[:, :rank])
        return narrowed_latent(self.writer, self.bias, self.norm, self.reader, cut, self.moment_LL, EPS)

    def read(self, parts: NarrowedLatent) -> Tensor:
        latent_Tr = self.written(parts.writer, parts.bias)[:, : len(parts.norm)]
        return normed(latent_Tr, parts.norm) @ parts.reader.T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [4, 9, 16])
def test_at_the_full_width_nothing_changes(width: int, bias: bool) -> None:
    problem = Problem(width, bias=bias)
    copies = [x.clone() for x in (problem.writer, problem.norm, problem.reader, problem.moment_LL)]
    parts = problem.narrowed(width)
    assert parts.beside < 1e-12
    assert torch.allclose(problem.read(parts), problem.normed_TL @ problem.reader.T, rtol=1e-9, atol=1e-9)
    inputs = (problem.writer, problem.norm, problem.reader, problem.moment_LL)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_a_latent_of_low_rank_loses_nothing(bias: bool) -> None:
    """Where c has no part beside the directions that stay, the norm of fewer numbers is the norm."""
    problem = Problem(12, true_width=5, bias=bias)
    parts = problem.narrowed(5)
    assert torch.allclose(problem.read(parts), problem.normed_TL @ problem.reader.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 5, 8])
def test_the_norm_is_guessed_from_what_stays(rank: int) -> None:
    """What is read is the best projection of n, times √(‖c‖² + Lε) / √(‖By‖² + ρ + Lε), token by token."""
    problem = Problem(12)
    parts = problem.narrowed(rank)
    seen_LL = problem.normed_TL.T @ problem.normed_TL / TOKENS
    d = input_directions(seen_LL, problem.reader.T @ problem.metric_KK @ problem.reader)
    project_LL, kept_Tr = d.decode[:, :rank] @ d.encode[:rank], problem.latent_TL @ (d.encode[:rank] * problem.norm).T
    guessed_TL = kept_Tr @ torch.linalg.lstsq(kept_Tr, problem.latent_TL).solution
    energy_T, guessed_T = problem.latent_TL.square().sum(1), guessed_TL.square().sum(1)
    rest = float((energy_T - guessed_T).mean())
    factor_T1 = ((energy_T + 12 * EPS) / (guessed_T + rest + 12 * EPS)).sqrt()[:, None]
    expected = factor_T1 * (problem.normed_TL @ project_LL.T @ problem.reader.T)
    assert torch.allclose(problem.read(parts), expected, rtol=1e-6, atol=1e-6)
    assert parts.beside == pytest.approx(rest / float(energy_T.mean()), rel=1e-6)
    assert torch.equal(parts.writer[rank:], problem.writer[12:])


def test_the_mean_is_better_than_no_rest() -> None:
    """The error of the norm is a part of what the narrower norm alone would add."""
    problem = Problem(12)
    whole = problem.normed_TL @ problem.reader.T
    errors = []
    for moment_LL in (problem.moment_LL, torch.zeros_like(problem.moment_LL)):
        problem.moment_LL = moment_LL
        errors.append(float((problem.read(problem.narrowed(6)) - whole).square().mean()))
    assert errors[0] < 0.9 * errors[1]


def test_transformers_norms_have_this_epsilon() -> None:
    from pipeline.methods.loss_aware.latents import NORM_EPS

    assert DeepseekV3RMSNorm(4).variance_epsilon == NORM_EPS


def test_shapes_that_do_not_fit_are_refused() -> None:
    problem = Problem(6)
    d = input_directions(torch.eye(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64))
    cut = Directions(d.values, d.encode[:3], d.decode[:, :3])
    with pytest.raises(ValueError, match="do not fit"):
        narrowed_latent(problem.writer, None, problem.norm[:5], problem.reader, cut, problem.moment_LL, EPS)
    with pytest.raises(ValueError, match="writer"):
        narrowed_latent(problem.writer, None, problem.norm, problem.reader, cut, problem.moment_LL[:5], EPS)


@pytest.mark.parametrize(("rank", "true_width", "error"), [(12, 12, 1e-9), (5, 5, 1e-5), (8, 12, 0.1)])
def test_the_moment_of_what_the_reader_reads_follows_from_that_of_n(rank: int, true_width: int, error: float) -> None:
    """Exact where the norm is: rounding of the reader needs it, and no pass through the narrower latent."""
    problem = Problem(12, true_width=true_width)
    parts = problem.narrowed(rank)
    read_Tr = normed(problem.written(parts.writer, parts.bias)[:, :rank], parts.norm)
    moment_rr, seen_LL = read_Tr.T @ read_Tr / TOKENS, problem.normed_TL.T @ problem.normed_TL / TOKENS
    assert (parts.read @ seen_LL @ parts.read.T - moment_rr).norm() <= error * moment_rr.norm()
