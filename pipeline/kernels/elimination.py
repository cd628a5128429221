"""Greedy elimination of MLP channels, and the refit of W_down (docs/methods.md#mlp, `selection: eliminate`).

N channels, D hidden size, C = Σ h hᵀ their moment, n remaining channels, k kept at the end, m removals of one panel.
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
    channel_diagonal,
    channel_scale,
    check_down,
    complement,
    correlation_product,
    estimate_condition,
    fill_correlations,
    output_energy,
    refit_with_error,
    triangle_sum,
)

ALONE = 512  # a step removes N / ALONE channels, at least one
MOST_SHARED = 0.1  # partial correlation of channels that are removed together


class Elimination(NamedTuple):
    """The removed channels in `order`; `jitter` as in Selection."""

    order: Tensor
    jitter: float


class PrunedWeight(NamedTuple):
    """The kept `channels` (k,), the refitted `weight` W_down (D, k) and its relative squared output `error`."""

    channels: Tensor
    weight: Tensor
    error: float
    jitter: float
    report: RefitReport


def eliminate(moment_NN: Tensor, weight_down_DN: Tensor, count: int, block: int | None = None) -> Elimination:
    """Remove channels greedily down to `count`; return the removals in order.

    It removes, one after another, the channel whose removal adds least output error after the best refit of W_down:
    ‖b_j‖² / [C⁻¹]_jj with B the current refit; of equal ones the lower index is kept. With many channels a step removes
    N / 512 at once: those with the lowest scores that are hardly correlated given the rest, so that none changes
    another's score much. A step takes a dozen small kernels, however many channels it removes.

    Between full updates, C⁻¹ and BᵀB are updated only where they are read. After `block` removals, one matrix product
    updates them as a whole, as in a blocked pivoted Cholesky factorisation. `block` changes only speed and rounding. A
    singular C gets a relative jitter. Needs N² + D·N float64 numbers besides its inputs, and N³ + D N² multiplications
    and additions, besides 3 N² for each removal. Raises ValueError on shapes that do not fit, NaN, infinity, count
    outside 1..N, or if C is not positive semidefinite.
    """
    state = _Elimination(moment_NN, weight_down_DN, None, count, block)
    return Elimination(state.run(), state.jitter)


def prune(moment_NN: Tensor, weight_down_DN: Tensor, count: int, weighted_DN: Tensor | None = None) -> PrunedWeight:
    """Eliminate channels and refit W_down at the same time: B is updated with each removal.

    The refit then costs D N for each removed channel, and the error is the sum over all removals. `weighted_DN`, W_down
    in the metric of the loss, replaces W_down in the scores; refit and error are always W_down's. If C is singular,
    W_down is refitted afterwards (`nystrom_refit`). Raises the ValueErrors of `eliminate`.
    """
    weighted_DN = weight_down_DN if weighted_DN is None else weighted_DN
    state = _Elimination(moment_NN, weighted_DN, weight_down_DN, count, None)
    kept_k, jitter = complement(state.run(), len(moment_NN)), state.jitter
    if state.lost is None:
        refit_Dk, report, error = refit_with_error(weight_down_DN, moment_NN, kept_k)
        return PrunedWeight(kept_k, refit_Dk, error, jitter, report)
    whole = state.energy if weighted_DN is weight_down_DN else output_energy(weight_down_DN, moment_NN)
    error = 0.0 if state.lost <= 0.0 else state.lost / whole if whole > 0.0 else float("inf")
    report = RefitReport(jitter=0.0, condition=state.condition(kept_k), fallback=False, dropped=0)
    return PrunedWeight(
        kept_k, state.refit_Dn.index_select(1, state.last_k) / state.scale_N[kept_k], error, jitter, report
    )


class _Elimination:
    """C⁻¹ and BᵀB of the remaining channels: the triangles below and above two diagonals of one (n, n + 1) array."""

    lost: float | None = None  # output error so far; None without a refit

    def __init__(
        self, moment_NN: Tensor, weighted_DN: Tensor, weight_DN: Tensor | None, count: int, block: int | None
    ) -> None:
        size = check_down(moment_NN, weighted_DN)
        require_rank("count", count, size)
        self.panel = (64 if size < 4096 else 128) if block is None else block
        if self.panel < 1:
            raise ValueError(f"block must be at least 1, not {block}")
        self.together = max(1, size // ALONE)
        self.moment_NN, self.size, self.count, self.jitter = moment_NN, size, count, 0.0
        self.scale_N = channel_scale(moment_NN)
        self.live_N = channel_diagonal(moment_NN) > 0
        self.remaining_n = torch.arange(size, device=moment_NN.device)
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
        self.energy = self._fill_gram(weighted_DN)
        if weight_DN is not None and not self.jitter:
            check_down(moment_NN, weight_DN)
            self.refit_Dn: Tensor = weight_DN.detach().to(torch.float64) * self.scale_N
            self.lost = 0.0

    def run(self) -> Tensor:
        """Remove all but `count` channels; return the removed ones (N - count,), in order."""
        order, removed = [self.remaining_n[:0]], 0
        gone_n = torch.zeros_like(self.remaining_n, dtype=torch.bool)
        while removed < self.size - self.count:
            steps = min(self.panel, self.size - self.count - removed)
            places_m = self._remove_panel(gone_n, steps)
            order.append(self.remaining_n[places_m])
            removed += steps
            num_left = self.size - removed
            # Copies cost n², panels n² x m: compacting after each eighth is nearly free and keeps the products small.
            if self.count < num_left <= self.remaining_n.numel() * 7 // 8:
                stay = (~gone_n).nonzero()[:, 0]
                self._keep(stay)
                gone_n = gone_n[stay]
        self.last_k = (~gone_n).nonzero()[:, 0]
        return torch.cat(order)

    def condition(self, kept_k: Tensor) -> float:
        """Estimate the condition of the kept channels' correlations."""
        return estimate_condition(
            lambda vector_k1: correlation_product(self.moment_NN, self.scale_N, kept_k, vector_k1), self._solve, kept_k
        )

    def _solve(self, vector_k1: Tensor) -> Tensor:
        vector_n1 = vector_k1.new_zeros(len(self.array), 1).index_copy_(0, self.last_k, vector_k1)
        solved_n1 = torch.zeros_like(vector_n1)
        for rows in blocks_of(len(vector_n1)):
            before_bn, corner_bb = self._inverse[rows, : rows.start], self._inverse[rows, rows].tril()
            solved_n1[rows] += before_bn @ vector_n1[: rows.start] + corner_bb @ vector_n1[rows]
            solved_n1[: rows.start] += before_bn.mT @ vector_n1[rows]
            solved_n1[rows] += corner_bb.tril(-1).mT @ vector_n1[rows]
        return solved_n1[self.last_k]

    @property
    def _inverse(self) -> Tensor:
        return self.array[:, :-1]

    @property
    def _gram(self) -> Tensor:
        return self.array[:, 1:]

    def _fill_gram(self, weighted_DN: Tensor) -> float:
        """Fill in BᵀB of the scores' weight; return tr(B C Bᵀ). A dead channel gets b = 0: it is removed first."""
        # Only ratios of scores matter: normalising both scales keeps the squares in range.
        scale_N = torch.where(self.live_N, self.scale_N, 0.0)
        largest, widest = weighted_DN.detach().abs().max().double() or 1.0, scale_N.max() or 1.0
        weighted_DN = (weighted_DN.detach().double() / largest).mul_(scale_N / widest)
        energy = 0.0
        for rows in blocks_of(self.size):
            upper_bn = weighted_DN[:, rows].mT @ weighted_DN[:, rows.start :]
            part_bn = self.moment_NN.detach()[rows, rows.start :] / self.scale_N[rows, None]
            part_bn.div_(self.scale_N[rows.start :]).mul_(upper_bn)
            energy += float(triangle_sum(part_bn, rows.stop - rows.start))
            _set_rows_(self.array, rows, self._inverse[rows, : rows.stop], upper_bn)
        return energy * float(largest * widest) ** 2

    def _remove_panel(self, gone_n: Tensor, steps: int) -> Tensor:
        """Remove `steps` channels: mark them in `gone_n`, update the state, and return their positions in order.

        Removing channels J with R = C⁻¹[J, :], C⁻¹[J, J] = L Lᵀ and X = L⁻¹ R: C⁻¹ -= Xᵀ X and B -= B_J L⁻ᵀ X, hence
        BᵀB -= Pᵀ X + Xᵀ P with P = Y − ½ Y_J L⁻ᵀ X and Y = L⁻¹ (BᵀB)[J, :]. The panel holds the X and P; before its
        end only the rows J of either matrix are needed. If channels are removed one by one, no step waits for the
        device: the index stays a tensor.
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
        """Positions of the lowest scores, ascending; the last of equal ones first, so that the lower index is kept."""
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
        """B -= Σ q xᵀ, where the q are the removed columns of B times the inverse of the changes at their positions."""
        assert self.lost is not None
        own_mm = changes_mn.index_select(1, places_m).triu()
        refit_Dm = self.refit_Dn.index_select(1, places_m)
        removed_Dm = torch.linalg.solve_triangular(own_mm, refit_Dm, upper=True, left=False)
        live_m = self.live_N[self.remaining_n[places_m]]
        self.lost += float((removed_Dm.square().sum(dim=0) * live_m).sum())
        self.refit_Dn.addmm_(removed_Dm, changes_mn, alpha=-1)

    def _keep(self, stay: Tensor) -> None:
        """Compact the arrays in place: no row is written before it has been read."""
        size = stay.numel()
        for rows in blocks_of(size):
            both_bn = self.array.index_select(0, stay[rows])
            lower_bn = both_bn.index_select(1, stay[: rows.stop])
            upper_bn = both_bn.index_select(1, stay[rows.start :] + 1)
            _set_rows_(self.array[:, : size + 1], rows, lower_bn, upper_bn)
        self.array, self.remaining_n = self.array[:size, : size + 1], self.remaining_n[stay]
        if self.lost is not None:
            self.refit_Dn = self.refit_Dn.index_select(1, stay)


def _rows(lower_nn: Tensor, j: Tensor) -> Tensor:
    """Return rows (j, n) of the symmetric matrix with this lower triangle."""
    positions_n = torch.arange(lower_nn.shape[1], device=j.device)
    return torch.where(positions_n <= j[:, None], lower_nn[j], lower_nn[:, j].T)


def _apart(block_jj: Tensor, energy_j: Tensor) -> Tensor:
    """Return positions of channels, ascending by score, that may be removed together.

    Each has a partial correlation of at most `MOST_SHARED` with all before it, given all other remaining channels; the
    first always qualifies. Removing one then changes another's b by a tenth of its norm at most, as the first has the
    lower score. Removed channels have an infinite energy and never qualify.
    """
    diagonal_j = block_jj.diagonal()
    shared_jj = block_jj.square() / diagonal_j / diagonal_j[:, None]
    apart_j = ~(shared_jj > MOST_SHARED**2).tril(-1).any(dim=1)
    return (apart_j & torch.isfinite(energy_j)).nonzero()[:, 0]


def _factor(block_jj: Tensor) -> Tensor:
    """Cholesky factor; a single pivot is raised to a half, which only rounding can violate."""
    if len(block_jj) == 1:
        return block_jj.clamp_min(0.5).sqrt()
    factor_jj: Tensor = torch.linalg.cholesky_ex(block_jj)[0]
    return factor_jj


def _set_rows_(array: Tensor, rows: slice, lower_bn: Tensor, upper_bn: Tensor) -> None:
    """Set some rows of both triangles: (b, up to the last row), and (b, from the first row on)."""
    array[rows, : rows.start] = lower_bn[:, : rows.start]
    array[rows, rows.stop + 1 :] = upper_bn[:, rows.stop - rows.start :]
    corner_bb = _interlaced(lower_bn[:, rows.start :], upper_bn[:, : rows.stop - rows.start])
    array[rows, rows.start : rows.stop + 1] = corner_bb


def _interlaced(lower_bb: Tensor, upper_bb: Tensor) -> Tensor:
    """Combine two triangles with their diagonals into (b, b + 1), the upper one a column to the right."""
    both = lower_bb.new_zeros(len(lower_bb), len(lower_bb) + 1)
    both[:, :-1] = lower_bb.tril()
    both[:, 1:] += upper_bb.triu()
    return both
