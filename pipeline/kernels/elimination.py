"""Greedy elimination of MLP channels, and W_down on those that stay (docs/methods.md#mlp, `selection: eliminate`).

N channels, D hidden size, C = Σ h hᵀ their moment, n channels still standing, k that stay, m removals of one panel.
Works on correlations: C and W_down scaled so that diag C = 1, which changes no minimum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_rank
from pipeline.kernels.cholesky import blocks_of, inverse_, jittered_factor
from pipeline.kernels.nystrom import (
    INVERSE_JITTERS,
    LEAST_PIVOT,
    RefitReport,
    Selection,
    channel_diagonal,
    channel_scale,
    check_down,
    correlation_product,
    estimate_condition,
    fill_correlations,
    output_energy,
    refit_with_error,
    triangle_sum,
)

ALONE = 512  # channels: of so many one goes at a time, of twice as many two
MOST_SHARED = 0.1  # partial correlation of channels that go at once


class Elimination(NamedTuple):
    """The channels removed (n,), in `order`; `jitter` as in Selection."""

    order: Tensor
    jitter: float


class Pruned(NamedTuple):
    """The channels that stay, `kept` (k,), W_down refitted to them (D, k), its relative squared output error."""

    kept: Tensor
    weight: Tensor
    error: float
    jitter: float
    report: RefitReport


def select_eliminate(moment_NN: Tensor, weight_down_DN: Tensor, count: int, block: int | None = None) -> Selection:
    """The `count` channels that stay after greedy elimination.

    Removes, one after another, the channel whose removal adds least output error after the best refit of W_down:
    ‖b_j‖² / [C⁻¹]_jj with B the refitted W_down so far; of equal ones the lower index stays. Of many channels N / 512
    go at once, those of least score that are hardly correlated given the rest, as none of a round then changes much for
    another: a step is a dozen small kernels however many it removes. That is exact for every `block`: it is the number
    of removals after which C⁻¹ and BᵀB, otherwise updated only where they are read, are updated as a whole by one
    matrix product (as in a blocked pivoted Cholesky factorisation), and changes speed and rounding only.
    A singular C gets a relative jitter. Needs N² + D·N float64 numbers besides its inputs; N³ + D N² + 3 N² for each
    removal multiplications and additions. Raises ValueError on shapes that do not fit, NaN, infinity, count outside
    1..N, or if C is not positive semidefinite.
    """
    size = check_down(moment_NN, weight_down_DN)
    found = eliminate(moment_NN, weight_down_DN, count, block)
    return Selection(_rest(found.order, size), found.jitter)


def eliminate(moment_NN: Tensor, weight_down_DN: Tensor, count: int, block: int | None = None) -> Elimination:
    """All removals of `select_eliminate` down to `count` channels, in their order. Raises ValueError as it does."""
    state = _Elimination(moment_NN, weight_down_DN, None, count, block)
    return Elimination(state.run(), state.jitter)


def prune(moment_NN: Tensor, weight_down_DN: Tensor, count: int, felt_DN: Tensor | None = None) -> Pruned:
    """`select_eliminate` and the refit of W_down in one: B is brought along while channels go.

    So the refit costs what the removed channels cost, D N for each, and the error is the sum of what each removal
    added. `felt_DN` chooses in place of W_down (its rows as the loss feels them); refit and error are W_down's. Where C
    is singular, W_down is refitted afterwards (`nystrom_refit`). Raises ValueError as `select_eliminate`.
    """
    felt_DN = weight_down_DN if felt_DN is None else felt_DN
    state = _Elimination(moment_NN, felt_DN, weight_down_DN, count, None)
    kept_k, jitter = _rest(state.run(), len(moment_NN)), state.jitter
    if state.lost is None:
        refit_Dk, report, error = refit_with_error(weight_down_DN, moment_NN, kept_k)
        return Pruned(kept_k, refit_Dk, error, jitter, report)
    whole = state.energy if felt_DN is weight_down_DN else output_energy(weight_down_DN, moment_NN)
    error = 0.0 if state.lost <= 0.0 else state.lost / whole if whole > 0.0 else float("inf")
    report = RefitReport(jitter=0.0, condition=state.condition(kept_k), fallback=False, dropped=0)
    return Pruned(kept_k, state.refit_Dn.index_select(1, state.last_k) / state.scale_N[kept_k], error, jitter, report)


class _Elimination:
    """C⁻¹ and BᵀB of the channels that stand: the triangles below and above two diagonals of one (n, n + 1) array."""

    lost: float | None = None  # output error so far; None where the refit is not brought along

    def __init__(
        self, moment_NN: Tensor, felt_DN: Tensor, weight_DN: Tensor | None, count: int, block: int | None
    ) -> None:
        size = check_down(moment_NN, felt_DN)
        require_rank("count", count, size)
        self.panel = (64 if size < 4096 else 128) if block is None else block
        if self.panel < 1:
            raise ValueError(f"block must be at least 1, not {block}")
        self.together = max(1, size // ALONE)
        self.moment_NN, self.size, self.count, self.jitter = moment_NN, size, count, 0.0
        self.scale_N = channel_scale(moment_NN)
        self.live_N = channel_diagonal(moment_NN) > 0
        self.standing_n = torch.arange(size, device=moment_NN.device)
        if count == size:
            return
        self.array = torch.empty(size, size + 1, dtype=torch.float64, device=moment_NN.device)
        self.jitter = jittered_factor(
            lambda into_NN: fill_correlations(into_NN, moment_NN, self.scale_N),
            self.array[:, :size],
            LEAST_PIVOT,
            INVERSE_JITTERS,
        )
        inverse_(self.array[:, :size])
        self.energy = self._fill_gram(felt_DN)
        if weight_DN is not None and not self.jitter:
            check_down(moment_NN, weight_DN)
            self.refit_Dn: Tensor = weight_DN.detach().to(torch.float64) * self.scale_N
            self.lost = 0.0

    def run(self) -> Tensor:
        """The removed channels (N - count,), in order."""
        order, removed = [self.standing_n[:0]], 0
        gone_n = torch.zeros_like(self.standing_n, dtype=torch.bool)
        while removed < self.size - self.count:
            steps = min(self.panel, self.size - self.count - removed)
            places_m = self._remove_panel(gone_n, steps)
            order.append(self.standing_n[places_m])
            removed += steps
            standing = self.size - removed
            # Copies cost n², panels n² x m: compacting by eighths is nearly free and keeps the products small.
            if self.count < standing <= self.standing_n.numel() * 7 // 8:
                stay = (~gone_n).nonzero()[:, 0]
                self._keep(stay)
                gone_n = gone_n[stay]
        self.last_k = (~gone_n).nonzero()[:, 0]
        return torch.cat(order)

    def condition(self, kept_k: Tensor) -> float:
        """Of the correlations of the channels that stay."""
        return estimate_condition(
            lambda vector_k1: correlation_product(self.moment_NN, self.scale_N, kept_k, vector_k1), self._solve, kept_k
        )

    def _solve(self, vector_k1: Tensor) -> Tensor:
        vector_n1 = vector_k1.new_zeros(len(self.array), 1).index_copy_(0, self.last_k, vector_k1)
        solved_n1 = torch.zeros_like(vector_n1)
        for rows in blocks_of(len(vector_n1)):
            left_bn, corner_bb = self._inverse[rows, : rows.start], self._inverse[rows, rows].tril()
            solved_n1[rows] += left_bn @ vector_n1[: rows.start] + corner_bb @ vector_n1[rows]
            solved_n1[: rows.start] += left_bn.mT @ vector_n1[rows]
            solved_n1[rows] += corner_bb.tril(-1).mT @ vector_n1[rows]
        return solved_n1[self.last_k]

    @property
    def _inverse(self) -> Tensor:
        return self.array[:, :-1]

    @property
    def _gram(self) -> Tensor:
        return self.array[:, 1:]

    def _fill_gram(self, felt_DN: Tensor) -> float:
        """BᵀB of what chooses; tr(B C Bᵀ), as it stands against C already. A dead channel gets b = 0: it goes first."""
        # Only ratios of scores count: both scales may be normalised, which keeps the squares within range.
        scale_N = torch.where(self.live_N, self.scale_N, 0.0)
        largest, widest = felt_DN.detach().abs().max().double() or 1.0, scale_N.max() or 1.0
        felt_DN = (felt_DN.detach().double() / largest).mul_(scale_N / widest)
        energy = 0.0
        for rows in blocks_of(self.size):
            upper_bn = felt_DN[:, rows].mT @ felt_DN[:, rows.start :]
            part_bn = self.moment_NN.detach()[rows, rows.start :] / self.scale_N[rows, None]
            part_bn.div_(self.scale_N[rows.start :]).mul_(upper_bn)
            energy += float(triangle_sum(part_bn, rows.stop - rows.start))
            _set_rows_(self.array, rows, self._inverse[rows, : rows.stop], upper_bn)
        return energy * float(largest * widest) ** 2

    def _remove_panel(self, gone_n: Tensor, steps: int) -> Tensor:
        """Removes `steps` channels: marks them in `gone_n`, brings everything up to date, and returns which, in order.

        Removing channels J with R = C⁻¹[J, :], C⁻¹[J, J] = L Lᵀ and X = L⁻¹ R: C⁻¹ -= Xᵀ X and B -= B_J L⁻ᵀ X, hence
        BᵀB -= Pᵀ X + Xᵀ P with P = Y − ½ Y_J L⁻ᵀ X and Y = L⁻¹ (BᵀB)[J, :]. The panel holds the X and P; only rows J
        of either matrix are ever needed before its end. Where channels go one by one, no step waits for the device: the
        index stays a tensor.
        """
        precision_n = self._inverse.diagonal().masked_fill(gone_n, 1.0)
        energy_n = self._gram.diagonal().masked_fill(gone_n, float("inf"))
        changes_mn, pulls_mn = (precision_n.new_empty(steps, gone_n.numel()) for _ in range(2))
        places, filled = [], 0
        while filled < steps:
            changes_sn, pulls_sn = changes_mn[:filled], pulls_mn[:filled]
            # In exact arithmetic 1 / (1 − R²) >= 1 (with a jitter hardly less), and norms are not negative.
            j = self._lowest(energy_n / precision_n)
            rows_jn = _rows(self._inverse, j) - changes_sn.index_select(1, j).T @ changes_sn
            if self.together > 1:
                go = _apart(rows_jn.index_select(1, j), energy_n[j])[: steps - filled]
                j, rows_jn = j[go], rows_jn[go]
            inner_jn = _rows(self._gram.T, j)
            inner_jn = torch.addmm(inner_jn, pulls_sn.index_select(1, j).T, changes_sn, alpha=-1)
            inner_jn = torch.addmm(inner_jn, changes_sn.index_select(1, j).T, pulls_sn, alpha=-1)
            factor_jj = _factor(rows_jn.index_select(1, j))
            change_jn = torch.linalg.solve_triangular(factor_jj, rows_jn, upper=False)
            read_jn = torch.linalg.solve_triangular(factor_jj, inner_jn, upper=False)
            square_jj = torch.linalg.solve_triangular(factor_jj, read_jn.index_select(1, j).T, upper=False)
            pull_jn = torch.addmm(read_jn, square_jj, change_jn, alpha=-0.5)
            precision_n = (precision_n - change_jn.square().sum(dim=0)).clamp_min_(0.5)
            energy_n = (energy_n - 2.0 * (pull_jn * change_jn).sum(dim=0)).clamp_min_(0.0)
            energy_n.index_fill_(0, j, float("inf"))
            gone_n.index_fill_(0, j, True)
            now = slice(filled, filled + len(j))
            changes_mn[now], pulls_mn[now], filled = change_jn, pull_jn, now.stop
            places.append(j)
        places_m = torch.cat(places)
        self._update_(changes_mn, pulls_mn)
        if self.lost is not None:
            self._refit_(changes_mn, places_m)
        return places_m

    def _lowest(self, score_n: Tensor) -> Tensor:
        """Where the lowest scores are, ascending; the last of equal ones first, so that the lower index stays."""
        last = len(score_n) - 1
        if self.together == 1:
            return last - score_n.flip(0).argmin().view(1)
        return last - score_n.flip(0).sort(stable=True).indices[: self.together]

    def _update_(self, changes_mn: Tensor, pulls_mn: Tensor) -> None:
        left_2mn, right_2mn = torch.cat((pulls_mn, changes_mn)), torch.cat((changes_mn, pulls_mn))
        for rows in blocks_of(self.array.shape[0]):
            self._inverse[rows, : rows.start].addmm_(changes_mn[:, rows].mT, changes_mn[:, : rows.start], alpha=-1)
            self._gram[rows, rows.stop :].addmm_(left_2mn[:, rows].mT, right_2mn[:, rows.stop :], alpha=-1)
            lower_bb = changes_mn[:, rows].mT @ changes_mn[:, rows]
            upper_bb = left_2mn[:, rows].mT @ right_2mn[:, rows]
            self.array[rows, rows.start : rows.stop + 1] -= _interlaced(lower_bb, upper_bb)

    def _refit_(self, changes_mn: Tensor, places_m: Tensor) -> None:
        """B -= Σ q xᵀ. The q are the columns of B times the inverse of the changes at their own places."""
        assert self.lost is not None
        own_mm = changes_mn.index_select(1, places_m).triu()
        refit_Dm = self.refit_Dn.index_select(1, places_m)
        removed_Dm = torch.linalg.solve_triangular(own_mm, refit_Dm, upper=True, left=False)
        live_m = self.live_N[self.standing_n[places_m]]
        self.lost += float((removed_Dm.square().sum(dim=0) * live_m).sum())
        self.refit_Dn.addmm_(removed_Dm, changes_mn, alpha=-1)

    def _keep(self, stay: Tensor) -> None:
        """Closes the gaps, in place: no row is written before it has been read."""
        size = stay.numel()
        for rows in blocks_of(size):
            both_bn = self.array.index_select(0, stay[rows])
            lower_bn = both_bn.index_select(1, stay[: rows.stop])
            upper_bn = both_bn.index_select(1, stay[rows.start :] + 1)
            _set_rows_(self.array[:, : size + 1], rows, lower_bn, upper_bn)
        self.array, self.standing_n = self.array[:size, : size + 1], self.standing_n[stay]
        if self.lost is not None:
            self.refit_Dn = self.refit_Dn.index_select(1, stay)


def _rows(lower_nn: Tensor, j: Tensor) -> Tensor:
    """(j, n): rows of the symmetric matrix of which this holds the lower triangle."""
    positions_n = torch.arange(lower_nn.shape[1], device=j.device)
    return torch.where(positions_n <= j[:, None], lower_nn[j], lower_nn[:, j].T)


def _apart(block_jj: Tensor, energy_j: Tensor) -> Tensor:
    """Which of some channels, ascending by score, may go together: those no more than `MOST_SHARED` correlated, given
    all others that stand, with any before them; the first at least.

    Removing one then changes the other's b by a tenth of its norm at most, as the first has the lower score. Those that
    are gone already have an infinite energy.
    """
    diagonal_j = block_jj.diagonal()
    shared_jj = block_jj.square() / diagonal_j / diagonal_j[:, None]
    apart_j = ~(shared_jj > MOST_SHARED**2).tril(-1).any(dim=1)
    return (apart_j & torch.isfinite(energy_j)).nonzero()[:, 0]


def _factor(block_jj: Tensor) -> Tensor:
    """Cholesky, with pivots of at least a half, which they have but for rounding."""
    if len(block_jj) == 1:
        return block_jj.clamp_min(0.5).sqrt()
    factor_jj: Tensor = torch.linalg.cholesky_ex(block_jj)[0]
    return factor_jj


def _set_rows_(array: Tensor, rows: slice, lower_bn: Tensor, upper_bn: Tensor) -> None:
    """Sets some rows of both triangles: (b, up to the last row), and (b, from the first row on)."""
    array[rows, : rows.start] = lower_bn[:, : rows.start]
    array[rows, rows.stop + 1 :] = upper_bn[:, rows.stop - rows.start :]
    corner_bb = _interlaced(lower_bn[:, rows.start :], upper_bn[:, : rows.stop - rows.start])
    array[rows, rows.start : rows.stop + 1] = corner_bb


def _interlaced(lower_bb: Tensor, upper_bb: Tensor) -> Tensor:
    """(b, b + 1): two triangles, each with its diagonal, the upper one a column further right."""
    both = lower_bb.new_zeros(len(lower_bb), len(lower_bb) + 1)
    both[:, :-1] = lower_bb.tril()
    both[:, 1:] += upper_bb.triu()
    return both


def _rest(order_n: Tensor, size: int) -> Tensor:
    gone_N = torch.zeros(size, dtype=torch.bool, device=order_n.device).index_fill_(0, order_n, True)
    return (~gone_N).nonzero()[:, 0]
