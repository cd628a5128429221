"""Shared-subspace Tucker and its sparse core against full SVDs, brute force and the paper's own pruning loop."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pipeline.kernels import tucker as kernel
from pipeline.kernels.tucker import (
    Tucker,
    rebuild,
    refine_sparse,
    shared_tucker,
    stack_attention,
    stack_mlp,
    threshold_cores,
)


def tensors(*shapes: tuple[int, int, int, int], seed: int = 0) -> list[Tensor]:
    """Random tensors with a falling spectrum along D and d, shared by all."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = shapes[0][:2]
    first = torch.randn(hidden, hidden, generator=generator, dtype=torch.float64) * 0.7 ** torch.arange(hidden)
    second = torch.randn(width, width, generator=generator, dtype=torch.float64) * 0.7 ** torch.arange(width)
    cores = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.einsum("xa,yb,abth->xyth", first, second, core) for core in cores]


def unfold(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)


def error_of(whole: list[Tensor], found: Tucker) -> float:
    return sum(float((tensor - again).square().sum()) for tensor, again in zip(whole, rebuild(found), strict=True))


def naive_hooi(whole: list[Tensor], ranks: tuple[int, int, int], sweeps: int) -> list[float]:
    """The same iteration by full SVDs of the unfoldings; energies after each sweep."""

    def left(parts: list[Tensor], mode: int, rank: int) -> Tensor:
        return torch.linalg.svd(torch.cat([unfold(part, mode) for part in parts], 1), full_matrices=False).U[:, :rank]

    first, second = left(whole, 0, ranks[0]), left(whole, 1, ranks[1])
    thirds = [left([tensor], 2, min(ranks[2], tensor.shape[2])) for tensor in whole]
    energies = []
    for _ in range(sweeps):
        parts = [torch.einsum("xyth,yb,tc->xbch", w, second, u) for w, u in zip(whole, thirds, strict=True)]
        first = left(parts, 0, ranks[0])
        parts = [torch.einsum("xyth,xa,tc->aych", w, first, u) for w, u in zip(whole, thirds, strict=True)]
        second = left(parts, 1, ranks[1])
        parts = [torch.einsum("xyth,xa,yb->abth", w, first, second) for w in whole]
        thirds = [left([part], 2, u.shape[1]) for part, u in zip(parts, thirds, strict=True)]
        cores = [torch.einsum("abth,tc->abch", part, u) for part, u in zip(parts, thirds, strict=True)]
        energies.append(sum(float(core.square().sum()) for core in cores))
    return energies


PROBLEMS = [
    ([(1, 1, 1, 1)], (1, 1, 1)),
    ([(12, 4, 4, 3)], (7, 3, 2)),
    ([(12, 4, 4, 3)], (5, 4, 4)),
    ([(12, 4, 2, 6), (12, 4, 2, 2)], (6, 3, 1)),
    ([(12, 4, 2, 6), (12, 4, 2, 2)], (6, 4, 2)),
    ([(6, 40, 3, 1)], (4, 9, 2)),
    ([(40, 2, 2, 1)], (3, 2, 1)),
]


@pytest.mark.parametrize(("shapes", "ranks"), PROBLEMS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_hooi_is_the_one_by_full_svds(
    shapes: list[tuple[int, int, int, int]], ranks: tuple[int, int, int], scale: float
) -> None:
    whole = [tensor * scale for tensor in tensors(*shapes)]
    before = [tensor.clone() for tensor in whole]
    found = shared_tucker(whole, ranks, sweeps=6, tolerance=0.0)
    expected = naive_hooi(whole, ranks, len(found.energies))
    assert found.energies == pytest.approx(expected, rel=1e-9)
    assert all(later >= earlier * (1 - 1e-14) for earlier, later in pairwise(found.energies))
    assert found.energies[-1] == pytest.approx(sum(float(core.square().sum()) for core in found.cores), rel=1e-12)
    assert error_of(whole, found) == pytest.approx(found.error, rel=1e-6, abs=1e-13 * found.total)
    for factor in (found.first, found.second, *found.thirds):
        torch.testing.assert_close(factor.T @ factor, torch.eye(factor.shape[1], dtype=torch.float64))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(whole, before, strict=True))


def test_one_head_and_one_projection_is_the_svd() -> None:
    whole = tensors((9, 6, 1, 1))
    found = shared_tucker(whole, (3, 3, 1))
    best = torch.linalg.svdvals(whole[0][:, :, 0, 0])[3:].square().sum()
    assert found.error == pytest.approx(float(best), rel=1e-9)


@pytest.mark.parametrize("shapes", [[(12, 4, 4, 3)], [(12, 4, 2, 6), (12, 4, 2, 2)], [(6, 40, 3, 1)]])
def test_full_ranks_are_exact(shapes: list[tuple[int, int, int, int]]) -> None:
    whole = tensors(*shapes)
    found = shared_tucker(whole, (shapes[0][0], shapes[0][1], shapes[0][2]))
    for tensor, again in zip(whole, rebuild(found), strict=True):
        torch.testing.assert_close(again, tensor)


def test_sweeps_end_by_tolerance_and_improve_on_the_hosvd() -> None:
    whole = tensors((12, 8, 4, 3))
    exact = shared_tucker(whole, (3, 2, 2), sweeps=50, tolerance=0.0)
    loose = shared_tucker(whole, (3, 2, 2), sweeps=50, tolerance=1e-3)
    assert len(loose.energies) < len(exact.energies)
    assert exact.energies[-1] > exact.energies[0]
    assert len(shared_tucker(whole, (3, 2, 2), sweeps=1).energies) == 1


def test_zero_and_rank_deficient_tensors() -> None:
    zero = shared_tucker([torch.zeros(5, 3, 2, 2)], (2, 2, 1))
    assert zero.error == 0.0
    assert all(bool(torch.isfinite(factor).all()) for factor in (zero.first, zero.second, *zero.thirds))
    thin = [torch.einsum("x,yth->xyth", torch.arange(1.0, 51.0), torch.randn(2, 2, 2))]
    found = shared_tucker(thin, (4, 2, 2))
    assert found.error <= 1e-12 * found.total
    torch.testing.assert_close(found.first.T @ found.first, torch.eye(4, dtype=torch.float64))


def test_attention_and_mlp_stacks() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(8, 6, generator=generator) for _ in range(3))
    output = torch.randn(6, 8, generator=generator)
    (stack,) = stack_attention(query, key, value, output, heads=4, groups=4)
    for head in range(4):
        rows = slice(2 * head, 2 * head + 2)
        parts = (query[rows].T, key[rows].T, value[rows].T, output[:, rows])
        for number, part in enumerate(parts):
            assert torch.equal(stack[:, :, number, head], part.double())
    queries, keys = stack_attention(query, key[:4], value[:4], output, heads=4, groups=2)
    assert queries.shape == (6, 2, 2, 4)
    assert keys.shape == (6, 2, 2, 2)
    assert torch.equal(queries[:, :, 1, 3], output[:, 6:].double())
    assert torch.equal(keys[:, :, 1, 1], value[2:4].T.double())
    (mlp,) = stack_mlp([query, key], output)
    assert mlp.shape == (6, 8, 3, 1)
    assert torch.equal(mlp[:, :, 2, 0], output.double())
    assert torch.equal(mlp[:, :, 1, 0], key.T.double())


def prune_and_refit(whole: list[Tensor], found: Tucker, count: int, rate: float) -> list[Tensor]:
    """Algorithm 1 of the paper, stage II: prune a share of the rest by importance, refit g = ⟨W, B⟩, repeat."""
    cores = [core.clone() for core in found.cores]
    left = sum(core.numel() for core in cores)
    alive = [torch.ones_like(core, dtype=torch.bool) for core in cores]
    while left > count:
        gone = min(math.ceil(rate * left), left - count)
        flat = torch.cat([torch.where(a, c.abs(), math.inf).flatten() for c, a in zip(cores, alive, strict=True)])
        dead = torch.zeros_like(flat, dtype=torch.bool)
        dead[flat.argsort()[:gone]] = True
        parts = dead.split([core.numel() for core in cores])
        alive = [a & ~part.view(a.shape) for a, part in zip(alive, parts, strict=True)]
        pairs = zip(whole, found.thirds, strict=True)
        refit = [torch.einsum("xyth,xa,yb,tc->abch", w, found.first, found.second, third) for w, third in pairs]
        cores = [r * a for r, a in zip(refit, alive, strict=True)]
        left -= gone
    return cores


@pytest.mark.parametrize("shapes", [[(12, 4, 4, 3)], [(12, 4, 2, 6), (12, 4, 2, 2)]])
@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_the_threshold_is_the_papers_loop(shapes: list[tuple[int, int, int, int]], rate: float) -> None:
    whole = tensors(*shapes)
    found = shared_tucker(whole, (8, 4, 2))
    for count in (1, 30, 100):
        direct = threshold_cores(found.cores, count)
        assert sum(int((core != 0).sum()) for core in direct) == count
        for core, looped in zip(direct, prune_and_refit(whole, found, count, rate), strict=True):
            torch.testing.assert_close(core, looped, rtol=1e-9, atol=1e-12)


def test_threshold_counts_ties_and_leaves_its_input() -> None:
    cores = [torch.tensor([1.0, -2.0, 1.0]), torch.tensor([[2.0, -1.0]])]
    kept = threshold_cores(cores, 3)
    assert kept[0].tolist() == [1.0, -2.0, 0.0]
    assert kept[1].tolist() == [[2.0, 0.0]]
    assert cores[0].tolist() == [1.0, -2.0, 1.0]
    assert [core.tolist() for core in threshold_cores(cores, 5)] == [core.tolist() for core in cores]
    assert threshold_cores([torch.zeros(3)], 2)[0].tolist() == [0.0, 0.0, 0.0]
    for count in (0, 6):
        with pytest.raises(ValueError, match=r"count must be within 1\.\.5"):
            threshold_cores(cores, count)
    with pytest.raises(ValueError, match="core: 1 of 2"):
        threshold_cores([torch.tensor([1.0, math.nan])], 1)


@pytest.mark.parametrize("shapes", [[(12, 4, 4, 3)], [(12, 4, 2, 6), (12, 4, 2, 2)]])
def test_refining_lowers_the_true_error(shapes: list[tuple[int, int, int, int]]) -> None:
    whole = tensors(*shapes)
    found = shared_tucker(whole, (10, 4, 4) if len(shapes) == 1 else (10, 4, 2))
    for count in (5, 40, 120):
        plain = refine_sparse(whole, found, count, sweeps=0)
        better = refine_sparse(whole, found, count, sweeps=20, tolerance=1e-9)
        assert error_of(whole, plain) == pytest.approx(plain.error, rel=1e-9)
        assert error_of(whole, better) == pytest.approx(better.error, rel=1e-9)
        assert better.error < plain.error
        assert list(better.energies) == sorted(better.energies)
        assert sum(int((core != 0).sum()) for core in better.cores) <= count
        for factor in (better.first, better.second):
            torch.testing.assert_close(factor.T @ factor, torch.eye(factor.shape[1], dtype=torch.float64))


@pytest.mark.parametrize("singular", [False, True])
def test_polar_factor_maximises_the_trace(singular: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    if singular:
        matrix[:, 2] = 0
    best = kernel._polar(matrix)
    torch.testing.assert_close(best.T @ best, torch.eye(4, dtype=torch.float64))
    trace = float((best * matrix).sum())
    assert trace == pytest.approx(float(torch.linalg.svdvals(matrix).sum()), rel=1e-12)
    for _ in range(50):
        other = torch.linalg.qr(torch.randn(9, 4, generator=generator, dtype=torch.float64)).Q
        assert float((other * matrix).sum()) <= trace


def test_arguments() -> None:
    whole = tensors((6, 4, 2, 2))
    for ranks, name in (((7, 1, 1), "R1"), ((1, 5, 1), "R2"), ((1, 1, 3), "R3"), ((0, 1, 1), "R1")):
        with pytest.raises(ValueError, match=f"{name} must be within"):
            shared_tucker(whole, ranks)
    with pytest.raises(ValueError, match=r"share D and d.*\(5, 4, 2, 2\)"):
        shared_tucker([*whole, torch.ones(5, 4, 2, 2)], (1, 1, 1))
    with pytest.raises(ValueError, match="tensor: 96 of 96"):
        shared_tucker([whole[0] * math.nan], (1, 1, 1))
    with pytest.raises(ValueError, match="sweep"):
        shared_tucker(whole, (1, 1, 1), sweeps=0)
    with pytest.raises(ValueError, match="do not fit 4 query heads and 3"):
        stack_attention(torch.ones(8, 6), torch.ones(6, 6), torch.ones(6, 6), torch.ones(6, 8), 4, 3)
    with pytest.raises(ValueError, match=r"\[\(8, 6\)\] and down \(8, 6\)"):
        stack_mlp([torch.ones(8, 6)], torch.ones(8, 6))
