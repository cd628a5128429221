"""Eigenvectors, roots and head-wise PCA: the theorems, on a grid of shapes and scales."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.kernels import spectra
from pipeline.kernels.spectra import (
    dropped_share,
    eigh_descending,
    fix_signs,
    head_pca,
    output_gram,
    spectrum,
    symmetric_root,
    weighted_head_pca,
)


def correlated(groups: int, tokens: int, width: int, seed: int = 0) -> Tensor:
    """Correlated values: random ones through a random matrix with a falling spectrum."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(groups, width, width, generator=generator, dtype=torch.float64)
    falling = torch.linspace(0, -1.5, width, dtype=torch.float64).exp()
    return torch.randn(groups, tokens, width, generator=generator, dtype=torch.float64) * falling @ mix


def moment_of(values: Tensor) -> Tensor:
    return values.mT @ values


GRID = [(1, 1, 1), (1, 40, 3), (2, 40, 8), (3, 4, 8)]


@pytest.mark.parametrize(("groups", "tokens", "width"), GRID)
@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-60, 1.0, 1e60, 1e302])
def test_eigh_rebuilds_the_moment(groups: int, tokens: int, width: int, scale: float) -> None:
    moment_Gdd = moment_of(correlated(groups, tokens, width)) * scale
    before = moment_Gdd.clone()
    values_Gd, vectors_Gdd = eigh_descending(moment_Gdd)
    largest = float(moment_Gdd.abs().max())
    rebuilt = vectors_Gdd * values_Gd[:, None] @ vectors_Gdd.mT
    assert float((rebuilt - moment_Gdd).abs().max()) <= 1e-13 * largest + 5e-323
    eye = torch.eye(width, dtype=torch.float64).expand(groups, -1, -1)
    torch.testing.assert_close(vectors_Gdd.mT @ vectors_Gdd, eye)
    assert bool((values_Gd[:, :-1] >= values_Gd[:, 1:]).all())
    assert bool((values_Gd >= 0).all())
    assert torch.equal(moment_Gdd, before)


def test_eigh_ignores_asymmetry_and_reads_every_type() -> None:
    moment = moment_of(correlated(1, 30, 6))[0]
    skew = torch.triu(torch.full((6, 6), 0.1, dtype=torch.float64), 1)
    torch.testing.assert_close(eigh_descending(moment + skew - skew.T)[0], eigh_descending(moment)[0])
    assert eigh_descending(moment.bfloat16())[1].dtype == torch.float64


def test_signs_do_not_depend_on_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = moment_of(correlated(2, 30, 6))
    _, vectors = eigh_descending(moment)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    assert bool((largest > 0).all())
    solver = torch.linalg.eigh

    def flipped(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, columns = solver(matrix)
        return values, -columns

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    assert torch.equal(eigh_descending(moment)[1], vectors)


def test_sign_of_equal_components_is_the_first_ones() -> None:
    _, vectors = eigh_descending(torch.tensor([[2.0, -1.0], [-1.0, 2.0]]))
    assert bool((vectors[0] > 0).all())


@pytest.mark.parametrize(
    ("components", "kept"),
    [
        ([1.0, -1.0], True),  # the first of two equal ones decides
        ([-1.0, 1.0], False),
        ([1.0 - 1e-12, -1.0], True),  # equal but for rounding
        ([-1.0 + 1e-12, 1.0], False),
        ([1.0 - 1e-6, -1.0], False),  # not equal: the largest decides
        ([0.5, -0.25, -1.0], False),
        ([0.0, 0.0], True),
    ],
)
def test_which_component_decides_the_sign(components: list[float], kept: bool) -> None:
    column = torch.tensor(components, dtype=torch.float64)[:, None]
    for scale in (1.0, 1e-200, 1e200):
        assert torch.equal(fix_signs(scale * column), scale * (column if kept else -column))


def test_a_failing_solver_is_tried_again_and_then_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = moment_of(correlated(2, 30, 6))
    expected = eigh_descending(moment)[0]
    solver, calls = torch.linalg.eigh, []

    def failing(times: int, nan: bool = False) -> Any:
        def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(matrix)
            if len(calls) > times:
                return tuple(solver(matrix))
            if nan:
                return matrix[..., 0] * math.nan, matrix
            raise torch.linalg.LinAlgError("did not converge")

        return eigh

    for nan in (False, True):
        calls.clear()
        monkeypatch.setattr(torch.linalg, "eigh", failing(2, nan))
        torch.testing.assert_close(eigh_descending(moment)[0], expected, rtol=0, atol=1e-12 * float(expected.max()))
        assert len(calls) == 3
        assert not torch.equal(calls[2], calls[1])
    calls.clear()
    monkeypatch.setattr(torch.linalg, "eigh", failing(3))
    with pytest.raises(ValueError, match=r"\(2, 6, 6\): no eigenvalue solver converged \(did not converge"):
        eigh_descending(moment)


@pytest.mark.parametrize(("groups", "tokens", "width"), GRID)
@pytest.mark.parametrize("scale", [1e-60, 1.0, 1e60])
def test_roots(groups: int, tokens: int, width: int, scale: float) -> None:
    moment = moment_of(correlated(groups, tokens, width)) * scale
    root, inverse, clipped = symmetric_root(moment)
    assert float((root @ root - moment).abs().max()) <= 2e-10 * float(moment.abs().max())
    eye = torch.eye(width, dtype=torch.float64).expand(groups, -1, -1)
    torch.testing.assert_close(root @ inverse, eye, rtol=0, atol=1e-9)
    assert clipped == groups * max(0, width - tokens)
    assert torch.equal(root, root.mT)


def test_root_of_zero_is_the_identity() -> None:
    batch = torch.stack([torch.zeros(3, 3), torch.eye(3) * 4])
    root, inverse, clipped = symmetric_root(batch)
    torch.testing.assert_close(root, torch.stack([torch.eye(3), torch.eye(3) * 2]).double())
    torch.testing.assert_close(inverse, torch.stack([torch.eye(3), torch.eye(3) / 2]).double())
    assert clipped == 3
    with pytest.raises(ValueError, match="floor"):
        symmetric_root(batch, 0.0)


@pytest.mark.parametrize(("groups", "tokens", "width"), GRID)
def test_dropped_eigenvalues_are_the_squared_error(groups: int, tokens: int, width: int) -> None:
    values = correlated(groups, tokens, width)
    moment_Gdd = moment_of(values)
    for rank in range(1, width + 1):
        basis_Gdr, eigenvalues_Gd = head_pca(moment_Gdd, rank)
        assert basis_Gdr.shape == (groups, width, rank)
        error_G = (values - values @ basis_Gdr @ basis_Gdr.mT).square().sum((1, 2))
        dropped_G = eigenvalues_Gd[:, rank:].sum(1)
        torch.testing.assert_close(error_G, dropped_G, rtol=1e-10, atol=1e-11 * float(moment_Gdd.max()))


def weighted_error(values: Tensor, gram: Tensor, decoder: Tensor, encoder: Tensor) -> Tensor:
    residual = values - values @ encoder.mT @ decoder.mT
    return torch.einsum("gti,gij,gtj->g", residual, gram, residual)


@pytest.mark.parametrize(("groups", "tokens", "width"), GRID)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_weighted_pca_dropped_eigenvalues_are_the_output_error(
    groups: int, tokens: int, width: int, scale: float
) -> None:
    values = correlated(groups, tokens, width)
    gram_Gdd = moment_of(correlated(groups, 3 * width, width, seed=1)) * scale
    before = gram_Gdd.clone()
    moment_Gdd = moment_of(values)
    size = float((gram_Gdd @ moment_Gdd).abs().max())
    for rank in range(1, width + 1):
        encoder_Grd, decoder_Gdr, eigenvalues_Gd, _ = weighted_head_pca(moment_Gdd, gram_Gdd, rank)
        error_G = weighted_error(values, gram_Gdd, decoder_Gdr, encoder_Grd)
        dropped_G = eigenvalues_Gd[:, rank:].sum(1)
        torch.testing.assert_close(error_G, dropped_G, rtol=1e-9, atol=1e-11 * size)
        eye = torch.eye(rank, dtype=torch.float64).expand(groups, -1, -1)
        torch.testing.assert_close(encoder_Grd @ decoder_Gdr, eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(decoder_Gdr @ encoder_Grd, eye, rtol=0, atol=1e-9)
    assert torch.equal(gram_Gdd, before)


def test_weighted_pca_beats_random_projections_and_the_plain_one() -> None:
    values = correlated(2, 60, 6)
    gram_Gdd = moment_of(correlated(2, 20, 6, seed=1))
    generator = torch.Generator().manual_seed(2)
    for rank in (1, 3, 5):
        encoder, decoder, _, _ = weighted_head_pca(moment_of(values), gram_Gdd, rank)
        best_G = weighted_error(values, gram_Gdd, decoder, encoder)
        basis, _ = head_pca(moment_of(values), rank)
        assert bool((best_G < weighted_error(values, gram_Gdd, basis, basis.mT)).all())
        for size in (1.0, 0.1, 0.01):
            for _ in range(20):
                near_decoder = decoder + size * torch.randn(decoder.shape, generator=generator, dtype=torch.float64)
                near_encoder = encoder + size * torch.randn(encoder.shape, generator=generator, dtype=torch.float64)
                assert bool((best_G <= weighted_error(values, gram_Gdd, near_decoder, near_encoder)).all())


def test_weighted_pca_with_an_orthogonal_output_is_the_plain_one() -> None:
    moment_Gdd = moment_of(correlated(2, 60, 6))
    gram_Gdd = 3.0 * torch.eye(6, dtype=torch.float64).expand(2, -1, -1)
    encoder, decoder, eigenvalues, _ = weighted_head_pca(moment_Gdd, gram_Gdd, 4)
    basis, plain = head_pca(moment_Gdd, 4)
    torch.testing.assert_close(encoder, basis.mT)
    torch.testing.assert_close(decoder, basis)
    torch.testing.assert_close(eigenvalues, 3.0 * plain)


def test_weighted_pca_of_a_dead_output_and_of_dead_values() -> None:
    moment_Gdd = moment_of(correlated(1, 60, 4))
    zero = torch.zeros(1, 4, 4)
    for moment, gram in ((moment_Gdd, zero), (zero, moment_Gdd), (zero, zero)):
        encoder, decoder, _, _ = weighted_head_pca(moment, gram, 4)
        torch.testing.assert_close(decoder @ encoder, torch.eye(4, dtype=torch.float64)[None])


def test_output_gram_is_the_sum_over_the_heads_of_a_group() -> None:
    weight_DF = torch.randn(7, 4 * 3, generator=torch.Generator().manual_seed(3)).bfloat16()
    gram_Gdd = output_gram(weight_DF, heads=4, groups=2)
    heads = weight_DF.double().split(3, dim=1)
    torch.testing.assert_close(gram_Gdd[0], heads[0].T @ heads[0] + heads[1].T @ heads[1])
    torch.testing.assert_close(gram_Gdd[1], heads[2].T @ heads[2] + heads[3].T @ heads[3])


def test_arguments() -> None:
    eye = torch.eye(3)[None]
    with pytest.raises(ValueError, match=r"square.*\(2, 3\)"):
        eigh_descending(torch.ones(2, 3))
    with pytest.raises(ValueError, match="moment: 3 of 9"):
        eigh_descending(torch.full((3, 3), math.inf).tril(-1))
    for rank in (0, 4):
        with pytest.raises(ValueError, match=rf"rank must be within 1..3, not {rank}"):
            head_pca(eye, rank)
        with pytest.raises(ValueError, match=rf"rank must be within 1..3, not {rank}"):
            weighted_head_pca(eye, eye, rank)
    with pytest.raises(ValueError, match=r"\(1, 3, 3\).*\(2, 3, 3\)"):
        weighted_head_pca(eye, torch.eye(3).expand(2, 3, 3), 1)
    with pytest.raises(ValueError, match="output_gram: 9 of 9"):
        weighted_head_pca(eye, eye * math.nan, 1)
    assert 0 < spectra.FLOOR < 1


def test_weighted_pca_treats_each_head_by_itself() -> None:
    """Heads of very different output sizes: the factors of each are those of the head alone."""
    values = correlated(3, 50, 6)
    moment_Gdd = moment_of(values)
    gram_Gdd = (
        moment_of(correlated(3, 20, 6, seed=1)) * torch.tensor([1e-6, 1.0, 1e5], dtype=torch.float64)[:, None, None]
    )
    together = weighted_head_pca(moment_Gdd, gram_Gdd, 4)
    for head in range(3):
        alone = weighted_head_pca(moment_Gdd[head : head + 1], gram_Gdd[head : head + 1], 4)
        for whole, part in zip(together[:3], alone[:3], strict=True):
            torch.testing.assert_close(whole[head], part[0])


def test_weighted_pca_clips_at_the_floor_it_is_given() -> None:
    moment_Gdd = moment_of(correlated(1, 50, 4))
    gram_Gdd = torch.diag(torch.tensor([1.0, 0.4, 0.2, 1e-3], dtype=torch.float64))[None]
    assert [weighted_head_pca(moment_Gdd, gram_Gdd, 2, floor)[3] for floor in (1e-10, 1e-2, 0.3, 1.0)] == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dropped_share_is_the_error_of_a_cut(rank: int) -> None:
    weight_mD = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    left_m3, values_3, right_3D = torch.linalg.svd(weight_mD, full_matrices=False)
    cut_mD = left_m3[:, :rank] * values_3[:rank] @ right_3D[:rank]
    expected = float((weight_mD - cut_mD).square().sum() / weight_mD.square().sum())
    assert dropped_share(values_3.square(), rank) == pytest.approx(expected, abs=1e-15)


def test_dropped_share_counts_all_heads_together() -> None:
    assert dropped_share(torch.tensor([[6.0, 1.0], [2.0, 1.0]]), 1) == 0.2
    assert dropped_share(torch.zeros(2, 3), 1) == 0.0


@pytest.mark.parametrize("spectrum", ["even", "decaying", "deficient", "twins"])
def test_problems_beyond_a_solver_s_limit_are_split(spectrum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 20 stands for cuSOLVER's 25,000: the same eigenvalues, orthonormal vectors, the same matrix."""
    size = 64
    values = {
        "even": torch.linspace(1, 2, size),
        "decaying": 0.8 ** torch.arange(size),
        "deficient": torch.cat((torch.zeros(20), torch.linspace(0.1, 5, size - 20))),
        "twins": torch.linspace(1, 4, size // 2).repeat(2),
    }[spectrum].double()
    vectors = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(1)).double()).Q
    matrix = (vectors * values) @ vectors.T
    expected, _ = spectra.eigh_descending(matrix)
    alone = spectra.eigenvalues_descending(matrix)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12 * float(expected.max()))
    monkeypatch.setattr(spectra, "LARGEST_EIGENPROBLEM", 20)
    monkeypatch.setattr(spectra, "_solved", solved := _Sizes())
    found, basis = spectra.eigh_descending(matrix)
    torch.testing.assert_close(spectra.eigenvalues_descending(matrix), found)
    assert max(solved.sizes) <= 20 < sum(solved.sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(values.max()))
    torch.testing.assert_close(basis.T @ basis, torch.eye(size).double(), rtol=0, atol=1e-11)
    torch.testing.assert_close((basis * found) @ basis.T, matrix, rtol=0, atol=1e-11 * float(values.max()))
    stacked, _ = spectra.eigh_descending(torch.stack((matrix, 2 * matrix)))
    torch.testing.assert_close(stacked[1], 2 * found)


def test_a_spectrum_of_one_value_is_solved_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "LARGEST_EIGENPROBLEM", 4)
    values, vectors = spectra.eigh_descending(3 * torch.eye(8).double())
    assert values.tolist() == [3.0] * 8
    assert torch.equal(vectors.T @ vectors, torch.eye(8).double())


class _Sizes:
    """The library's solver, which notes the sizes of its inputs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.solver = spectra._solved

    def __call__(self, symmetric: Tensor) -> tuple[Tensor, Tensor]:
        self.sizes.append(symmetric.shape[-1])
        return self.solver(symmetric)


@pytest.mark.parametrize("shape", [(5,), (48,), (3, 16), (2, 3, 33)])
def test_a_spectrum_is_the_share_dropped_at_each_sixteenth(shape: tuple[int, ...]) -> None:
    energies = torch.rand(shape, dtype=torch.float64).pow(4).sort(dim=-1, descending=True).values
    before = energies.clone()
    found = spectrum(energies)
    expected = [dropped_share(energies, round(step * shape[-1] / 16)) for step in range(17)]
    assert found == pytest.approx(expected, rel=6e-3, abs=1e-12)
    assert (found[0], found[-1]) == (1.0, 0.0)
    assert torch.equal(energies, before)
    assert spectrum(torch.zeros(shape)) == [0.0] * 17
