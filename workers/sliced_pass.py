"""Runs shards through layers with streamed experts: all micro-batches through one slice, then through the next.

Between slices, a shard's state is the residual stream at the mixture's input, and each token's sum over the experts so
far. Both are held or spilled like hidden states.

Legend: M samples of a shard, B micro-batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.copies import HiddenReader
from workers.hidden import HiddenStates, ShardKey
from workers.tapped_layer import Tap, TappedLayer

STREAM = -1  # the stage of the residual stream; stage n is the sum over the experts of n slices
Output = tuple[Tensor | None, Tensor]  # the layer's input, if requested, and its output (B, S, D)


@dataclass(frozen=True)
class SlicedShard:
    """A shard at a layer with streamed experts.

    Attributes:
        shard_key: the key of the layer's inputs.
        version: the version of the layer's weights in `block`.
        shape: (M, S, D), of the hidden states; `batches`: start and stop of each micro-batch.
    """

    block: TappedLayer
    shard_key: ShardKey
    version: str
    inputs: HiddenReader
    shape: tuple[int, int, int]
    batches: Sequence[tuple[int, int]]

    def stage_key(self, stage: int) -> ShardKey:
        """Return the key of the state between slices."""
        return (*self.shard_key[:3], (self.version, stage))


class SlicedPass:
    """Runs shards through slices of experts, and holds their state between slices."""

    def __init__(self, hidden: HiddenStates, computing: Callable[[], AbstractContextManager[None]]) -> None:
        self.hidden = hidden
        self.computing = computing

    def run(
        self,
        at: SlicedShard,
        taps: Iterable[tuple[str, Tap]] = (),
        part: int | None = None,
        *,
        output: bool = True,
        with_inputs: bool = False,
    ) -> Iterator[Output]:
        """Run one slice, or all; yield the layer's outputs after the last.

        Taps see values of the attention only at the first slice, and those of the shared expert only at the last.
        Without `output`, no sums are held and nothing is yielded. Earlier slices that the shard has not passed are run
        first, without taps. Raises the errors of `TappedLayer.run`.
        """
        assert at.block.streamed is not None
        count, taps = len(at.block.streamed.ranges), list(taps)
        first, last = (0, count - 1) if part is None else (part, part)
        assert not taps or first == last, "a tap outside of experts would see values once for each slice"
        with at.block.tapped(taps, stop=False) if first == 0 else nullcontext():
            stream = self._stream(at, again=first == 0)
        done = self._done(at, first) if output else first
        for number in range(done, last):
            self._add(at, stream, number)
        with at.block.tapped(taps, stop=False):
            if last < count - 1:
                self._add(at, stream, last, keep=output)
            else:
                yield from self._finish(at, stream, last, output=output, with_inputs=with_inputs)

    def _stream(self, at: SlicedShard, *, again: bool) -> HiddenReader:
        """Return the residual stream after the attention. `again`: compute it for its taps even if it is held."""
        key = at.stage_key(STREAM)
        held = self.hidden.get(key)
        if held is not None and not again:
            return held
        writer = self.hidden.hidden_writer(key, at.shape, at.block.dtype, False, _batch(at))
        for start, stop in at.batches:
            hidden_BSD = at.inputs.read(start, stop).to(at.block.device)
            with self.computing(), at.block.checked(hidden_BSD):
                stream_BSD = at.block.attended(hidden_BSD)
            writer.append(stream_BSD)
        return self.hidden.keep_reader(key, writer)

    def _done(self, at: SlicedShard, first: int) -> int:
        """Return the first slice to run so that the sum of all slices before `first` is held."""
        return next((stage for stage in range(first, 0, -1) if self.hidden.get(at.stage_key(stage)) is not None), 0)

    def _add(self, at: SlicedShard, stream: HiddenReader, number: int, keep: bool = True) -> None:
        """Add the outputs of a slice's experts to the shard's sum."""
        experts, key = at.block.hold(number), at.stage_key(number + 1)
        dtype = torch.promote_types(at.block.dtype, torch.float32)
        writer = self.hidden.hidden_writer(key, at.shape, dtype, False, _batch(at)) if keep else None
        for stream_BSD, sum_TD in self._read(at, stream, number if keep else 0):
            with self.computing():
                x_TD, routing = at.block.module.routed(stream_BSD)
                sum_TD = at.block.module.with_experts(x_TD, routing, sum_TD, experts)
            if writer is not None:
                writer.append(sum_TD.view_as(stream_BSD))
        if writer is not None:
            self.hidden.keep(key, writer)
            self.hidden.release(at.stage_key(number))

    def _finish(
        self, at: SlicedShard, stream: HiddenReader, number: int, *, output: bool, with_inputs: bool
    ) -> Iterator[Output]:
        """Run the last slice and the shared expert."""
        experts = at.block.hold(number)
        batches = iter(at.batches)
        for stream_BSD, sum_TD in self._read(at, stream, number if output else 0):
            start, stop = next(batches)
            with self.computing():
                x_TD, routing = at.block.module.routed(stream_BSD)
                sum_TD = at.block.module.with_experts(x_TD, routing, sum_TD, experts)
                output_BSD = at.block.module.finished(stream_BSD, x_TD, sum_TD)
                at.block.require_finite(output_BSD, lambda: at.inputs.read(start, stop).to(at.block.device))  # noqa: B023
            if output:
                yield at.inputs.read(start, stop).to(at.block.device) if with_inputs else None, output_BSD

    def _read(self, at: SlicedShard, stream: HiddenReader, stage: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the stream (B, S, D) of each micro-batch, and the sum (T, D) held at a stage."""
        sums = self.hidden.get(at.stage_key(stage)) if stage else None
        assert sums is not None or not stage
        for start, stop in at.batches:
            stream_BSD = stream.read(start, stop).to(at.block.device)
            sum_BSD = None if sums is None else sums.read(start, stop).to(at.block.device)
            yield stream_BSD, None if sum_BSD is None else sum_BSD.flatten(0, -2)


def _batch(at: SlicedShard) -> int:
    return max(stop - start for start, stop in at.batches)
