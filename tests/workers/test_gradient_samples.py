"""Samples that go back slice by slice: the order of the work, the state in between, and resumption."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stores.activations import ActivationStore
from workers.gradient_samples import INPUTS, MIXED, OUTGOING, STREAM, SUM, WEIGHTS, GradientSamples, SamplesState
from workers.hidden import HiddenStates

SLICES, SAMPLES = 3, 2
SHARD = ("gradient", 4, 1)


class ScriptedGradients:
    """Counts instead of differentiating: each step adds a number to what it changes, and notes its call."""

    reads_output = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.block = SimpleNamespace(device=torch.device("cpu"), parts=SLICES, hold=lambda number, *_: number)

    def attended(self, hidden_SD: Tensor) -> Tensor:
        self.calls.append("attended")
        return hidden_SD + 0.5

    def added(self, stream_SD: Tensor, sum_SD: Tensor | None, experts: int) -> Tensor:
        self.calls.append(("added", experts))
        return (torch.zeros_like(stream_SD) if sum_SD is None else sum_SD) + 10.0**experts

    def mixed(self, stream_SD: Tensor, sum_SD: Tensor) -> Tensor:
        return sum_SD

    def enter(self, sample: Any, mixed_SD: Tensor | None, gradient_of: Any) -> None:
        sample.outgoing = gradient_of(sample.stream)
        number = int(sample.outgoing[0, 0])
        self.calls.append(("enter", number, None if mixed_SD is None else mixed_SD[0, 0].item()))
        sample.mixed = sample.outgoing + 1.0

    def share(self, sample: Any, take: Any) -> None:
        self.calls.append("share")
        sample.inputs, sample.weights = torch.zeros(2, 3), torch.zeros(2, 1)
        take({"shared": sample.mixed})

    def through(self, sample: Any, experts: int, take: Any) -> None:
        self.calls.append(("through", experts))
        sample.inputs += 10.0**experts
        sample.weights += 1.0
        take({f"experts.{experts}": sample.mixed})

    def leave(self, sample: Any, hidden_SD: Tensor, take: Any) -> Tensor:
        take({"router": sample.weights})
        return torch.stack((hidden_SD[0], sample.inputs[0], sample.outgoing[0]))


@pytest.fixture
def hidden(tmp_path: Path) -> HiddenStates:
    return HiddenStates(ActivationStore(tmp_path / "activations.zarr"), 2**20)


def gradients(hidden: HiddenStates, *, alone: bool = False) -> Any:
    state, samples = SamplesState(hidden, SHARD, "moments"), range(SAMPLES)
    scripted: Any = ScriptedGradients()
    return GradientSamples(scripted, state, samples, lambda number: torch.full((2, 3), float(number)), alone=alone)


def back(work: Any, number: int | None, *, reads_output: bool = False) -> tuple[list[str], list[Tensor]]:
    """Return the points of a slice whose gradients were taken, and the gradients at the layer's inputs."""
    points: list[str] = []

    def take(taken: Mapping[str, Tensor]) -> None:
        points.extend(taken)

    gone = list(work.back(number, outgoing, take, reads_output=reads_output))
    return points, gone


def outgoing(number: int, output_SD: Tensor) -> Tensor:
    return torch.full_like(output_SD, float(number))


def held(hidden: HiddenStates) -> set[tuple[str, int]]:
    return {key[-1][1:] for key in hidden.held}


def test_slice_by_slice_backwards_each_once(hidden: HiddenStates) -> None:
    work = gradients(hidden)
    points, gone = back(work, 2)
    assert (points, gone) == (["shared"] * SAMPLES + ["experts.2"] * SAMPLES, [])
    assert held(hidden) == {(STREAM, 0), (OUTGOING, 0), (MIXED, 0), (INPUTS, 1), (WEIGHTS, 1)}
    assert back(work, 1) == (["experts.1"] * SAMPLES, [])
    assert held(hidden) == {(STREAM, 0), (OUTGOING, 0), (MIXED, 0), (INPUTS, 2), (WEIGHTS, 2)}
    points, gone = back(work, 0)
    assert points == ["experts.0"] * SAMPLES + ["router"] * SAMPLES
    assert [each[:, 0].tolist() for each in gone] == [[0.0, 111.0, 0.0], [1.0, 111.0, 1.0]]
    assert held(hidden) == set()
    calls = work.layer.calls
    assert [call[1] for call in calls if call[0] == "through"] == [2, 2, 1, 1, 0, 0]
    assert calls.count("share") == calls.count("attended") == SAMPLES  # the layer's output was not needed


@pytest.mark.parametrize("number", range(SLICES))
def test_a_worker_without_the_state_passes_the_slices_behind_without_taking(hidden: HiddenStates, number: int) -> None:
    work = gradients(hidden)
    points, gone = back(work, number)
    assert {*points} - {"shared", "router"} == {f"experts.{number}"}
    assert ("shared" in points) == (number == SLICES - 1)
    assert len(gone) == (SAMPLES if number == 0 else 0)
    assert {each[1, 0].item() for each in gone} <= {111.0}


def test_from_the_output_the_slices_are_summed_forwards_first(hidden: HiddenStates) -> None:
    work = gradients(hidden)
    back(work, 2, reads_output=True)
    calls = work.layer.calls
    assert [call[1] for call in calls if call[0] == "added"] == [0, 0, 1, 1, 2, 2]
    assert [call for call in calls if call[0] == "enter"] == [("enter", 0, 111.0), ("enter", 1, 111.0)]
    assert not any(field == SUM for field, _ in held(hidden))


def test_forward_passes_only_the_slices_that_its_sums_lack(hidden: HiddenStates) -> None:
    work = gradients(hidden)
    work.forth(1)
    assert {key for key in held(hidden) if key[0] == SUM} == {(SUM, 2)}
    work.forth(2)
    assert [call[1] for call in work.layer.calls if call[0] == "added"] == [0, 0, 1, 1, 2, 2]
    sums = work.state.get(SUM, SLICES)
    assert sums.read(0, SAMPLES)[:, 0, 0].tolist() == [111.0, 111.0]


@pytest.mark.parametrize("number", [1, SLICES - 1])
def test_a_slice_alone_changes_no_state_of_the_others(hidden: HiddenStates, number: int) -> None:
    work = gradients(hidden, alone=True)
    points, gone = back(work, number)
    assert points == (["shared", f"experts.{number}"] if number == SLICES - 1 else [f"experts.{number}"]) * SAMPLES
    assert gone == []
    assert work.state.passed(SLICES, 0) is None
    assert back(gradients(hidden), 0)[1][0][1, 0].item() == 111.0


def test_all_parts_at_once_take_the_gradients_of_each(hidden: HiddenStates) -> None:
    points, gone = back(gradients(hidden), None)
    assert (
        points
        == [each for step in ("shared", "experts.2", "experts.1", "experts.0") for each in [step] * 2] + ["router"] * 2
    )
    assert [each[:, 0].tolist() for each in gone] == [[0.0, 111.0, 0.0], [1.0, 111.0, 1.0]]
    assert held(hidden) == set()


def test_states_of_other_purposes_are_apart(hidden: HiddenStates) -> None:
    first, second = (SamplesState(hidden, SHARD, name) for name in ("grids", "moments"))
    first.keep(1, [{(MIXED, 0): torch.ones(2, 3)}])
    assert (first.entered, second.entered) == (True, False)
    first.release(MIXED)
    first.release(MIXED)  # nothing is held any more
    assert not first.entered
