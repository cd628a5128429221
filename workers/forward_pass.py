"""Runs calibration shards through layers, for statistics and for the inputs of the next layer.

Legend: B micro-batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from manifests.records import ArrayRecord
from pipeline.kernels.moments import cosine_sums
from pipeline.methods.method import Moment
from pipeline.units.units import Forward, ShardDone, Unwritten
from stores.activations import ActivationStore
from workers.config import WorkerConfig
from workers.copies import HiddenReader
from workers.embedding_and_head import split_taps
from workers.hidden import HiddenStates
from workers.layers import LayerReader
from workers.shards import Computing, Read, Shard
from workers.sums import LayerSums, Squares
from workers.tapped_layer import TappedLayer, Taps, sample_tap
from workers.tensor_transfer import get_available
from workers.written_tensors import WrittenTensors


class CalibrationRunner:
    """Runs units of a worker on calibration shards."""

    def __init__(
        self,
        setup: WorkerConfig,
        layers: LayerReader,
        hidden: HiddenStates,
        activations: ActivationStore,
        sums: LayerSums,
        tokens: Callable[[int, int], Tensor],
        computing: Computing,
    ) -> None:
        """`tokens`: returns ids (B, S) of calibration samples start to stop."""
        self.setup = setup
        self.layers = layers
        self.hidden = hidden
        self.activations = activations
        self.sums = sums
        self.tokens = tokens
        self.computing = computing


class CalibrationShard(Shard):
    """A shard of the calibration samples."""

    def __init__(self, owner: CalibrationRunner, lineage: str, number: int, models: int = 1) -> None:
        """`models`: the number of models whose hidden states are side by side."""
        setup, self.owner = owner.setup, owner
        samples, sequence, features = setup.shard_shape(number)
        shape_MSD = samples, sequence, models * features
        super().__init__(owner.hidden, owner.layers, owner.computing, lineage, number, shape_MSD, setup.micro_batch)

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return token ids (B, S) of samples start to stop, on the device."""
        first, _ = self.owner.setup.sample_range(self.number)
        return self.owner.tokens(first + start, first + stop)


class ForwardRunner(CalibrationRunner):
    """Runs a worker's `Forward` units."""

    def run(self, unit: Forward) -> ShardDone:
        """Run a unit. Raises the errors of `Worker.execute`."""
        shard = CalibrationShard(self, unit.lineage, unit.shard)
        inputs, layer = shard.inputs(unit), self._layer(unit)
        if layer.parts == 1 or unit.part is not None:  # other units pass all parts again, for another shard
            self.layers.read_ahead(unit.ahead, shared=partial(get_available, self.sums.transfer, unit.ahead_weights))
        samples: dict[Moment, Tensor] = {}
        inside, behind = split_taps(self.layers, self._taps(unit, samples))
        total, count = 0.0, 0

        def see(read: Read, output_BSD: Tensor) -> None:
            nonlocal total, count
            if unit.cosine:
                cosines, tokens = cosine_sums(read(), output_BSD)
                total, count = total + cosines, count + tokens
            if behind is not None:
                behind(output_BSD)

        kept_inputs = self._keep_inputs(unit, inputs) if unit.keep_inputs else None  # before the outputs replace them
        with self.sums.adding(unit):
            record = shard.through(
                layer,
                inputs,
                inside,
                unit.part,
                emit=unit.emit,
                store=unit.store,
                see=see if unit.cosine or behind is not None else None,
            )
        return ShardDone(
            partials={moment: self.sums.transfer.put({"moment": values}) for moment, values in samples.items()},
            cosine=(total, count) if count else None,
            activation=record,
            tokens=self.setup.samples_of(unit.shard) * self.setup.sequence,
            inputs=kept_inputs,
        )

    def begin(self, unit: Forward, squares: Squares) -> None:
        """Run the first tokens of a unit's shard, to choose the grids of its sums."""
        shard = CalibrationShard(self, unit.lineage, unit.shard)
        inputs, layer = shard.inputs(unit), self._layer(unit)
        inside, behind = split_taps(self.layers, squares.taps(unit))
        output_BSD = shard.begin(layer, inputs, inside, output=behind is not None)
        if behind is not None and output_BSD is not None:
            behind(output_BSD)

    def _layer(self, unit: Forward) -> TappedLayer:
        if isinstance(unit.staged, Unwritten):
            tensors = partial(WrittenTensors, unit.staged.write, self.setup, self.sums.transfer)
            return self.layers.unwritten_block(unit.staged, tensors)
        shared = partial(get_available, self.sums.transfer, unit.weights)
        return self.layers.block(unit.layer, unit.staged, shared)

    def _taps(self, unit: Forward, samples: dict[Moment, Tensor]) -> Taps:
        """Return taps for the unit's moments. A shard is not added to sums that contain it."""
        first = self.setup.sample_range(unit.shard)[0] * self.setup.sequence
        taps = [
            (moment.point, sample_tap(moment, samples, first, self.setup.calibration_tokens))
            for moment in unit.moments
            if moment.kind == "sample"
        ]
        return [*taps, *self.sums.taps(unit)]

    def _keep_inputs(self, unit: Forward, inputs: HiddenReader) -> ArrayRecord:
        """Store the inputs of the samples that the backward pass will run."""
        count = self.setup.gradient_count(unit.shard)
        shape_MSD = (count, self.setup.sequence, self.setup.geometry.hidden)
        with self.activations.writer("inputs", unit.layer, unit.shard, shape_MSD, self.setup.dtype) as writer:
            for sample in range(count):
                writer.append(inputs.read(sample, sample + 1))
            return writer.commit()
