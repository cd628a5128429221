"""Runs shards through the dense layer and the current draft of the compressed one. docs/methods.md#corrections.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch, F features at a point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lamina.mixture_lamina import ROUTER
from manifests.records import ArrayRecord, StagedLayer
from pipeline.families.blocks import Block, MLPBlock
from pipeline.kernels.normed import before_norm, inverse_rms
from pipeline.units.units import Pair, ShardDone
from workers.branched_layer import Places
from workers.copies import HiddenReader
from workers.device_settings import tensor_cores
from workers.forward_pass import CalibrationRunner, CalibrationShard
from workers.hidden import InMemory, ShardKey
from workers.layers import LayerReader
from workers.shards import Read
from workers.sums import Squares
from workers.tapped_layer import Tap, TappedLayer, Taps


class PairedLayer:
    """The dense layer and the current draft of the compressed one, as one layer of both models' hidden states.

    They are side by side, (B, S, 2·D), the dense model's first.
    """

    def __init__(self, dense: TappedLayer | None, packed: TappedLayer | None, *, both_dense: bool = False) -> None:
        """`dense` None: the dense model's inputs are its outputs already. `packed` None: outputs are the dense model's
        alone. `both_dense`: both models are the dense one."""
        self.dense, self.packed, self.both_dense = dense, packed, both_dense
        self.index, self.parts = next(layer.index for layer in (dense, packed) if layer is not None), 1

    def run(
        self,
        hidden_BSD: Tensor,
        taps: Taps = (),
        output: bool = True,
        places: Places | None = None,
    ) -> Tensor | None:
        """Return both models' outputs; None if `output` is off. Taps receive x and e, see `layer_pairs`."""
        dense_BSD, packed_BSD = hidden_BSD.chunk(2, dim=-1)
        if of_points := dict(taps):
            assert self.packed is not None
            for point, values, errors in layer_pairs(self.dense, self.packed, dense_BSD, packed_BSD, of_points):
                of_points[point](_rounded(values, hidden_BSD.dtype), _rounded(errors, hidden_BSD.dtype))
        if not output:
            return None
        outputs = [_run(self.dense, dense_BSD)]
        if self.packed is not None:
            outputs.append(outputs[0] if self.both_dense else _run(self.packed, packed_BSD))
        return torch.cat(outputs, dim=-1)

    def attended(self, hidden_BSD: Tensor) -> Tensor:
        """Return both models' residual streams (B, S, 2·D) behind the attention."""
        assert self.dense is not None
        assert self.packed is not None
        dense_BSD, packed_BSD = hidden_BSD.chunk(2, dim=-1)
        streams = [_attended(self.dense, dense_BSD)]
        streams.append(streams[0] if self.both_dense else _attended(self.packed, packed_BSD))
        return torch.cat(streams, dim=-1)

    def with_dense_outputs(self, hidden_BSD: Tensor) -> Tensor:
        """Return the dense model's outputs beside the compressed model's inputs (B, S, 2·D)."""
        dense_BSD, packed_BSD = hidden_BSD.chunk(2, dim=-1)
        return torch.cat((_run(self.dense, dense_BSD), packed_BSD), dim=-1)

    def behind_attention(self) -> PairedLayer:
        """Return the part of both layers behind the attention."""
        dense, packed = (None if layer is None else layer.behind_attention() for layer in (self.dense, self.packed))
        return PairedLayer(dense, packed, both_dense=self.both_dense)

    def every_expert(self) -> AbstractContextManager[None]:
        """Return a context in which x and e are of every expert on all tokens."""
        assert self.packed is not None
        return self.packed.every_expert()


class PairedShard(CalibrationShard):
    """A calibration shard on its way through both models."""

    def __init__(self, owner: PairRunner, unit: Pair) -> None:
        super().__init__(owner, unit.lineage, unit.shard, models=2)
        self.packed, self.unit = owner.packed, unit

    def embedded(self) -> Iterator[Tensor]:
        """Yield the inputs (B, S, 2·D) of the first layer."""
        for hidden_BSD in super().embedded():
            yield torch.cat((hidden_BSD, hidden_BSD), dim=-1)

    def layer(self, number: int, staged: StagedLayer | None) -> PairedLayer:
        """Return a layer of both models."""
        dense = self.layers.block(number, None)
        packed = self.packed.block(number, staged) if staged is not None else dense
        return PairedLayer(dense, packed, both_dense=self.unit.both_dense)

    def step(self) -> tuple[PairedLayer, HiddenReader]:
        """Return the part of both layers that the unit passes, and its inputs.

        The steps of the MLP begin at the residual streams behind the attention, which no step changes any more, and the
        last step and the next layer's inputs begin at the dense layer's outputs. Each of these is computed once, and
        held in place of the one before it. If the layer's inputs are not in memory, all steps begin at them.
        """
        unit, geometry = self.unit, self.layers.setup.geometry.layers[self.unit.layer]
        first, last = geometry.attention_steps, unit.step >= len(geometry.corrected_points) - 1
        if first is None or len(unit.drafts) <= first:
            return self.layer(unit.layer, unit.staged), self.inputs(unit)
        streams, outputs = (self._key(name, unit.drafts[first]) for name in ("streams", "outputs"))
        reader = self.hidden.get(outputs) if last else None
        if reader is None:
            layer = self.layer(unit.layer, unit.staged)
            reader = self.hidden.get(streams)
            if reader is None:
                inputs = self.inputs(unit)
                if not isinstance(inputs, InMemory):
                    return layer, inputs
                reader = self._pass(layer.attended, inputs, streams)
            if not last:
                return layer.behind_attention(), reader
            reader = self._pass(layer.behind_attention().with_dense_outputs, reader, outputs)
        packed = self.packed.block(unit.layer, unit.staged) if unit.staged else self.layers.block(unit.layer, None)
        return PairedLayer(None, packed.behind_attention()), reader

    def _key(self, name: str, draft: str) -> ShardKey:
        """Return the key of hidden states inside the layer, which the draft's attention computes."""
        return (self.lineage, self.unit.layer, self.number, (name, draft))

    def _pass(self, compute: Callable[[Tensor], Tensor], inputs: HiddenReader, key: ShardKey) -> HiddenReader:
        """Compute hidden states inside the layer, and hold them in place of their inputs."""

        def results() -> Iterator[Tensor]:
            for hidden_BSD in self.hidden.copies.batches(inputs, self.batches):
                with self.computing():
                    result_BSD = compute(hidden_BSD)
                yield result_BSD

        reader = self.hold_inside(key, self.layers.setup.dtype, results())
        self.hidden.release_others(key)
        return reader


class PairRunner(CalibrationRunner):
    """Runs a worker's `Pair` units, and holds a compressed layer in addition to the worker's dense one."""

    @cached_property
    def packed(self) -> LayerReader:
        """Return the reader of compressed layers."""
        return LayerReader(self.setup, self.layers.device)

    def run(self, unit: Pair) -> ShardDone:
        """Run a unit. Raises the errors of `Worker.execute`, naming layer and point."""
        shard, taps = PairedShard(self, unit), self.sums.taps(unit)
        record: ArrayRecord | None
        with tensor_cores(self.setup.dtype), self.sums.adding(unit):
            if unit.targets:
                record = self._store_targets(unit, shard, shard.inputs(unit))
            elif unit.known is not None:
                record = self._behind_targets(unit, shard, self.activations.open(unit.known), shard.inputs(unit))
            else:
                layer, inputs = shard.step()
                self.layers.read_ahead(unit.ahead)
                record = shard.through(layer, inputs, taps, emit=unit.emit, store=unit.store)
        return ShardDone({}, None, record, self.setup.samples_of(unit.shard) * self.setup.sequence)

    def begin(self, unit: Pair, squares: Squares) -> None:
        """Run the first tokens of a unit's shard, to choose the grids of its sums."""
        shard = PairedShard(self, unit)
        with tensor_cores(self.setup.dtype):
            layer, inputs = shard.step()
            shard.begin(layer, inputs, squares.taps(unit))

    def release(self) -> None:
        """Release the compressed layer."""
        self.packed.release()

    def _store_targets(self, unit: Pair, shard: PairedShard, inputs: HiddenReader) -> ArrayRecord:
        """Store the dense layer's outputs and the inputs of the training. Hold both models' outputs if `unit.emit`."""
        dense_alone = PairedLayer(self.layers.block(unit.layer, None), None)
        layer = shard.layer(unit.layer, unit.staged) if unit.emit else dense_alone
        self.layers.read_ahead(unit.ahead)
        features, shape, dtype = self.setup.geometry.hidden, shard.shape, self.setup.dtype
        with self.activations.writer("targets", unit.layer, unit.shard, shape, dtype, shard.batch) as writer:

            def see(read: Read, output_BSD: Tensor) -> None:
                dense_BSD, packed_BSD = read().chunk(2, dim=-1)
                input_BSD = packed_BSD if unit.share == 1.0 else _mixed(dense_BSD, packed_BSD, unit.share)
                writer.append(torch.cat((output_BSD[..., :features], input_BSD), dim=-1).cpu())

            shard.through(layer, inputs, emit=unit.emit, see=see)
            return writer.commit()

    def _behind_targets(
        self, unit: Pair, shard: PairedShard, targets: HiddenReader, inputs: HiddenReader
    ) -> ArrayRecord | None:
        """Hold the outputs of the compressed layer, and those of the dense layer that the targets contain."""
        self.layers.read_ahead(unit.ahead)
        layer = PairedLayer(None, self.packed.block(unit.layer, unit.staged))
        return shard.through(layer, SideBySide(targets, inputs), store=unit.store)


class SideBySide:
    """The dense model's part of some hidden states (M, S, 2·D), beside the compressed model's part of others."""

    def __init__(self, dense: HiddenReader, packed: HiddenReader) -> None:
        self.dense, self.packed = dense, packed

    def read(self, start: int, stop: int) -> Tensor:
        """Return samples start to stop."""
        dense_MSD, _ = self.dense.read(start, stop).chunk(2, dim=-1)
        _, packed_MSD = self.packed.read(start, stop).chunk(2, dim=-1)
        return torch.cat((dense_MSD.to(packed_MSD.device), packed_MSD), dim=-1)


def _mixed(dense_BSD: Tensor, packed_BSD: Tensor, share: float) -> Tensor:
    """Return the dense model's hidden states with a share of the compressed model's error."""
    return torch.lerp(_wide(dense_BSD), _wide(packed_BSD), share).to(dense_BSD.dtype)


def layer_pairs(
    dense: TappedLayer | None, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor, points: Collection[str]
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
    dense: TappedLayer | None, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor, points: Collection[str]
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
    dense: TappedLayer | None, packed: TappedLayer, dense_BSD: Tensor, packed_BSD: Tensor, point: str
) -> tuple[Tensor, Tensor]:
    """Return x at a point of the compressed layer, and e as defined in `methods.method.Moment`, in float32 or better.

    At the input of a block's writer, x and e of each token are multiplied by `inverse_rms` of the dense stream.
    """
    writing = {block.writer.reads: block for block in packed.geometry.matrix_blocks}
    if point not in writing:  # the input of a block, whose error is the difference to the same point of the dense layer
        assert dense is not None
        values_BSF = _at(packed, packed_BSD, point)
        return values_BSF, _wide(_at(dense, dense_BSD, point)) - _wide(values_BSF)
    block = writing[point]
    written = f"{block.writer.role}.out"
    if block.stream == "mid":
        assert dense is not None
        values_BSF, output_BSD = _both(packed, packed_BSD, point, written)
        streams = (dense, dense_BSD, _at(dense, dense_BSD, written)), (packed, packed_BSD, output_BSD)
        dense_mid, packed_mid = (_wide(stream) + _added(layer, block, output) for layer, stream, output in streams)
        stream_BSD, errors_BSD = dense_mid, dense_mid - packed_mid
    else:
        caught: dict[str, Tensor] = {}
        taps = ((name, partial(caught.__setitem__, name)) for name in (point, written))
        packed_out = _run(packed, packed_BSD, *taps)
        values_BSF, output_BSD = caught[point], caught[written]
        stream_BSD = _wide(_run(dense, dense_BSD))
        errors_BSD = stream_BSD - _wide(packed_out)
    if block.writer.feeds != block.stream:
        gains, norm_eps = packed.module.output_gains(block.out_norm)
        values_BSF, errors_BSD = before_norm(values_BSF, _wide(output_BSD), errors_BSD, gains, norm_eps)
    weight_T1 = inverse_rms(stream_BSD).flatten(0, -2)
    return values_BSF.flatten(0, -2) * weight_T1, errors_BSD.flatten(0, -2) * weight_T1


def _added(layer: TappedLayer, block: Block, output_BSD: Tensor) -> Tensor:
    """Return the numbers that a block adds to the residual stream, from its writer's outputs."""
    return layer.module.written(block.out_norm, _wide(output_BSD))


def _rounded(values: Tensor, stored: torch.dtype) -> Tensor:
    """Round the values of a model in bfloat16 to it, as its forward pass does: their sums are several times as fast."""
    return values.to(stored) if stored == torch.bfloat16 else values


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _run(block: TappedLayer | None, hidden_BSD: Tensor, *taps: tuple[str, Callable[[Tensor], None]]) -> Tensor:
    """Return a layer's outputs. Without a layer, these are the hidden states themselves."""
    if block is None:
        return hidden_BSD
    output_BSD = block.run(hidden_BSD, taps)
    assert output_BSD is not None
    return output_BSD


@torch.inference_mode()
def _attended(layer: TappedLayer, hidden_BSD: Tensor) -> Tensor:
    with layer.checked(hidden_BSD):
        return layer.attended(hidden_BSD)


def _at(block: TappedLayer, hidden_BSD: Tensor, point: str) -> Tensor:
    (values,) = _both(block, hidden_BSD, point)
    return values


def _both(block: TappedLayer, hidden_BSD: Tensor, *points: str) -> list[Tensor]:
    """Return the values at some points. The pass ends at the last point."""
    caught: dict[str, Tensor] = {}
    taps = [(point, lambda values, point=point: caught.update({point: values})) for point in points]
    block.run(hidden_BSD, taps, output=False)
    return [caught[point] for point in points]
