"""State of shards between parts of a layer: what is computed, held and released. A scripted layer computes integers.

`tests/workers/test_streamed_experts.py` compares real layers, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from manifests.errors import NumericsError
from workers.hidden import HiddenStates, InMemory
from workers.shards import STREAM, PartedPass, Shard

RANGES = (range(0, 3), range(3, 6), range(6, 8))
LIMIT = 10**6
TAP = ("experts.0.down.in", lambda values: None)


class ScriptedLayer:
    """A layer with eight experts in three slices.

    Its stream is the input plus 1, expert e adds e + 1 times the stream to a token's sum, and the output is the stream
    plus 100 times the sum. `calls`: what was computed, with the number of taps at that time.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.device = dtype, torch.device("cpu")
        self.module: Any = SimpleNamespace(routed=self.routed, with_experts=self.with_experts, finished=self.finished)
        self.calls: list[tuple[str, int]] = []
        self.held, self.taps, self.faulty = -1, 0, False
        self.index, self.parts = 4, len(RANGES)

    def attended(self, hidden_BSD: Tensor) -> Tensor:
        self.calls.append(("attention", self.taps))
        return hidden_BSD + 1

    def hold(self, number: int) -> range:
        self.held = number
        return RANGES[number]

    def routed(self, stream_BSD: Tensor) -> tuple[Tensor, str]:
        return stream_BSD.flatten(0, -2), "routing"

    def with_experts(self, x_TD: Tensor, routing: str, sum_TD: Tensor | None, experts: range) -> Tensor:
        assert RANGES[self.held] == experts
        assert routing == "routing"
        self.calls.append((f"slice {self.held}", self.taps))
        added_TD = sum(expert + 1 for expert in experts) * x_TD.to(torch.promote_types(self.dtype, torch.float32))
        return added_TD if sum_TD is None else sum_TD + added_TD

    def finished(self, stream_BSD: Tensor, x_TD: Tensor, sum_TD: Tensor) -> Tensor:
        self.calls.append(("output", self.taps))
        return (stream_BSD + 100 * sum_TD.view_as(stream_BSD)).to(self.dtype)

    @contextmanager
    def checked(self, hidden_BSD: Tensor) -> Iterator[list[Tensor]]:
        yield []

    @contextmanager
    def tapped(self, taps: Iterable[Any], stop: bool) -> Iterator[None]:
        assert not stop
        self.taps = len([*taps])
        yield
        self.taps = 0

    def require_finite(self, output_BSD: Tensor, inputs: Callable[[], Tensor]) -> None:
        if self.faulty or not torch.isfinite(output_BSD).all():
            raise NumericsError(f"inputs {inputs().flatten().tolist()}")

    def told(self) -> list[tuple[str, int]]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class ScriptedShard(Shard):
    """A shard of samples of two tokens, at the inputs of a scripted layer."""

    def __init__(self, bench: Bench, number: int, version: str, batch: int, samples: int = 5) -> None:
        layers: Any = SimpleNamespace(version=version, device=torch.device("cpu"))
        super().__init__(bench.hidden, layers, nullcontext, "dense", number, (samples, 2, 3), batch)
        self.scripted: Any = bench.layer
        self.reader = InMemory(inputs_of(number)[:samples].to(bench.layer.dtype))

    def tokens(self, start: int, stop: int) -> Tensor:
        raise NotImplementedError

    def stage_key(self, stage: int) -> Any:
        return PartedPass(self, self.scripted, self.reader).key(stage)

    def run(self, taps: Any = (), part: int | None = None, *, output: bool = True) -> list[Tensor]:
        outputs = self.outputs(self.scripted, self.reader, taps, part, output=output)
        return [output_BSD for _, output_BSD in outputs]


class Bench:
    """Passes over one scripted layer, with shards of five samples of two tokens."""

    def __init__(self, dtype: torch.dtype = torch.float32, limit: int = LIMIT) -> None:
        self.layer = ScriptedLayer(dtype)
        self.hidden = HiddenStates(None, limit)  # type: ignore[arg-type] # nothing is spilled

    def at(self, shard: int = 0, version: str = "dense", batch: int = 2) -> ScriptedShard:
        return ScriptedShard(self, shard, version, batch)

    def stages(self, at: ScriptedShard) -> list[int]:
        """Return the stages that are held of a shard, at the version of its weights."""
        return sorted(stage for stage in range(-1, 4) if self.hidden.get(at.stage_key(stage)) is not None)


def inputs_of(shard: int) -> Tensor:
    return torch.arange(30.0).view(5, 2, 3) + 1000 * shard


def expected_of(shard: int) -> Tensor:
    """Return the outputs: stream + 100 * 36 * stream, as the experts add 1 + 2 + ... + 8 times the stream."""
    return 3601 * (inputs_of(shard) + 1)


def outputs(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


def test_all_slices_at_once() -> None:
    """One pass over the micro-batches for each slice; only the last sum and the stream are left, until the shard's
    outputs replace them."""
    bench = Bench()
    at = bench.at()
    made = at.run()
    assert [len(part) for part in made] == [2, 2, 1]
    assert torch.equal(outputs(made), expected_of(0))
    assert [name for name, _ in bench.layer.told()] == [
        *["attention"] * 3, *["slice 0"] * 3, *["slice 1"] * 3, *["slice 2", "output"] * 3,
    ]  # fmt: skip
    assert bench.stages(at) == [STREAM, 2]


def test_slice_by_slice() -> None:
    """Each slice is computed once, in any number of calls, and replaces the sum of the slices before it."""
    bench = Bench()
    at = bench.at()
    stages = []
    for part in range(2):
        assert at.run(part=part) == []
        stages.append(bench.stages(at))
    assert stages == [[STREAM, 1], [STREAM, 2]]
    assert torch.equal(outputs(at.run(part=2)), expected_of(0))
    assert [name for name, _ in bench.layer.told()].count("attention") == 3
    sums = bench.hidden.get(at.stage_key(2))
    assert sums is not None
    assert torch.equal(sums.read(1, 5), 21 * (inputs_of(0) + 1)[1:]), "experts 0 to 5 add 21 times the stream"


@pytest.mark.parametrize(("part", "again"), [(1, ["slice 0"]), (2, ["slice 0", "slice 1"])])
def test_slices_that_a_worker_has_not_passed_are_passed_first(part: int, again: list[str]) -> None:
    """Without taps, which see the values of the requested slice alone."""
    bench = Bench()
    at = bench.at(batch=5)
    made = at.run([TAP], part)
    last = [("slice 2", 1), ("output", 1)] if part == 2 else [(f"slice {part}", 1)]
    assert bench.layer.told() == [("attention", 0), *((name, 0) for name in again), *last]
    assert bench.stages(at) == [STREAM, min(part + 1, 2)]
    if part == 2:
        assert torch.equal(outputs(made), expected_of(0))


def test_taps_of_the_attention_see_its_values_again() -> None:
    """At the first slice, even if the stream is held; other slices read it."""
    bench = Bench()
    at = bench.at(batch=5)
    at.run(part=0)
    bench.layer.told()
    at.run([TAP, TAP], part=0)
    assert bench.layer.told() == [("attention", 2), ("slice 0", 2)]
    at.run([TAP], part=1)
    assert bench.layer.told() == [("slice 1", 1)]


def test_taps_of_all_slices_at_once_are_a_programmer_s_error() -> None:
    with pytest.raises(AssertionError, match="once for each part"):
        Bench().at().run([TAP])


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_pass_for_its_taps_alone_holds_no_sums(part: int) -> None:
    """It passes one slice, yields nothing, and leaves the sums of an ordinary pass as they are."""
    bench = Bench()
    at = bench.at(batch=5)
    assert at.run([TAP], part, output=False) == []
    last = [("output", 1)] if part == 2 else []
    assert bench.layer.told() == [("attention", 1 if part == 0 else 0), (f"slice {part}", 1), *last]
    assert bench.stages(at) == [STREAM]
    at.run(part=0)
    at.run([TAP], part, output=False)
    assert bench.stages(at) == [STREAM, 1]


def test_inputs_can_be_read_beside_the_outputs() -> None:
    at = Bench().at()
    pairs = [*at.outputs(at.scripted, at.reader)]
    for (start, stop), (read, output_BSD) in zip(at.batches, pairs, strict=True):
        assert torch.equal(output_BSD, expected_of(0)[start:stop])
        assert torch.equal(read(), inputs_of(0)[start:stop])


def test_shards_and_weights_have_states_of_their_own() -> None:
    """Another version of the layer's weights does not build on the sums of the first."""
    bench = Bench()
    first, second, other = bench.at(0), bench.at(1), bench.at(0, "compressed")
    for at in (first, second):
        at.run(part=0)
    assert bench.stages(other) == []
    for part in (1, 2):
        made = [at.run(part=part) for at in (first, second)]
    assert [torch.equal(outputs(parts), expected_of(shard)) for shard, parts in enumerate(made)] == [True, True]
    bench.layer.told()
    assert torch.equal(outputs(other.run(part=2)), expected_of(0))
    assert [name for name, _ in bench.layer.told()][:3] == ["attention"] * 3


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_have_at_least_32_bits(dtype: torch.dtype, sums: torch.dtype) -> None:
    """The stream has the layer's dtype."""
    bench = Bench(dtype)
    at = bench.at()
    at.run(part=0)
    stream, total = (bench.hidden.get(at.stage_key(stage)) for stage in (STREAM, 1))
    assert stream is not None
    assert total is not None
    assert (stream.read(0, 1).dtype, total.read(0, 1).dtype) == (dtype, sums)


@pytest.mark.parametrize("output", [False, True])
def test_an_output_that_is_not_finite_is_blamed_on_the_inputs_of_its_micro_batch(output: bool) -> None:
    bench = Bench()
    at = bench.at()
    for part in (0, 1):
        at.run(part=part)
    stream = bench.hidden.get(at.stage_key(STREAM))
    assert isinstance(stream, InMemory)
    stream.hidden_MSD[4, 1, 2] = torch.nan
    with pytest.raises(NumericsError, match=r"inputs \[24.0, 25.0, 26.0, 27.0, 28.0, 29.0\]"):
        at.run(part=2, output=output)


def test_states_are_stored_in_chunks_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are spilled."""
    chunks: list[int] = []
    writer = HiddenStates.hidden_writer
    monkeypatch.setattr(HiddenStates, "hidden_writer", lambda *of: chunks.append(of[-1]) or writer(*of))
    bench = Bench()
    bench.at().run(part=0)
    assert chunks == [2, 2], "of the stream, and of the sum"


def test_a_shard_of_one_sample() -> None:
    at = ScriptedShard(Bench(), 0, "v", 2, samples=1)
    assert torch.equal(outputs(at.run()), expected_of(0)[:1])
