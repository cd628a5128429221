"""Factor and inverse in place against torch's, in blocks smaller than the matrix."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.kernels import cholesky
from pipeline.kernels.cholesky import empty_lower, factor_, inverse_, inverse_diagonal, jittered_factor


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 5)


def positive(size: int) -> Tensor:
    rows = torch.randn(size, size + 3, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return rows @ rows.T / size


@pytest.mark.parametrize("size", [1, 4, 5, 6, 10, 23])
def test_factor_and_inverse_read_the_lower_triangle(size: int) -> None:
    matrix = positive(size)
    work = matrix.tril()
    assert factor_(work) is None
    torch.testing.assert_close(work.tril(), torch.linalg.cholesky(matrix))
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(inverse_diagonal(work), inverse.diagonal())
    inverse_(work)
    torch.testing.assert_close(work.tril(), inverse.tril())


@pytest.mark.parametrize("place", [0, 3, 7, 22])
def test_what_stops_a_factor_bounds_the_least_eigenvalue(place: int) -> None:
    matrix = positive(23)
    matrix[place, place] -= 3.0 * float(torch.linalg.eigvalsh(matrix)[-1])
    least = float(torch.linalg.eigvalsh(matrix)[0])
    bound = factor_(matrix.clone())
    assert bound is not None
    assert least - 1e-12 <= bound < 0
    weak = factor_(positive(23), least_pivot=1e6)
    assert weak is not None
    assert weak > 0


def test_jitters_that_cannot_help_are_not_tried() -> None:
    matrix = positive(23)
    values = torch.linalg.eigvalsh(matrix)
    matrix.diagonal().sub_(float(values[0]) + 3e-3)  # the least eigenvalue is now -3e-3
    fills = []

    def fill(into: Tensor) -> None:
        fills.append(1)
        into.copy_(matrix)

    jitters = (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    assert jittered_factor(fill, torch.empty_like(matrix), 1e-10, jitters) == 1e-2
    assert len(fills) <= 4
    with pytest.raises(ValueError, match=r"jitter up to 0\.001"):
        jittered_factor(fill, torch.empty_like(matrix), 1e-10, jitters[:-1])


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[always]" in HUGE_PAGES.read_text(), reason="the system gives huge pages unasked"
)
def test_what_is_above_the_diagonal_takes_no_memory() -> None:
    before = anonymous_bytes()
    matrix = empty_lower(2000, torch.device("cpu"))
    for row in range(2000):
        matrix[row, : row + 1] = 1.0
    assert anonymous_bytes() - before < 0.75 * matrix.nbytes
    assert matrix.sum() == 2000 * 2001 / 2
