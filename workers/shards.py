"""Passes the samples of a shard through the layers of a model.

A layer with more experts than a worker holds has parts, a slice of experts each: all micro-batches pass one before any
passes the next. Between parts, a shard's state is the residual stream at the mixture's input, and each token's sum over
the experts so far. Both are held or spilled like hidden states. All other layers have one part.

Legend: M samples of a shard, B micro-batch, S sequence, D hidden, T tokens of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from manifests.records import ArrayRecord, StagedLayer
from pipeline.units.sharding import GRID_TOKENS
from pipeline.units.units import ReplayUnit
from workers.branched_layer import Places
from workers.copies import HiddenReader
from workers.embedding_and_head import embedding
from workers.hidden import HiddenStates, ShardKey
from workers.layers import LayerReader
from workers.tapped_layer import TappedLayer, Taps

STREAM = -1  # the stage of the residual stream; stage n is the sum over the experts of n parts
Read = Callable[[], Tensor]
Output = tuple[Read, Tensor]  # reads the layer's input (B, S, D); its output (B, S, D)
Computing = Callable[[], AbstractContextManager[None]]


class Layer(Protocol):
    """A layer on the device, as a `Shard` uses it; `TappedLayer` is one."""

    index: int
    parts: int

    def run(self, hidden_BSD: Tensor, taps: Taps, output: bool, places: Places | None) -> Tensor | None:
        """Return the layer's output for a micro-batch."""
        ...

    def every_expert(self) -> AbstractContextManager[None]:
        """Return a context in which taps see values of every expert on all tokens."""
        ...


class Shard(ABC):
    """The samples of a shard on their way through a model.

    Attributes:
        lineage, number: the key of the shard's hidden states, beside the layer.
        shape: (M, S, D), of the hidden states; `batch`: the number of samples in a micro-batch.
        computing: returns a context that measures products.
    """

    def __init__(
        self,
        hidden: HiddenStates,
        layers: LayerReader,
        computing: Computing,
        lineage: str,
        number: int,
        shape: tuple[int, int, int],
        batch: int,
    ) -> None:
        self.hidden = hidden
        self.layers = layers
        self.computing = computing
        self.lineage, self.number = lineage, number
        self.shape, self.batch = shape, batch

    # -- samples -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def tokens(self, start: int, stop: int) -> Tensor:
        """Return token ids (B, S) of samples start to stop, on the device."""

    def first_layer(self) -> StagedLayer | None:
        """Return the staged layer 0 if it may hold the embedding table."""
        return None

    def places(self, start: int, stop: int) -> Places | None:
        """Return the places of the tokens of some samples; None: each sample is one sequence."""
        return None

    def longest(self, start: int, stop: int) -> int:
        """Return the tokens of the longest of some samples, without padding."""
        return self.shape[1]

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Return (start, stop) of each micro-batch within the shard."""
        samples = self.shape[0]
        return [(start, min(start + self.batch, samples)) for start in range(0, samples, self.batch)]

    def embedded(self) -> Iterator[Tensor]:
        """Yield the inputs (B, S, D) of the first layer."""
        embed = embedding(self.layers, self.first_layer())
        for start, stop in self.batches:
            yield embed(self.tokens(start, stop), self.places(start, stop))

    # -- from layer to layer -----------------------------------------------------------------------------------------

    def inputs(self, unit: ReplayUnit) -> HiddenReader:
        """Return the inputs of a unit's layer: held, stored, or recomputed; see `HiddenStates.inputs`."""
        return self.hidden.inputs(self.lineage, unit, self._embed, self._replay)

    def layer(self, number: int, staged: StagedLayer | None) -> Layer:
        """Return a layer with its dense weights, or as staged."""
        return self.layers.block(number, staged)

    def hold(self, number: int, hidden: Iterable[Tensor], *, store: bool = False) -> ArrayRecord | None:
        """Hold the inputs of a layer, which come micro-batch by micro-batch. Return their record with `store`."""
        key, dtype = (self.lineage, number, self.number), self.layers.setup.dtype
        record = self.hidden.keep_parts(key, self.shape, dtype, hidden, self.batch, store=store)
        return record if store else None

    def hold_inside(self, key: ShardKey, dtype: torch.dtype, hidden: Iterable[Tensor]) -> HiddenReader:
        """Hold hidden states inside a layer, which come micro-batch by micro-batch. Return their reader."""
        self.hidden.keep_parts(key, self.shape, dtype, hidden, self.batch)
        reader = self.hidden.get(key)
        assert reader is not None
        return reader

    def through(
        self,
        layer: Layer,
        inputs: HiddenReader,
        taps: Taps = (),
        part: int | None = None,
        *,
        emit: bool = True,
        store: bool = False,
        see: Callable[[Read, Tensor], None] | None = None,
    ) -> ArrayRecord | None:
        """Pass a layer, or one part of it, and hold the outputs of the last part if `emit`.

        `see` receives each output of `outputs`. Return the record of the outputs with `store`.
        """

        def seen() -> Iterator[Tensor]:
            for read, output_BSD in self.outputs(layer, inputs, taps, part, output=emit or see is not None):
                if see is not None:
                    see(read, output_BSD)
                yield output_BSD

        if emit and (part is None or part + 1 >= layer.parts):
            return self.hold(layer.index + 1, seen(), store=store)
        for _ in seen():
            pass
        return None

    def outputs(
        self,
        layer: Layer,
        inputs: HiddenReader,
        taps: Taps = (),
        part: int | None = None,
        *,
        output: bool = True,
    ) -> Iterator[Output]:
        """Pass a layer, or one part of it. Yield the outputs of the last part, none without `output`.

        Taps see values of the attention only in the first part, and those of the shared expert only in the last.
        Without `output`, no sums are held. Earlier parts that the shard has not passed are passed first, without taps.
        Raises the errors of `TappedLayer.run`.
        """
        if layer.parts > 1:
            yield from PartedPass(self, cast(TappedLayer, layer), inputs).outputs(taps, part, output=output)
            return
        arriving = self.hidden.copies.batches(inputs, self.batches)
        for (start, stop), hidden_BSD in zip(self.batches, arriving, strict=True):
            hidden_BSD = hidden_BSD[:, : self.longest(start, stop)]
            with self.computing():
                output_BSD = layer.run(hidden_BSD, taps, output, self.places(start, stop))
            if output_BSD is not None:
                yield partial(_itself, hidden_BSD), output_BSD

    def begin(self, layer: Layer, inputs: HiddenReader, taps: Taps, *, output: bool = False) -> Tensor | None:
        """Pass the first tokens of the first sample, with every expert, for the taps. Return the output if wanted."""
        hidden_BSD = inputs.read(0, 1)[:, :GRID_TOKENS].to(self.layers.device)
        with self.computing(), layer.every_expert():
            return layer.run(hidden_BSD, taps, output, None)

    def _embed(self) -> HiddenReader:
        self.hold(0, self.embedded())
        return self._held(0)

    def _replay(self, number: int, staged: StagedLayer | None, inputs: HiddenReader) -> HiddenReader:
        """Pass a layer again, only for its outputs."""
        self.through(self.layer(number, staged), inputs)
        return self._held(number + 1)

    def _held(self, number: int) -> HiddenReader:
        reader = self.hidden.get((self.lineage, number, self.number))
        assert reader is not None
        return reader


class PartedPass:
    """Passes a shard through a layer of several parts, and holds the state between them."""

    def __init__(self, shard: Shard, layer: TappedLayer, inputs: HiddenReader) -> None:
        self.shard, self.layer, self.inputs = shard, layer, inputs
        self.hidden, self.computing = shard.hidden, shard.computing
        self.version = shard.layers.version

    def outputs(self, taps: Taps, part: int | None, *, output: bool) -> Iterator[Output]:
        """Pass one part, or all, as `Shard.outputs`."""
        count, taps = self.layer.parts, list(taps)
        first, last = (0, count - 1) if part is None else (part, part)
        assert not taps or first == last, "a tap outside of experts would see values once for each part"
        with self.layer.tapped(taps, stop=False) if first == 0 else nullcontext():
            stream = self._stream(again=first == 0)
        for number in range(self._done(first) if output else first, last):
            self._add(stream, number)
        with self.layer.tapped(taps, stop=False):
            if last < count - 1:
                self._add(stream, last, keep=output)
            else:
                yield from self._finish(stream, last, output=output)

    def key(self, stage: int) -> ShardKey:
        """Return the key of the state at a stage."""
        return (self.shard.lineage, self.layer.index, self.shard.number, (self.version, stage))

    def _stream(self, *, again: bool) -> HiddenReader:
        """Return the residual stream after the attention. `again`: compute it for its taps even if it is held."""
        held = self.hidden.get(self.key(STREAM))
        if held is not None and not again:
            return held

        def streams() -> Iterator[Tensor]:
            for start, stop in self.shard.batches:
                hidden_BSD = self._input(start, stop)
                with self.computing(), self.layer.checked(hidden_BSD):
                    stream_BSD = self.layer.attended(hidden_BSD)
                yield stream_BSD

        return self._hold(STREAM, self.layer.dtype, streams())

    def _done(self, first: int) -> int:
        """Return the first part to pass so that the sum of all parts before `first` is held."""
        return next((stage for stage in range(first, 0, -1) if self.hidden.get(self.key(stage)) is not None), 0)

    def _add(self, stream: HiddenReader, number: int, keep: bool = True) -> None:
        """Add the outputs of a part's experts to the shard's sum."""
        experts = self.layer.hold(number)

        def sums() -> Iterator[Tensor]:
            for stream_BSD, sum_TD in self._read(stream, number if keep else 0):
                with self.computing():
                    x_TD, routing = self.layer.module.routed(stream_BSD)
                    sum_TD = self.layer.module.with_experts(x_TD, routing, sum_TD, experts)
                yield sum_TD.view_as(stream_BSD)

        if keep:
            self._hold(number + 1, torch.promote_types(self.layer.dtype, torch.float32), sums())
            self.hidden.release(self.key(number))
        else:
            for _ in sums():
                pass

    def _finish(self, stream: HiddenReader, number: int, *, output: bool) -> Iterator[Output]:
        """Pass the last part and the shared expert."""
        experts = self.layer.hold(number)
        sums = self._read(stream, number if output else 0)
        for (start, stop), (stream_BSD, sum_TD) in zip(self.shard.batches, sums, strict=True):
            read = partial(self._input, start, stop)
            with self.computing():
                x_TD, routing = self.layer.module.routed(stream_BSD)
                sum_TD = self.layer.module.with_experts(x_TD, routing, sum_TD, experts)
                output_BSD = self.layer.module.finished(stream_BSD, x_TD, sum_TD)
                self.layer.require_finite(output_BSD, read)
            if output:
                yield read, output_BSD

    def _input(self, start: int, stop: int) -> Tensor:
        return self.inputs.read(start, stop).to(self.layer.device)

    def _read(self, stream: HiddenReader, stage: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the stream (B, S, D) of each micro-batch, and the sum (T, D) held at a stage."""
        sums = self.hidden.get(self.key(stage)) if stage else None
        assert sums is not None or not stage
        for start, stop in self.shard.batches:
            stream_BSD = stream.read(start, stop).to(self.layer.device)
            sum_BSD = None if sums is None else sums.read(start, stop).to(self.layer.device)
            yield stream_BSD, None if sum_BSD is None else sum_BSD.flatten(0, -2)

    def _hold(self, stage: int, dtype: torch.dtype, parts: Iterable[Tensor]) -> HiddenReader:
        return self.shard.hold_inside(self.key(stage), dtype, parts)


def _itself(hidden_BSD: Tensor) -> Tensor:
    return hidden_BSD
