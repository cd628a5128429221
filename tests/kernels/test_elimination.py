"""Pruning in one go against selection, refit and error one after another; what it costs and holds."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.kernels import cholesky, elimination
from pipeline.kernels.elimination import eliminate, prune
from pipeline.kernels.nystrom import nystrom_refit
from tests.kernels.output_errors import output_error
from tests.kernels.test_nystrom import problem, select_eliminate

HELD = """
import sys
import torch
from pipeline.kernels.elimination import prune
from pipeline.kernels.nystrom import refit_with_error, select_leverage
from workers.memory import map_large_tensors, peak_bytes

map_large_tensors()
torch.set_num_threads(1)
channels, hidden, kept = 1800, 514, 1100

def solve(moment, weight, count):
    if sys.argv[1] == "eliminate":
        return prune(moment, weight, count)
    chosen, _ = select_leverage(moment, count)
    return refit_with_error(weight, moment, chosen)

moment, weight = torch.eye(channels, dtype=torch.float64), torch.ones(hidden, channels, dtype=torch.bfloat16)
for near in range(1, 4):
    moment.diagonal(near).fill_(0.1), moment.diagonal(-near).fill_(0.1)
solve(moment[:600, :600], weight[:, :600], 300)
before = peak_bytes()
solve(moment, weight, kept)
print((peak_bytes() - before) / moment.nbytes + 1)
"""


def added_product(total: list[int], left: list[int], right: list[int], **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize(("channels", "hidden", "tokens"), [(6, 3, 40), (12, 20, 60), (40, 10, 200)])
@pytest.mark.parametrize("block", [3, 512])
def test_prune_is_selection_refit_and_error(
    channels: int, hidden: int, tokens: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", block)
    moment, weight, _ = problem(channels, hidden, tokens)
    felt = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(3)).double() @ weight
    before = moment.clone(), weight.clone()
    for count in (1, channels // 2, channels - 1):
        for chooses in (None, felt):
            found = prune(moment, weight, count, chooses)
            kept = select_eliminate(moment, weight if chooses is None else chooses, count).channels
            assert torch.equal(found.channels, kept)
            refit, report = nystrom_refit(weight, moment, kept)
            torch.testing.assert_close(found.weight, refit, rtol=1e-9, atol=1e-10)
            assert found.error == pytest.approx(output_error(weight, refit, kept, moment), rel=1e-9)
            assert found.report["condition"] == pytest.approx(report["condition"], rel=0.01)
            assert not found.report["fallback"]
    assert torch.equal(moment, before[0])
    assert torch.equal(weight, before[1])


def test_prune_with_every_channel_is_the_weight_itself() -> None:
    moment, weight, _ = problem(6, 3, 40)
    found = prune(moment, weight, 6)
    assert torch.equal(found.weight, weight)
    assert (found.error, found.jitter, found.channels.tolist()) == (0.0, 0.0, list(range(6)))


def test_prune_when_singular_falls_back_to_a_refit_of_its_own() -> None:
    moment, weight, _ = problem(20, 4, 10)
    found = prune(moment, weight, 15)
    assert found.jitter > 0
    assert found.report["fallback"]
    assert torch.equal(found.weight, nystrom_refit(weight, moment, found.channels)[0])


def test_prune_with_dead_channels() -> None:
    moment, weight, _ = problem(8, 4, 60)
    for dead in (1, 4, 6):
        moment[dead] = moment[:, dead] = 0
    found = prune(moment, weight, 6)
    assert found.channels.tolist() == [0, 1, 2, 3, 5, 7]  # of equal ones the lower index stays
    assert torch.equal(found.weight[:, 1], weight[:, 1])
    assert found.error == 0.0
    assert prune(torch.zeros(4, 4), weight[:, :4], 2).error == 0.0
    four = prune(moment, weight, 4)
    refit, _ = nystrom_refit(weight, moment, four.channels)
    torch.testing.assert_close(four.weight, refit, rtol=1e-9, atol=1e-10)
    assert four.error == pytest.approx(output_error(weight, refit, four.channels, moment), rel=1e-9)


@pytest.mark.slow
def test_cost_follows_what_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In products: N³ for the inverse whatever is removed, 3 N² for each removal on top; nothing for a full rank."""
    monkeypatch.setattr(cholesky, "BLOCK", 64)
    moment, weight, _ = problem(600, 60, 1000)
    flops = {}
    for count in (240, 580, 599, 600):
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product}) as counter:
            prune(moment, weight, count)
        flops[count] = counter.get_total_flops() / 600**3
    assert flops[600] == 0
    assert flops[599] < 1.6
    assert flops[580] < flops[599] + 0.4
    assert flops[240] > flops[599] + 1.2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process's own peak is in /proc")
@pytest.mark.parametrize(("selection", "squares"), [("eliminate", 3.0), ("leverage", 2.5)])
def test_a_solve_holds_three_squares_with_the_moment(selection: str, squares: float) -> None:
    """float64 numbers in units of N², at Llama's D = N / 3.5; 5.4 when each step had copies of its own."""
    command = [sys.executable, "-c", HELD, selection]
    measured: list[float] = []
    while not measured or (min(measured) >= squares and len(measured) < 4):  # a process's own pages vary by 0.3 N²
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        measured.append(float(ended.stdout))
    assert min(measured) < squares, measured


def test_order_is_the_selection_seen_from_any_count() -> None:
    moment, weight, _ = problem(30, 8, 100)
    order = eliminate(moment, weight, 5).order.tolist()
    for count in (29, 17, 6):
        assert (
            sorted(set(range(30)) - set(order[: 30 - count]))
            == select_eliminate(moment, weight, count).channels.tolist()
        )


@pytest.mark.parametrize(("channels", "block"), [(200, 64), pytest.param(1100, None, marks=pytest.mark.slow)])
def test_how_far_it_goes_changes_no_bit_of_the_order(channels: int, block: int | None) -> None:
    """One channel at a time, and two: an order taken once serves every smaller removal."""
    moment, weight, _ = problem(channels, 16, 2 * channels)
    whole = eliminate(moment, weight, channels // 8, block).order
    for count in (channels - 3, channels * 3 // 4, channels // 3):
        assert torch.equal(eliminate(moment, weight, count, block).order, whole[: channels - count])


def test_channels_that_go_together_lose_no_more_than_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel has a twin that could stand in for it: one of both goes, never both, though both score lowest."""
    _, weight, values = problem(60, 8, 400)
    twins = torch.cat(
        (values, values + 0.05 * torch.randn(values.shape, generator=torch.Generator().manual_seed(5))), 1
    )
    doubled, weights = twins.T @ twins / len(twins), torch.cat((weight, weight), dim=1)
    counts = (90, 60, 30)
    alone = [prune(doubled, weights, count).error for count in counts]
    monkeypatch.setattr(elimination, "ALONE", 10)  # twelve at once
    order = eliminate(doubled, weights, 30).order
    assert order.unique().numel() == 90
    assert len({int(j) % 60 for j in order[:40]}) == 40
    for count, one_by_one in zip(counts, alone, strict=True):
        kept = torch.tensor(sorted(set(range(120)) - set(order[: 120 - count].tolist())))
        assert output_error(weights, nystrom_refit(weights, doubled, kept)[0], kept, doubled) < 1.03 * one_by_one
        assert torch.equal(select_eliminate(doubled, weights, count).channels, kept)
    found = prune(doubled, weights, 45)
    torch.testing.assert_close(found.weight, nystrom_refit(weights, doubled, found.channels)[0], rtol=1e-6, atol=1e-8)
    assert found.error == pytest.approx(output_error(weights, found.weight, found.channels, doubled), rel=1e-6)
