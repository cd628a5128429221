"""Runs the backward pass of a shard's gradient samples through a layer. docs/methods.md#gradient-moments.

The gradient is that of a sample's summed log-likelihood of labels drawn from the model's own distribution. Labels and
random gradients depend only on the manifest's seed, the sample and the position, so every worker draws the same.

Legend: S sequence, D hidden, T rows of the head at a time, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from manifests.errors import NumericsError
from manifests.records import ArrayRecord
from pipeline.kernels.gradients import cut_logits, draw_labels
from pipeline.units.sharding import GRID_TOKENS
from pipeline.units.units import Backward, ShardDone
from stores.arrays import ArrayReader
from workers.copies import HiddenReader
from workers.device_settings import tensor_cores
from workers.differentiable import LayerGradients, residual_dtype
from workers.embedding_and_head import head
from workers.forward_pass import CalibrationRunner
from workers.gradient_samples import GradientOf, GradientSamples, SamplesState
from workers.sums import Squares
from workers.tapped_layer import Taps

ROWS_PER_HEAD = 256
LINEAGE = Backward.lineage


class BackwardRunner(CalibrationRunner):
    """Runs a worker's `Backward` units."""

    def run(self, unit: Backward) -> ShardDone:
        """Run a unit. Raises the errors of `gradients`."""
        taps = self.sums.taps(unit)
        with tensor_cores(self.setup.dtype), self.sums.adding(unit):
            record = self.gradients(unit, taps)
        record = record if unit.store else None
        return ShardDone({}, None, record, self.setup.gradient_count(unit.shard) * self.setup.sequence)

    def gradients(self, unit: Backward, taps: Taps) -> ArrayRecord | None:
        """Run all samples of the unit's shard. Return the record of gradients at the layer's inputs, if stored.

        `taps`: receive the gradients (S, F) of each sample at their points.

        Raises:
            NumericsError: NaN or infinity, naming layer and point.
            CorruptError: stored inputs or gradients are damaged.
        """
        if unit.forth:
            assert unit.part is not None
            self.hidden.release_beyond(LINEAGE, unit.base)
            with self.computing():
                self._samples(unit, unit.layer, (), unit.part).forth(unit.part)
            return None
        entered = unit.part is not None and self._state(unit, unit.layer).entered
        gradient_of = _needs_none if entered else self._gradients_at_output(unit)
        return self._through(unit, unit.layer, gradient_of, taps, unit.part, emit=unit.emit, store=unit.store)

    def begin(self, unit: Backward, squares: Squares) -> None:
        """Run the first tokens of the unit's samples, to choose grids, until no moment is silent.

        The gradients omit the effect on later tokens. Raises the errors of `gradients`.
        """
        gradient_of: GradientOf | None = None
        taps = squares.taps(unit)
        with tensor_cores(self.setup.dtype):
            for sample in range(self._opened(unit, unit.layer).shape[0]):
                if gradient_of is None and not self._state(unit, unit.layer, sample).entered:
                    gradient_of = _beginning(self._gradients_at_output(unit))
                for _ in self._back(unit, unit.layer, gradient_of or _needs_none, taps, unit.part, sample):
                    pass
                if not squares.silent:
                    return

    def _gradients_at_output(self, unit: Backward) -> GradientOf:
        """Return the gradients at the layer's output: held, stored, or recomputed from a later layer or the head."""
        self.hidden.release_beyond(LINEAGE, unit.base)
        if unit.probe:
            first, _ = self.setup.sample_range(unit.shard)
            return lambda sample, output_SD: self._probe(unit.layer, first + sample, output_SD)
        nearest = unit.layer + 1
        while (reader := self.hidden.get((LINEAGE, nearest, unit.shard))) is None and nearest < unit.base:
            nearest += 1
        if reader is None and unit.base_record is not None:
            reader = self.hidden.load((LINEAGE, unit.base, unit.shard), unit.base_record)
        gradient_of = self._head_gradient(unit) if reader is None else _read_from(reader)
        for layer in range(nearest - 1, unit.layer, -1):
            self._through(unit, layer, gradient_of, (), emit=True, store=False)
            reader = self.hidden.get((LINEAGE, layer, unit.shard))
            assert reader is not None
            gradient_of = _read_from(reader)
        return gradient_of

    def _through(
        self,
        unit: Backward,
        layer: int,
        gradient_of: GradientOf,
        taps: Taps,
        part: int | None = None,
        *,
        emit: bool,
        store: bool,
    ) -> ArrayRecord | None:
        """Run all samples back through a layer, or a part of it, and hold the gradients at its inputs if `emit`."""
        gradients = self._back(unit, layer, gradient_of, taps, part)
        if not emit or part:
            for _ in gradients:
                pass
            return None
        samples, sequence, features = self._opened(unit, layer).shape
        key, dtype = (LINEAGE, layer, unit.shard), residual_dtype(self.setup.dtype)
        parts = (gradient_SD[None] for gradient_SD in gradients)
        return self.hidden.keep_parts(key, (samples, sequence, features), dtype, parts, 1, store=store)

    def _back(
        self,
        unit: Backward,
        layer: int,
        gradient_of: GradientOf,
        taps: Taps,
        part: int | None,
        grid: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield the gradients (S, D) at the layer's inputs for each sample, after its first part. `grid`: see
        `_samples`."""
        samples = self._samples(unit, layer, taps, part, grid)
        if grid is None and (samples.parts == 1 or part == 0):
            samples.layer.block.hold(0, -1)  # first, because a layer that is read ahead takes the place of a part
            self.layers.read_ahead(unit.ahead if layer == unit.layer else layer - 1, back=not unit.probe)

        def see(gradients: Mapping[str, Tensor]) -> None:
            for point, tap in taps:
                if point in gradients:
                    tap(gradients[point])

        reads_output = unit.probe or self.hidden.get((LINEAGE, layer + 1, unit.shard)) is None
        with self.computing():
            yield from samples.back(part, gradient_of, see, reads_output=reads_output)

    def _samples(
        self, unit: Backward, layer: int, taps: Taps, part: int | None, grid: int | None = None
    ) -> GradientSamples:
        """Return the unit's samples at a layer. `grid`: only the first tokens of this sample, to choose grids."""
        step = 1 if part is None or unit.forth else 0 if unit.alone else -1
        block, inputs = self.layers.differentiable_block(layer, part or 0, step), self._opened(unit, layer)
        points = sorted({point for point, _ in taps})
        tokens = None if grid is None else GRID_TOKENS

        def read(sample: int) -> Tensor:
            return inputs.read(sample, sample + 1)[0, :tokens].to(self.layers.device)

        samples = range(inputs.shape[0]) if grid is None else (grid,)
        gradients = LayerGradients(block, points, every_expert=grid is not None)
        alone = unit.alone and grid is None
        return GradientSamples(gradients, self._state(unit, layer, grid), samples, read, alone=alone)

    def _state(self, unit: Backward, layer: int, grid: int | None = None) -> SamplesState:
        name = "samples" if grid is None else f"grid {grid}"
        return SamplesState(self.hidden, (LINEAGE, layer + 1, unit.shard), name)

    def _opened(self, unit: Backward, layer: int) -> ArrayReader:
        return self.activations.open(unit.inputs[layer - unit.layer])

    # -- sources of gradients ----------------------------------------------------------------------------------------

    def _head_gradient(self, unit: Backward) -> GradientOf:
        """Return the gradient of log p(ŷ), summed over positions, at the output of the last layer.

        Positions that predict the tokenizer's own prefix have none.
        """
        logits, fixed = head(self.layers), max(0, self.setup.prefix - 1)

        def gradient_of(sample: int, output_SD: Tensor) -> Tensor:
            generator = self._generator("labels", self.setup.sample_range(unit.shard)[0] + sample)
            uniform_S = torch.rand(len(output_SD), generator=generator, dtype=torch.float64)
            rows = zip(output_SD.split(ROWS_PER_HEAD), uniform_S.split(ROWS_PER_HEAD), strict=True)
            gradient_SD = torch.cat([self._log_likelihood_gradient(logits, *part) for part in rows])
            gradient_SD[:fixed] = 0.0
            return gradient_SD

        return gradient_of

    def _log_likelihood_gradient(
        self, logits: Callable[[Tensor], Tensor], hidden_TD: Tensor, uniform_T: Tensor
    ) -> Tensor:
        """Return the gradient (T, D) of log p(ŷ), for labels ŷ that the uniform numbers draw."""
        hidden_TD = hidden_TD.detach().requires_grad_()
        with torch.enable_grad():
            logits_TV = logits(hidden_TD.to(self.setup.dtype))
        try:
            label_T = draw_labels(logits_TV, uniform_T)
        except ValueError as error:
            raise NumericsError(f"head: {error}") from error
        label_T = label_T.to(logits_TV.device)
        residue_TV = logits_TV.detach()  # becomes d log p(ŷ) / d logits = onehot(ŷ) − p, in the memory of the logits
        for (rows_TV,) in cut_logits(residue_TV):
            torch.neg(torch.softmax(rows_TV, dim=1), out=rows_TV)
        residue_TV[torch.arange(len(label_T), device=label_T.device), label_T] += 1.0
        (gradient_TD,) = torch.autograd.grad(logits_TV, hidden_TD, residue_TV)
        return gradient_TD

    def _probe(self, layer: int, sample: int, output_SD: Tensor) -> Tensor:
        """Return normal random numbers, scaled so that errors are relative to the token's residual stream."""
        noise_SD = torch.randn(output_SD.shape, generator=self._generator(f"probe/{layer}", sample))
        scale_S1 = output_SD.float().square().mean(dim=1, keepdim=True).clamp_min(1e-30).rsqrt()
        return (noise_SD.to(output_SD.device) * scale_S1).to(output_SD.dtype)

    def _generator(self, purpose: str, sample: int) -> torch.Generator:
        seed = self.setup.manifest.seed if self.setup.manifest else 0
        name = hashlib.sha256(f"{seed}/{purpose}/{sample}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(name[:8], "big") >> 1)


def _beginning(gradient_of: GradientOf) -> GradientOf:
    """Return the gradients at the first tokens of samples, if only these have passed the layer."""
    return lambda sample, output_SD: gradient_of(sample, output_SD)[: len(output_SD)]


def _needs_none(sample: int, output_SD: Tensor) -> Tensor:
    raise AssertionError("no gradient at the layer's output is due: these samples are already past it")


def _read_from(reader: HiddenReader) -> GradientOf:
    return lambda sample, output_SD: reader.read(sample, sample + 1)[0].to(output_SD.device)
