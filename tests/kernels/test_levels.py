"""Tables of levels: the published table of NF4, Lloyd's steps against all partitions, scales against all candidates."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.gptq import CLIPS as UNIFORM_CLIPS
from pipeline.kernels.gptq import Rounded, error_feedback, round_to_nearest, round_with_feedback, rounding_error
from pipeline.kernels.levels import (
    CLIPS,
    FED_CLIPS,
    TableKind,
    borders,
    choose_table,
    clips_from,
    fitted_levels,
    iq4_nl_levels,
    nearest_places,
    normal_levels,
)
from pipeline.kernels.packing import scaled
from tests.tensors import random

NF4 = [  # bitsandbytes, csrc/kernels.cu
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
DAMPING = 0.1
OF_BITS: list[tuple[TableKind, int]] = [
    *((kind, bits) for kind in ("normal", "learned") for bits in (2, 3, 4)),
    ("iq4_nl", 4),
]
KINDS: tuple[TableKind, ...] = ("normal", "learned")


def test_four_bits_are_those_of_nf4() -> None:
    assert torch.allclose(normal_levels(4), torch.tensor(NF4, dtype=torch.float64), atol=1e-6)


def test_levels_of_iq4_nl_are_llama_cpps() -> None:
    gguf = pytest.importorskip("gguf")
    codes = torch.arange(16, dtype=torch.uint8)
    block = torch.cat((torch.tensor([1.0], dtype=torch.float16).view(torch.uint8), codes | codes << 4))
    read = gguf.quants.dequantize(block[None].numpy(), gguf.GGMLQuantizationType.IQ4_NL)
    assert iq4_nl_levels(4).tolist() * 2 == read[0].tolist()
    with pytest.raises(ValueError, match="4 bits, not 3"):
        iq4_nl_levels(3)


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_normal_levels_ascend_from_minus_one_to_one(bits: int) -> None:
    levels = normal_levels(bits)
    assert len(levels) == 2**bits
    assert (levels.diff() > 0.0).all()
    assert levels[[0, -1]].tolist() == pytest.approx([-1.0, 1.0])
    assert (0.0 in levels.tolist()) == (bits > 2)


@pytest.mark.parametrize("seed", range(5))
def test_fitted_levels_are_means_of_what_is_nearest_to_them(seed: int) -> None:
    """And of seven numbers for three levels, within the best of all partitions and the start."""
    numbers, weights = random(7, seed=seed), random(7, seed=seed + 50).abs() + 0.1

    def error(levels: Tensor) -> float:
        return float((weights * (numbers[:, None] - levels).square().amin(dim=1)).sum())

    def mean(part: Tensor) -> float:
        return float((weights[part] * numbers[part]).sum() / weights[part].sum())

    start = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    fitted = fitted_levels(numbers, weights, start)
    order = torch.argsort(numbers)
    splits = (torch.tensor_split(order, cuts) for cuts in combinations(range(1, 7), 2))
    best = min(error(torch.tensor([mean(part) for part in parts], dtype=torch.float64)) for parts in splits)
    assert best - 1e-12 <= error(fitted) <= error(start)
    nearest = torch.bucketize(numbers, borders(fitted))
    for level in nearest.unique().tolist():
        assert float(fitted[level]) == pytest.approx(mean(nearest == level))


@pytest.mark.parametrize(("kind", "bits"), [("normal", 3), ("iq4_nl", 4), ("learned", 3)])
@pytest.mark.parametrize(("columns", "group"), [(32, 16), (24, None)])
def test_scales_are_the_best_candidates(columns: int, group: int | None, kind: TableKind, bits: int) -> None:
    weight = random(6, columns)
    weight[2] = 0.0
    table = choose_table(weight, bits, group, torch.float32, kind, None)
    largest = 127 if kind == "iq4_nl" else 1
    groups = weight.unflatten(1, (-1, group or columns))
    for row in (0, 5):
        for place in range(table.scales.shape[1]):
            numbers = groups[row, place]
            peak = numbers.abs().max()
            candidates = [float((peak * clip * sign / largest).float()) for clip in CLIPS for sign in (1, -1)]
            errors = [
                float((numbers[:, None] - table.levels.double() * each).square().amin(1).sum()) for each in candidates
            ]
            own = float((numbers[:, None] - table.levels.double() * table.scales[row, place]).square().amin(1).sum())
            assert own <= min(errors) * (1 + 1e-5) + 1e-12
    assert (table.scales[2] == torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("tokens", [400, 20], ids=["full", "deficient"])
@pytest.mark.parametrize(("kind", "bits"), OF_BITS)
def test_levels_lose_less_than_uniform_ones(kind: TableKind, tokens: int, bits: int) -> None:
    """Of numbers as trained models have them: normal, rows and columns of different sizes."""
    inputs = random(tokens, 96, seed=1) @ random(96, 96, seed=2)
    weight, moment = random(48, 96, seed=3) * random(48, 1, seed=4).exp(), inputs.T @ inputs
    before = weight.clone(), moment.clone()
    feedback = error_feedback(moment, DAMPING)

    def error(rounded: Rounded) -> float:
        return rounding_error(weight, rounded.values, moment)

    uniform = error(round_with_feedback(weight, feedback, bits, 32, torch.bfloat16))
    rounded = round_with_feedback(weight, feedback, bits, 32, torch.bfloat16, kind)
    assert error(rounded) < 0.85 * uniform
    assert rounded.levels is not None
    assert rounded.levels.dtype == rounded.scales.dtype == torch.bfloat16
    assert error(rounded) < 0.8 * error(round_to_nearest(weight, bits, 32, torch.bfloat16, levels=kind))
    assert torch.equal(weight, before[0])
    assert torch.equal(moment, before[1])
    again = round_with_feedback(
        weight * 2.0**40, error_feedback(moment * 2.0**-60, DAMPING), bits, 32, torch.bfloat16, kind
    )
    assert torch.equal(again.codes, rounded.codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nearest_levels(bits: int, kind: TableKind) -> None:
    weight = random(5, 32)
    rounded = round_to_nearest(weight, bits, 16, torch.float32, levels=kind)
    assert rounded.levels is not None
    values = rounded.levels.double() * rounded.scales.double().repeat_interleave(16, 1)[..., None]
    nearest = (weight[..., None] - values).abs().amin(-1)
    assert torch.allclose((rounded.values - weight).abs(), nearest, atol=1e-7)
    assert torch.equal(rounded.values, scaled(rounded.codes, rounded.scales.double(), rounded.levels))


def test_learned_levels_of_eight_bits_are_no_worse_than_uniform_ones() -> None:
    weight = random(64, 64)
    learned, uniform = (
        rounding_error(weight, round_to_nearest(weight, 8, 32, torch.float32, levels=kind).values, None)
        for kind in ("learned", "uniform")
    )
    assert learned < uniform


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="beyond"):
        round_to_nearest(torch.full((2, 4), 1e9), 4, 4, torch.float16, levels="normal")
    weight = torch.ones(2, 4)
    weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        round_to_nearest(weight, 4, 4, torch.float32, levels="learned")


def test_clips_of_jobs_begun_before() -> None:
    """A least clip of 0.875 tries the scales that were tried before it was a field."""
    assert clips_from(FED_CLIPS, 0.875) == (1.0, 0.91)
    assert clips_from(UNIFORM_CLIPS, 0.875) == (1.0, 0.975, 0.95, 0.925, 0.9, 0.875)
    assert clips_from(FED_CLIPS, 1.0) == (1.0,)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [3, 8192])
def test_place_of_the_nearest_level(bits: int, dtype: torch.dtype, count: int) -> None:
    """Numbers on a border belong to the level below it, however many are looked up at once."""
    borders_b = borders(normal_levels(bits).to(dtype))
    numbers_N = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(bits))
    numbers_N = torch.cat((numbers_N, borders_b, torch.tensor([torch.inf, -torch.inf, 0.0, -0.0], dtype=dtype)))
    expected_N = (numbers_N[:, None] > borders_b).sum(dim=1)
    assert torch.equal(nearest_places(numbers_N, borders_b), expected_N)
