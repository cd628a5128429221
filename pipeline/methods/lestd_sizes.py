"""Sizes of sparse Tucker decompositions, and the ranks with the least error at a size. docs/methods.md#lestd.

Legend: D hidden, W width of mode 2 (head_dim d, or N), t projections stacked, h heads, R1 R2 R3 ranks, g core entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.selection import nth_largest

Ranks3 = tuple[int, int, int]

GRID_PER_OCTAVE = 4  # thresholds of a size curve
GRID_OCTAVES = 20  # below the largest |g|; smaller entries have at most 1e-12 of its square


@dataclass(frozen=True)
class ProblemShape:
    """The tensors (D, W, t, h) of one problem, which share U₁ (D, R1) and U₂ (W, R2); U₃ (t, R3) and core are its own.

    Attributes:
        stacks: (t, h) of every tensor; R3 is cut to t.
        bits: bits of a stored number. The index of a sparse core has one bit for each position, in whole bytes.
        cores: for each tensor, the end of the names of its U₃ and core; `own`: of those of U₁ and U₂.
    """

    hidden: int
    width: int
    stacks: tuple[tuple[int, int], ...]
    bits: int
    cores: tuple[str, ...] = ("",)
    own: str = ""

    @property
    def full(self) -> Ranks3:
        """Return the full ranks."""
        return self.hidden, self.width, max(t for t, _ in self.stacks)

    @property
    def dense(self) -> int:
        """Count the numbers of the weights."""
        return self.hidden * self.width * sum(t * h for t, h in self.stacks)

    def positions(self, ranks: Ranks3) -> list[int]:
        """Count the entries of each core."""
        return [ranks[0] * ranks[1] * min(ranks[2], t) * h for t, h in self.stacks]

    def factors(self, ranks: Ranks3) -> int:
        """Count the numbers of U₁, U₂ and every U₃."""
        return self.hidden * ranks[0] + self.width * ranks[1] + sum(t * min(ranks[2], t) for t, _ in self.stacks)

    def index(self, ranks: Ranks3) -> int:
        """Return the size of the bitmaps, in numbers."""
        return sum(math.ceil(math.ceil(count / 8) * 8 / self.bits) for count in self.positions(ranks))

    def with_dense_core(self, ranks: Ranks3) -> int:
        """Count the numbers stored with whole cores, without index."""
        return self.factors(ranks) + sum(self.positions(ranks))

    def sparse_room(self, ranks: Ranks3, size: int) -> int:
        """Return the number of core entries that fit into a size, less one for each further core, as none may be
        empty."""
        return size - self.factors(ranks) - self.index(ranks) - (len(self.stacks) - 1)


@dataclass(frozen=True)
class Rule:
    """Limits the choices of ranks and core entries.

    Attributes:
        ranks: the entry's ranks, or None.
        prune: make cores sparse.
        whole: with `prune`, allow whole cores if they are better.
        search_width: search R2; otherwise R2 = W.
        multiple: R1 and R2 are multiples of it or whole, unless the entry sets them.
    """

    ranks: Ranks3 | None
    prune: bool
    whole: bool
    search_width: bool
    multiple: int = 1

    def least(self, shape: ProblemShape) -> int:
        """Return the smallest size at which there is a choice."""
        least = min(self.multiple, shape.hidden), min(self.multiple, shape.width) if self.search_width else shape.width
        ranks = self.ranks or (*least, shape.full[2])
        sparse = shape.factors(ranks) + shape.index(ranks) + len(shape.stacks)
        whole = shape.with_dense_core(ranks)
        return sparse if self.prune and not self.whole else min(sparse, whole) if self.prune else whole

    def most(self, shape: ProblemShape) -> int:
        """Return the largest useful size: of the dense weights, or of the entry's ranks with a whole core."""
        if self.ranks is None:
            return shape.dense
        return max(shape.with_dense_core(self.ranks), self.least(shape))


@dataclass(frozen=True)
class SizeChoice:
    """Ranks, and the number of core entries that are kept; None: all, stored whole."""

    ranks: Ranks3
    count: int | None


def choices(shape: ProblemShape, rule: Rule, size: int) -> Iterator[SizeChoice]:
    """Yield choices that fit into a size (or the least one): ranks by eighths and halvings, and the largest R1."""
    size = max(size, rule.least(shape))
    for ranks in _grid(shape, rule):
        if shape.with_dense_core(ranks) <= size and (rule.whole or not rule.prune):
            yield SizeChoice(ranks, None)
        elif rule.prune and (room := shape.sparse_room(ranks, size)) >= 1:
            yield SizeChoice(ranks, min(room, sum(shape.positions(ranks))))
    if rule.ranks is None and (rule.whole or not rule.prune):
        for width_rank in _widths(shape, rule):
            rest = shape.full[2]
            per_rank = shape.with_dense_core((2, width_rank, rest)) - shape.with_dense_core((1, width_rank, rest))
            most = 1 + (size - shape.with_dense_core((1, width_rank, rest))) // per_rank
            rank = shape.hidden if most >= shape.hidden else most // rule.multiple * rule.multiple
            if rank >= 1:
                yield SizeChoice((rank, width_rank, rest), None)


def best_choice(options: Sequence[SizeChoice], squares: Sequence[Tensor]) -> SizeChoice:
    """Return the choice whose cores keep the most energy; among equals, the first.

    `squares`: g² of the cores at full rank, in the basis of the HOSVD. Their leading blocks approximate the cores at
    smaller ranks; for R1 alone they are exact.
    """
    return max(options, key=lambda choice: _kept_energy(_blocks(squares, choice.ranks), choice.count))


def size_curve(shape: ProblemShape, rule: Rule, squares: Sequence[Tensor]) -> dict[str, Any]:
    """Return the best size at thresholds τ = 2^(j / GRID_PER_OCTAVE), j = first, first + 1, …; it falls with τ.

    At every τ, the size minimises squared error + τ² · stored numbers over all ranks. Cores are cut at τ, and a number
    of the factors or the index must reduce the error as much as a core entry does. `squares` as in `best_choice`.
    """
    peak = max(float(square.max()) for square in squares)
    if peak == 0.0:
        return {"first": 0, "sizes": [rule.least(shape)]}
    last = math.floor(GRID_PER_OCTAVE * math.log2(peak) / 2) + 1
    first = last - GRID_PER_OCTAVE * GRID_OCTAVES
    price = (2.0 * torch.arange(first, last + 1, dtype=torch.float64) / GRID_PER_OCTAVE).exp2()
    total = sum(float(square.sum(dtype=torch.float64)) for square in squares)
    bins = [_bins(square, first, len(price)) for square in squares]
    best_cost, best_size = torch.full_like(price, math.inf), torch.zeros_like(price)
    offers = [(torch.full_like(price, shape.dense), torch.zeros_like(price))] if rule.ranks is None else []
    for ranks in _grid(shape, rule):
        above, energy = _above(_blocks(bins, ranks), _blocks(squares, ranks), len(price))
        fixed = shape.factors(ranks) + shape.index(ranks) + len(shape.stacks) - 1
        offers.append((fixed + above.clamp_min(1), total - energy))
        if rule.whole:
            whole_energy = torch.full_like(price, float(energy[0]))
            offers.append((torch.full_like(price, shape.with_dense_core(ranks)), total - whole_energy))
    for size, error in offers:
        cost = error.clamp_min(0.0) + price * size
        better = cost < best_cost
        best_cost, best_size = torch.where(better, cost, best_cost), torch.where(better, size, best_size)
    return {"first": first, "sizes": [int(size) for size in best_size]}


def sizes_at_common_threshold(curves: Sequence[Mapping[str, Any]], most: Sequence[int], target: float) -> list[float]:
    """Return the sizes of the curves at the threshold at which they add up to `target`. Below a curve's first
    threshold, its size is `most`."""
    low = min(curve["first"] for curve in curves) - 1.0
    high = float(max(curve["first"] + len(curve["sizes"]) for curve in curves))

    def at(position: float) -> list[float]:
        return [_size_at(curve, cap, position) for curve, cap in zip(curves, most, strict=True)]

    for _ in range(40):
        middle = 0.5 * (low + high)
        if sum(at(middle)) > target:
            low = middle
        else:
            high = middle
    return at(high)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a mask into a bitmap (ceil(n / 8),) of uint8: entry i is bit i % 8, from the lowest, of byte i // 8."""
    flat = mask.reshape(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(dim=1, dtype=torch.uint8)


def _size_at(curve: Mapping[str, Any], most: int, position: float) -> float:
    """Interpolate linearly between two thresholds."""
    sizes, place = curve["sizes"], position - curve["first"]
    if place <= -1.0:
        return float(most)
    below = math.floor(place)
    if below >= len(sizes) - 1:
        return float(sizes[-1])
    lower = most if below < 0 else sizes[below]
    return float(lower + (place - below) * (sizes[below + 1] - lower))


def _grid(shape: ProblemShape, rule: Rule) -> list[Ranks3]:
    if rule.ranks is not None:
        return [rule.ranks]
    return [
        (rank, width, shape.full[2]) for rank in _steps(shape.hidden, rule.multiple) for width in _widths(shape, rule)
    ]


def _widths(shape: ProblemShape, rule: Rule) -> list[int]:
    return _steps(shape.width, rule.multiple) if rule.search_width else [shape.width]


def _steps(limit: int, multiple: int) -> list[int]:
    """Return the eighths of a limit and, below the first, halvings, rounded down to multiples except the limit."""
    even = {limit * eighth // 8 for eighth in range(1, 9)} | {limit >> half for half in range(3, 32)}
    cut = {step // multiple * multiple for step in even} | {min(multiple, limit), limit}
    return sorted(step for step in cut if step >= min(multiple, limit))


def _blocks(cores: Sequence[Tensor], ranks: Ranks3) -> list[Tensor]:
    return [core[: ranks[0], : ranks[1], : ranks[2]].reshape(-1) for core in cores]


def _kept_energy(blocks: Sequence[Tensor], count: int | None) -> float:
    """Sum the `count` largest squares."""
    flat = torch.cat(list(blocks))
    if count is None or count >= len(flat):
        return float(flat.sum(dtype=torch.float64))
    bound = nth_largest(flat, count)
    over = flat[flat > bound]
    return float(over.sum(dtype=torch.float64)) + float(bound) * (count - len(over))


def _bins(square: Tensor, first: int, count: int) -> Tensor:
    """Return the index, from 1, of the largest threshold that |g| reaches; 0 below the first."""
    place = torch.floor(0.5 * GRID_PER_OCTAVE * square.log2()) - first + 1
    return place.clamp_(0, count).to(torch.int16)


def _above(bins: Sequence[Tensor], squares: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Count the entries that reach each threshold, and sum their energy."""
    places = torch.cat(list(bins)).long()
    numbers = torch.bincount(places, minlength=count + 1).double().cpu()
    # `bincount` with weights would add in a different order in each run on a GPU.
    energies = torch.zeros(count + 1, dtype=torch.float64, device=places.device)
    energies = energies.index_add_(0, places, torch.cat(list(squares)).double()).cpu()
    return numbers.flip(0).cumsum(0).flip(0)[1:], energies.flip(0).cumsum(0).flip(0)[1:]
