"""Tables of levels for codes of a few bits: quantiles of the normal distribution, llama.cpp's, or fitted to a matrix.

A code c stands for level · scale, with the level's number c + n/2 in the table. A scale may be negative, so that a
table with more levels on one side serves the side of each group that needs them. docs/methods.md#levels.

Legend: O outputs (rows), I inputs (columns), g columns of a group, S scales of a row (I / g), n levels (2^bits), b
borders between neighbouring levels (n - 1), N numbers.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.packing import code_range, stored_scales

TableKind = Literal["normal", "iq4_nl", "learned"]
LevelKind = Literal["uniform", TableKind]
CLIPS = tuple(1.0 - 0.03 * step for step in range(18))  # of the largest magnitude, tried as scales, of either sign
FED_CLIPS = tuple(1.0 - 0.09 * step for step in range(6))  # tried with error feedback, fewer because both signs are
LLOYD_STEPS = 25
EVEN_BITS = 8  # from here on fits begin at evenly spaced levels, which are better when there are many
FITS = 2  # fits of levels to scaled numbers, each followed by a search for scales
FITTED_NUMBERS = 2**17  # numbers of a matrix, from evenly spread rows, to which levels are fitted
COMPARED_BORDERS, COMPARED_NUMBERS = 15, 256  # at most so many borders, and for each of them at least so many numbers
SEARCHED_NUMBERS = 2**18, 2**26  # numbers whose scales are searched at a time: on a CPU (its cache), on other devices


class Table(NamedTuple):
    """Levels (n), ascending, and scales (O, S), both of the stored dtype."""

    levels: Tensor
    scales: Tensor


def clips_from(clips: tuple[float, ...], least: float) -> tuple[float, ...]:
    """Return the clips, which begin at 1, that are at least `least`."""
    return clips[:1] + tuple(clip for clip in clips[1:] if clip >= least)


def normal_levels(bits: int) -> Tensor:
    """Return quantiles of the normal distribution as levels (n), float64, ascending from -1 to 1.

    From 3 bits on n/2 - 1 of them are negative, one is zero, and n/2 are positive, each side at equally spaced
    probabilities: at 4 bits the table NF4 (Dettmers et al. 2023). At 2 bits they are symmetric, without a zero. Raises
    ValueError unless 2 <= bits <= 8.
    """
    count = -2 * code_range(bits)[0]
    if bits == 2:
        levels_n: Tensor = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
        return levels_n.div_(levels_n[-1].clone())
    last = 1.0 - (0.5 / (count - 1) + 0.5 / count) / 2.0
    lower_n, upper_n = (
        torch.special.ndtri(torch.linspace(0.5, last, steps, dtype=torch.float64))
        for steps in (count // 2, count // 2 + 1)
    )
    return torch.cat((-lower_n.flip(0) / lower_n[-1], upper_n[1:] / upper_n[-1]))


def iq4_nl_levels(bits: int) -> Tensor:
    """Return the levels (16) of llama.cpp's type IQ4_NL (`kvalues_iq4nl` of ggml), float64. Raises ValueError unless
    `bits` is 4."""
    if bits != 4:
        raise ValueError(f"iq4_nl levels are for 4 bits, not {bits}")
    return torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.float64)


FIXED: Mapping[TableKind, Callable[[int], Tensor]] = {"normal": normal_levels, "iq4_nl": iq4_nl_levels}


def uniform_levels(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uniform levels as a table (n): the codes themselves."""
    low, high = code_range(bits)
    return torch.arange(low, high + 1, dtype=dtype, device=device)


def fitted_levels(numbers_N: Tensor, weights_N: Tensor, levels_n: Tensor) -> Tensor:
    """Return levels (n), float64, ascending, of locally least Σ weight · (number - nearest level)².

    LLOYD_STEPS steps of Lloyd's algorithm begin at `levels_n`. A level that is nearest to no number stays.
    """
    order_N = torch.argsort(numbers_N, stable=True)
    numbers_N, weights_N = numbers_N[order_N].to(torch.float64), weights_N[order_N].to(torch.float64)
    sums_2N = torch.nn.functional.pad(torch.stack((weights_N, weights_N * numbers_N)).cumsum(dim=1), (1, 0))
    for _ in range(LLOYD_STEPS):
        ends_b = torch.searchsorted(numbers_N, borders(levels_n))
        ends = torch.cat((ends_b.new_zeros(1), ends_b, ends_b.new_tensor([len(numbers_N)])))
        weight_n, moment_n = sums_2N[:, ends].diff(dim=1)
        levels_n = torch.where(weight_n > 0.0, moment_n / weight_n, levels_n).sort().values
    return levels_n


def borders(levels_n: Tensor) -> Tensor:
    """Return the borders (n - 1) between the numbers that are nearest to each level."""
    return (levels_n[1:] + levels_n[:-1]) / 2.0


def nearest_places(numbers: Tensor, borders_b: Tensor) -> Tensor:
    """Return the place of each number's nearest level in its table, int64: the count of borders below the number.

    `torch.bucketize` is a search, whose branches a CPU cannot predict. A few borders are faster compared one by one.
    """
    few = len(borders_b) <= COMPARED_BORDERS and numbers.numel() >= COMPARED_NUMBERS * len(borders_b)
    if not few or numbers.device.type != "cpu":
        return torch.bucketize(numbers, borders_b)
    counts = torch.zeros(numbers.shape, dtype=torch.int8)
    above = torch.empty(numbers.shape, dtype=torch.bool)
    for border in borders_b.tolist():
        counts += torch.gt(numbers, border, out=above).view(torch.int8)
    return counts.to(torch.int64)


def choose_table(
    weight_OI: Tensor,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    kind: TableKind,
    importance_I: Tensor | None,
    least_clip: float = 0.0,
) -> Table:
    """Choose levels, and a scale for each row and group, of small Σ importance · error².

    Learned levels are fitted to numbers divided by the largest of their group, sign included, then FITS - 1 times to
    numbers divided by their scales. `importance_I`: weights of the columns (None: equal). `least_clip`: the least share
    of a group's largest magnitude that is tried as a scale, with an importance.
    """
    weight_OI, columns = weight_OI.detach(), weight_OI.shape[1]
    clips = CLIPS if importance_I is None else clips_from(FED_CLIPS, least_clip)
    importance_I = weight_OI.new_ones(columns, dtype=torch.float64) if importance_I is None else importance_I
    importance_I = importance_I / importance_I.max()
    width = columns if group is None else group
    if kind in FIXED:
        levels_n = FIXED[kind](bits).to(weight_OI.device, dtype)
        largest = float(levels_n.abs().max())
        return Table(levels_n, _search_scales(weight_OI, width, levels_n, importance_I, clips, largest))
    rows = slice(None, None, max(1, -(-weight_OI.numel() // FITTED_NUMBERS)))
    fitted_oI = weight_OI[rows]
    scales_oS = _signed_peaks(fitted_oI, width)
    levels_n = normal_levels(bits) if bits < EVEN_BITS else torch.linspace(-1.0, 1.0, 2**bits, dtype=torch.float64)
    for _ in range(FITS):
        levels_n = _fit(fitted_oI, scales_oS, levels_n, importance_I)
        scales_oS = _search_scales(fitted_oI, width, levels_n.to(dtype), importance_I, clips)
    levels_n = levels_n.to(dtype)
    same = len(fitted_oI) == len(weight_OI)
    return Table(levels_n, scales_oS if same else _search_scales(weight_OI, width, levels_n, importance_I, clips))


def _fit(weight_OI: Tensor, scales_OS: Tensor, levels_n: Tensor, importance_I: Tensor) -> Tensor:
    """Fit levels to a weight over its scales, on the CPU, where sums have one order."""
    scales_OSg = scales_OS.to(torch.float64)[..., None]
    grouped_OSg = weight_OI.to(torch.float64).unflatten(1, (scales_OS.shape[1], -1))
    sizes_OSg = scales_OSg.abs() / scales_OSg.abs().max()
    weights_OSg = sizes_OSg.square() * importance_I.reshape(scales_OS.shape[1], -1)
    numbers_N, weights_N = (grouped_OSg / scales_OSg).flatten().cpu(), weights_OSg.flatten().cpu()
    return fitted_levels(numbers_N, weights_N, levels_n.to(torch.float64).cpu()).to(weight_OI.device)


def _signed_peaks(weight_OI: Tensor, width: int) -> Tensor:
    """Return the number of largest magnitude (O, S) of each row and group, float64; 1 for groups of zeros."""
    grouped_OSg = weight_OI.to(torch.float64).unflatten(1, (-1, width))
    peaks_OS: Tensor = grouped_OSg.gather(2, grouped_OSg.abs().argmax(dim=2, keepdim=True))[..., 0]
    return peaks_OS.where(peaks_OS != 0.0, 1.0)


def _search_scales(
    weight_OI: Tensor,
    width: int,
    levels_n: Tensor,
    importance_I: Tensor,
    clips: tuple[float, ...],
    largest: float = 1.0,
) -> Tensor:
    """Return scales (O, S) of the levels' dtype of least Σ importance · error² to the nearest level.

    Candidates are `clips` of the largest magnitude over the `largest` level, with either sign. Errors are compared in
    float32, relative to the largest magnitude. Groups of zeros get the smallest scale, because the table may have no
    zero.
    """
    importance_Sg = importance_I.to(torch.float32).reshape(-1, width)
    table_n = levels_n.to(torch.float32)
    borders_b, dtype = borders(table_n), levels_n.dtype
    numbers, scales = SEARCHED_NUMBERS[weight_OI.device.type != "cpu"], []
    for weight_oI in weight_OI.split(max(1, numbers // weight_OI.shape[1])):
        groups_oSg = weight_oI.to(torch.float64).unflatten(1, (-1, width))
        peaks_oS = groups_oSg.abs().amax(dim=-1)
        unit_oS = peaks_oS.where(peaks_oS > 0.0, 1.0)
        shares_oSg = (groups_oSg / unit_oS[..., None]).to(torch.float32)
        best_oS, least_oS = unit_oS, torch.full_like(unit_oS, torch.inf, dtype=torch.float32)
        for factor in (*clips, *(-clip for clip in clips)):
            scales_oS = stored_scales(unit_oS * (factor / largest), dtype)
            steps_oS1 = (scales_oS / unit_oS).to(torch.float32)[..., None]
            nearest_oSg = table_n[nearest_places(shares_oSg / steps_oS1, borders_b)]
            errors_oS = (nearest_oSg.mul_(steps_oS1).sub_(shares_oSg).square_() * importance_Sg).sum(dim=-1)
            better_oS = errors_oS < least_oS
            best_oS, least_oS = best_oS.where(~better_oS, scales_oS), least_oS.where(~better_oS, errors_oS)
        scales.append(best_oS.masked_fill(peaks_oS == 0.0, torch.finfo(dtype).tiny).to(dtype))
    return torch.cat(scales)
