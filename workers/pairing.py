"""Runs shards through the dense layer and the current draft of the compressed one. docs/methods.md#corrections.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch, F features at a point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lamina.mixture_lamina import ROUTER
from manifests.errors import NumericsError
from manifests.records import ArrayRecord, StagedLayer
from pipeline.families.blocks import Block, MLPBlock
from pipeline.kernels.checks import require_finite
from pipeline.kernels.normed import before_norm
from pipeline.methods.method import Moment
from pipeline.units.sharding import GRID_TOKENS
from pipeline.units.units import Pair
from stores.activations import ActivationStore
from workers.config import WorkerConfig
from workers.copies import HiddenReader
from workers.embedding_and_head import embedding
from workers.hidden import HiddenStates
from workers.layers import LayerReader
from workers.tapped_layer import Tap, TappedLayer, overflow_advice

LINEAGE = "paired"
Take = Callable[[Moment, Tensor, Tensor], None]  # receives the values at a moment's point: x, and e


class PairPass:
    """Runs a worker's `Pair` units, and holds a compressed layer in addition to the worker's dense one."""

    def __init__(
        self,
        setup: WorkerConfig,
        layers: LayerReader,
        hidden: HiddenStates,
        store: ActivationStore,
        tokens: Callable[[int, int], Tensor],
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.setup = setup
        self.layers = layers
        self.packed = LayerReader(setup, layers.device)
        self.hidden = hidden
        self.store = store
        self.tokens = tokens
        self.computing = computing

    def run(self, unit: Pair, take: Take | None) -> ArrayRecord | None:
        """Run a unit. Return the record of the outputs, if stored. `take`: adds the unit's moments; None: sum nothing.

        Raises:
            NumericsError: NaN or infinity, naming layer and point.
            CorruptError: stored hidden states or a staged layer are damaged.
        """
        inputs = self._inputs(unit)
        if unit.targets:
            return self._store_targets(unit, inputs)
        return self._through(unit, unit.layer, unit.staged, inputs, take, emit=unit.emit)

    def begin(self, unit: Pair, take: Take) -> None:
        """Run the first tokens of a unit's shard to choose grids. Raises the errors of `run`."""
        inputs, (dense, packed) = self._inputs(unit), self._blocks(unit.layer, unit.staged)
        dense_BSD, packed_BSD = (hidden_BSD[:, :GRID_TOKENS] for hidden_BSD in self._read(inputs, 0, 1))
        with packed.every_expert():
            self._take(unit, take, dense, packed, dense_BSD, packed_BSD)

    def release(self) -> None:
        """Release the compressed layer."""
        self.packed.release()

    def _store_targets(self, unit: Pair, inputs: HiddenReader) -> ArrayRecord:
        """Store the dense layer's outputs and the inputs of the training. Hold both models' outputs if `unit.emit`."""
        dense, packed = self._blocks(unit.layer, unit.staged)
        self.layers.read_ahead(unit.ahead)
        shape, dtype, shard_key = self._shape(unit.shard), self.setup.dtype, (LINEAGE, unit.layer + 1, unit.shard)
        hidden = self.hidden.hidden_writer(shard_key, shape, dtype, False, self._batch) if unit.emit else None
        with self.store.writer("targets", unit.layer, unit.shard, shape, dtype, self._batch) as writer:
            for start, stop in self.setup.micro_batches(unit.shard):
                dense_BSD, packed_BSD = self._read(inputs, start, stop)
                with self.computing():
                    output_BSD = _run(dense, dense_BSD)
                    if hidden is not None:
                        other_BSD = output_BSD if unit.both_dense else _run(packed, packed_BSD)
                        hidden.append(torch.cat((output_BSD, other_BSD), dim=-1))
                input_BSD = packed_BSD if unit.share == 1.0 else _mixed(dense_BSD, packed_BSD, unit.share)
                writer.append(torch.cat((output_BSD, input_BSD), dim=-1).cpu())
            if hidden is not None:
                self.hidden.keep(shard_key, hidden)
            return writer.commit()

    def _replay(self, unit: Pair, layer: int, staged: StagedLayer | None, inputs: HiddenReader) -> HiddenReader:
        self._through(unit, layer, staged, inputs, None, emit=True)
        return self._held(layer + 1, unit.shard)

    def _embedded(self, shard: int) -> HiddenReader:
        embed, (first, _) = embedding(self.layers), self.setup.sample_range(shard)
        writer = self.hidden.hidden_writer(
            (LINEAGE, 0, shard), self._shape(shard), self.setup.dtype, False, self._batch
        )
        for start, stop in self.setup.micro_batches(shard):
            hidden_BSD = embed(self.tokens(first + start, first + stop))
            writer.append(torch.cat((hidden_BSD, hidden_BSD), dim=-1))
        self.hidden.keep((LINEAGE, 0, shard), writer)
        return self._held(0, shard)

    def _through(
        self,
        unit: Pair,
        layer: int,
        staged: StagedLayer | None,
        inputs: HiddenReader,
        take: Take | None,
        *,
        emit: bool,
    ) -> ArrayRecord | None:
        """Run all micro-batches through both layers, for values at the unit's points and, with `emit`, for outputs."""
        own = layer == unit.layer
        if own and unit.known is not None:
            return self._behind_targets(unit, unit.known, inputs)
        dense, packed = self._blocks(layer, staged)
        self.layers.read_ahead(unit.ahead if own else None)
        shard_key = (LINEAGE, layer + 1, unit.shard)
        shape = self._shape(unit.shard)
        store = own and unit.store
        writer = self.hidden.hidden_writer(shard_key, shape, self.setup.dtype, store, self._batch) if emit else None
        for start, stop in self.setup.micro_batches(unit.shard):
            dense_BSD, packed_BSD = self._read(inputs, start, stop)
            if take is not None:
                self._take(unit, take, dense, packed, dense_BSD, packed_BSD)
            with self.computing():
                if writer is not None:
                    output_BSD = _run(dense, dense_BSD)
                    other_BSD = output_BSD if unit.both_dense else _run(packed, packed_BSD)
                    writer.append(torch.cat((output_BSD, other_BSD), dim=-1))
        return self.hidden.keep(shard_key, writer) if writer is not None else None

    def _behind_targets(self, unit: Pair, known: ArrayRecord, inputs: HiddenReader) -> ArrayRecord | None:
        """Hold the outputs of the compressed layer, and those of the dense layer that the targets contain."""
        self.layers.read_ahead(unit.ahead)
        packed, targets = self.packed.block(unit.layer, unit.staged), self.store.open(known)
        shard_key = (LINEAGE, unit.layer + 1, unit.shard)
        writer = self.hidden.hidden_writer(
            shard_key, self._shape(unit.shard), self.setup.dtype, unit.store, self._batch
        )
        for start, stop in self.setup.micro_batches(unit.shard):
            (output_BSD, _), (_, packed_BSD) = self._read(targets, start, stop), self._read(inputs, start, stop)
            with self.computing():
                writer.append(torch.cat((output_BSD, _run(packed, packed_BSD)), dim=-1))
        return self.hidden.keep(shard_key, writer)

    def _take(
        self, unit: Pair, take: Take, dense: TappedLayer, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor
    ) -> None:
        of_points = {moment.point: moment for moment in unit.moments}
        with self.computing():
            for point, values, errors in layer_pairs(dense, packed, dense_BSD, packed_BSD, of_points):
                try:
                    require_finite("errors", errors)
                    require_finite("values", values)
                except ValueError as error:
                    advice = overflow_advice(values.dtype)
                    raise NumericsError(f"layer {unit.layer}: both models at {point}: {error}; {advice}") from error
                take(of_points[point], values, errors)

    def _inputs(self, unit: Pair) -> HiddenReader:
        return self.hidden.inputs(LINEAGE, unit, partial(self._embedded, unit.shard), partial(self._replay, unit))

    def _blocks(self, layer: int, staged: StagedLayer | None) -> tuple[TappedLayer, TappedLayer]:
        """Return the dense layer, and the current draft of the compressed one."""
        dense = self.layers.block(layer, None)
        return dense, self.packed.block(layer, staged) if staged is not None else dense

    def _read(self, inputs: HiddenReader, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the dense and of the compressed model."""
        dense_BSD, packed_BSD = inputs.read(start, stop).to(self.layers.device).chunk(2, dim=-1)
        return dense_BSD, packed_BSD

    def _held(self, layer: int, shard: int) -> HiddenReader:
        reader = self.hidden.get((LINEAGE, layer, shard))
        assert reader is not None
        return reader

    def _shape(self, shard: int) -> tuple[int, int, int]:
        return self.setup.samples_of(shard), self.setup.tokens_shape[1], 2 * self.setup.geometry.hidden

    @property
    def _batch(self) -> int:
        return self.setup.micro_batch


def _mixed(dense_BSD: Tensor, packed_BSD: Tensor, share: float) -> Tensor:
    """Return the dense model's hidden states with a share of the compressed model's error."""
    return torch.lerp(_wide(dense_BSD), _wide(packed_BSD), share).to(dense_BSD.dtype)


def layer_pairs(
    dense: TappedLayer, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor, points: Collection[str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each of the points of a step, `LayerGeometry.corrected_points`, with x and e there.

    Points of routed experts without tokens are left out; those of others have x and e of the expert's tokens.
    """
    if {*points} <= {*packed.geometry.expert_points}:
        yield from _expert_values(dense, packed, dense_BSD, packed_BSD, points)
    else:
        for point in points:
            yield point, *_values(dense, packed, dense_BSD, packed_BSD, point)


def _expert_values(
    dense: TappedLayer, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor, points: Collection[str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield points of experts with x (t, F) and e (t, D): each of a token's k experts corrects a k-th of the error.

    If every expert sees all tokens, x and e are those of all tokens.
    """
    seen: dict[str, list[Tensor]] = {point: [] for point in points}
    routings: list[Any] = []
    taps: list[tuple[str, Tap]] = [(point, values.append) for point, values in seen.items()]
    packed_out = _run(packed, packed_BSD, *taps, (f"{ROUTER}.out", routings.append))
    ((_, chosen_Tk),) = routings
    errors_TD = (_wide(_run(dense, dense_BSD)) - _wide(packed_out)).flatten(0, -2) / chosen_Tk.shape[1]
    gains, norm_eps = packed.module.output_gains(MLPBlock.out_norm)
    assert norm_eps is None, "no family has a norm behind its mixture"
    if packed.module.residual_scale is not None:
        _, errors_TD = before_norm(errors_TD, errors_TD, errors_TD, gains, None)
    for point, values in seen.items():
        if values:
            of_expert_Tk = chosen_Tk == int(point.split(".")[1])
            all_pass = packed.module.every_expert
            yield point, values[0], errors_TD if all_pass else errors_TD[of_expert_Tk.any(dim=1)]


def _values(
    dense: TappedLayer, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor, point: str
) -> tuple[Tensor, Tensor]:
    """Return x at a point of the compressed layer, and e as defined in `methods.method.Moment`, in float32 or
    better."""
    writing = {block.writer.reads: block for block in packed.geometry.matrix_blocks}
    if point not in writing:  # the input of a block, whose error is the difference to the same point of the dense layer
        values_BSF = _at(packed, packed_BSD, point)
        return values_BSF, _wide(_at(dense, dense_BSD, point)) - _wide(values_BSF)
    block = writing[point]
    written = f"{block.writer.role}.out"
    if block.stream == "mid":
        values_BSF, output_BSD = _both(packed, packed_BSD, point, written)
        streams = (dense, dense_BSD, _at(dense, dense_BSD, written)), (packed, packed_BSD, output_BSD)
        dense_mid, packed_mid = (_wide(stream) + _added(layer, block, output) for layer, stream, output in streams)
        errors_BSD = dense_mid - packed_mid
    else:
        caught: dict[str, Tensor] = {}
        taps = ((name, partial(caught.__setitem__, name)) for name in (point, written))
        packed_out = _run(packed, packed_BSD, *taps)
        values_BSF, output_BSD = caught[point], caught[written]
        errors_BSD = _wide(_run(dense, dense_BSD)) - _wide(packed_out)
    if block.writer.feeds == block.stream:
        return values_BSF, errors_BSD
    gains, norm_eps = packed.module.output_gains(block.out_norm)
    return before_norm(values_BSF, _wide(output_BSD), errors_BSD, gains, norm_eps)


def _added(layer: TappedLayer, block: Block, output_BSD: Tensor) -> Tensor:
    """Return the numbers that a block adds to the residual stream, from its writer's outputs."""
    return layer.module.written(block.out_norm, _wide(output_BSD))


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _run(block: TappedLayer, hidden_BSD: Tensor, *taps: tuple[str, Callable[[Tensor], None]]) -> Tensor:
    output_BSD = block.run(hidden_BSD, taps)
    assert output_BSD is not None
    return output_BSD


def _at(block: TappedLayer, hidden_BSD: Tensor, point: str) -> Tensor:
    (values,) = _both(block, hidden_BSD, point)
    return values


def _both(block: TappedLayer, hidden_BSD: Tensor, *points: str) -> list[Tensor]:
    """Return the values at some points. The pass ends at the last point."""
    caught: dict[str, Tensor] = {}
    taps = [(point, lambda values, point=point: caught.update({point: values})) for point in points]
    block.run(hidden_BSD, taps, output=False)
    return [caught[point] for point in points]
