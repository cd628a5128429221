"""Runs the backward pass of a shard's gradient samples through a layer. docs/methods.md#gradient-moments.

The gradient is that of a sample's summed log-likelihood of labels drawn from the model's own distribution. Labels and
random gradients depend only on the manifest's seed, the sample and the position, so every worker draws the same.

Legend: S sequence, D hidden, T rows of the head at a time, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from manifests.errors import NumericsError
from manifests.records import ArrayRecord
from pipeline.kernels.gradients import cut_logits, draw_labels
from pipeline.methods.method import Moment
from pipeline.units.sharding import GRID_TOKENS
from pipeline.units.units import Backward
from stores.activations import ActivationStore
from stores.arrays import ArrayReader
from workers.config import WorkerConfig
from workers.copies import HiddenReader
from workers.differentiable import DifferentiableLayer, residual_dtype
from workers.embedding_and_head import head
from workers.hidden import HiddenStates, HiddenWriter
from workers.layers import LayerReader
from workers.sliced_gradients import SlicedGradients, SlicedState
from workers.streamed_gradients import StreamedGradients

ROWS_PER_HEAD = 256
LINEAGE = Backward.lineage
Take = Callable[[Moment, Tensor], None]  # receives a sample's gradients (S, F) at a moment's point
GradientOf = Callable[[int, Tensor], Tensor]  # sample of the shard, layer output (S, D) -> its gradient (S, D)


class BackwardPass:
    """Runs `Backward` units of a worker."""

    def __init__(
        self,
        setup: WorkerConfig,
        layers: LayerReader,
        hidden: HiddenStates,
        activations: ActivationStore,
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.setup = setup
        self.layers = layers
        self.hidden = hidden
        self.activations = activations
        self.computing = computing

    def run(self, unit: Backward, take: Take | None) -> ArrayRecord | None:
        """Run all samples of the unit's shard. Return the record of gradients at the layer's inputs, if stored.

        `take`: adds the unit's moments; None if they are not wanted.

        Raises:
            NumericsError: NaN or infinity, naming layer and point.
            CorruptError: stored inputs or gradients are damaged.
        """
        if unit.part is not None:
            return self._run_part(unit, unit.part, take)
        gradient_of = self._gradients_at_output(unit)
        return self._through(unit, unit.layer, gradient_of, take, emit=unit.emit, store=unit.store)

    def begin(self, unit: Backward, take: Take, enough: Callable[[], bool]) -> None:
        """Run the first tokens of the unit's samples, for its moments alone, until `enough` returns True.

        The gradients omit the effect on later tokens. Raises the errors of `run`.
        """
        if unit.part is not None:
            self._begin_part(unit, unit.part, take, enough)
            return
        gradient_of = _beginning(self._gradients_at_output(unit))
        for _ in self._samples(unit, unit.layer, gradient_of, take, GRID_TOKENS):
            if enough():
                return

    # -- a layer slice by slice --------------------------------------------------------------------------------------

    def _run_part(self, unit: Backward, number: int, take: Take | None) -> ArrayRecord | None:
        """Do as `run` for one slice of the layer's experts."""
        samples, state = range(self._opened(unit, unit.layer).shape[0]), self._state(unit, "samples")
        if unit.forth:
            self.hidden.release_beyond(LINEAGE, unit.base)
            with self.computing():
                self._sliced(unit, state, samples, take).forward(number)
            return None
        gradient_of = self._gradients_before(unit, state)
        sliced = self._sliced(unit, state, samples, take)
        shard_key = (LINEAGE, unit.layer, unit.shard)
        emit = unit.emit and number == 0
        writer = self._writer(shard_key, self._opened(unit, unit.layer).shape, unit.store) if emit else None
        if number == 0:
            sliced.streamed.block.hold(0, -1)
            self.layers.read_ahead(unit.ahead, back=True)
        see, reads_output = partial(_see, unit.moments, take), self._reads_output(unit)
        if unit.alone and number > 0:
            with self.computing():
                sliced.alone(number, gradient_of, see, reads_output=reads_output)
            return None
        with self.computing():
            for gradient_SD in sliced.back(number, gradient_of, see, reads_output=reads_output):
                if writer is not None:
                    writer.append(gradient_SD[None])
        return self.hidden.keep(shard_key, writer) if writer is not None else None

    def _begin_part(self, unit: Backward, number: int, take: Take, enough: Callable[[], bool]) -> None:
        """Do as `begin` for one slice of the layer's experts."""
        see = partial(_see, unit.moments, take)
        for sample in range(self._opened(unit, unit.layer).shape[0]):
            state = self._state(unit, f"grid {sample}")
            gradient_of, choices = self._gradients_before(unit, state), [sample]
            sliced = self._sliced(unit, state, choices, take, GRID_TOKENS)
            at = _at_samples(_beginning(gradient_of), choices)
            with self.computing():
                for _ in sliced.back(number, at, see, reads_output=self._reads_output(unit)):
                    pass
            if enough():
                return

    def _gradients_before(self, unit: Backward, state: SlicedState) -> GradientOf:
        """Return the gradients at the layer's output, if samples in this state still need them."""
        if state.entered:
            return _needs_none
        return self._gradients_at_output(unit)

    def _state(self, unit: Backward, name: str) -> SlicedState:
        return SlicedState(self.hidden, (LINEAGE, unit.layer + 1, unit.shard), name)

    def _sliced(
        self, unit: Backward, state: SlicedState, samples: Sequence[int], take: Take | None, tokens: int | None = None
    ) -> SlicedGradients:
        """Return the layer with its experts in slices, for some samples: all of their tokens, or the first `tokens`."""
        assert unit.part is not None
        step = 1 if unit.forth else 0 if unit.alone else -1
        block = self.layers.differentiable_block(unit.layer, unit.part, step)
        points = sorted({moment.point for moment in unit.moments}) if take is not None else []
        streamed = StreamedGradients(block, points, every_expert=tokens is not None)
        inputs = self._opened(unit, unit.layer)
        return SlicedGradients(streamed, state, [partial(self._sample, inputs, sample, tokens) for sample in samples])

    def _sample(self, inputs: ArrayReader, sample: int, tokens: int | None) -> Tensor:
        return inputs.read(sample, sample + 1)[0, :tokens].to(self.layers.device)

    def _reads_output(self, unit: Backward) -> bool:
        """Return True if the gradients at the layer's output follow from the values there."""
        return unit.probe or self.hidden.get((LINEAGE, unit.layer + 1, unit.shard)) is None

    # -- a whole layer -----------------------------------------------------------------------------------------------

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
            self._through(unit, layer, gradient_of, None, emit=True, store=False)
            reader = self.hidden.get((LINEAGE, layer, unit.shard))
            assert reader is not None
            gradient_of = _read_from(reader)
        return gradient_of

    def _through(
        self, unit: Backward, layer: int, gradient_of: GradientOf, take: Take | None, *, emit: bool, store: bool
    ) -> ArrayRecord | None:
        """Run all samples back through one layer, and hold the gradients at its inputs if `emit`."""
        ahead = unit.ahead if layer == unit.layer else layer - 1
        if (
            self.setup.geometry.layers[layer].num_experts <= self.setup.experts
        ):  # slices of experts read each other ahead
            self.layers.read_ahead(ahead)
        shard_key = (LINEAGE, layer, unit.shard)
        writer = self._writer(shard_key, self._opened(unit, layer).shape, store) if emit else None
        for gradient_SD in self._samples(unit, layer, gradient_of, take):
            if writer is not None:
                writer.append(gradient_SD[None])
        return self.hidden.keep(shard_key, writer) if writer is not None else None

    def _samples(
        self, unit: Backward, layer: int, gradient_of: GradientOf, take: Take | None, tokens: int | None = None
    ) -> Iterator[Tensor]:
        """Yield the gradients (S, D) at a layer's inputs for each sample, of its first `tokens` tokens or all."""
        inputs = self._opened(unit, layer)
        block = self.layers.differentiable_block(layer)
        if block.block.streamed is not None:
            every = [*range(inputs.shape[0])]  # one at a time if grids are chosen, because the first may be enough
            for samples in [every] if tokens is None else [[sample] for sample in every]:
                yield from self._streamed(unit, layer, block, inputs, samples, gradient_of, take, tokens)
            return
        for sample in range(inputs.shape[0]):
            hidden_SD = inputs.read(sample, sample + 1)[0, :tokens].to(self.layers.device)
            choosing_grids = tokens is not None
            with self.computing(), block.block.every_expert() if choosing_grids else nullcontext():
                gradient_SD = _pull_back(block, hidden_SD, partial(gradient_of, sample), unit.moments, take)
            yield gradient_SD

    def _streamed(
        self,
        unit: Backward,
        layer: int,
        block: DifferentiableLayer,
        inputs: ArrayReader,
        samples: Sequence[int],
        gradient_of: GradientOf,
        take: Take | None,
        tokens: int | None,
    ) -> Iterator[Tensor]:
        """Do the same for a layer whose experts stream past, slice by slice over all of these samples."""
        points = sorted({moment.point for moment in unit.moments}) if take is not None else []
        see = partial(_see, unit.moments, take)
        hidden = (self._sample(inputs, sample, tokens) for sample in samples)
        streamed = StreamedGradients(block, points, every_expert=tokens is not None)
        held = not unit.probe and self.hidden.get((LINEAGE, layer + 1, unit.shard)) is not None
        with self.computing():
            yield from streamed.pull_back(
                hidden,
                _at_samples(gradient_of, samples),
                see,
                reads_output=not held,
            )

    def _opened(self, unit: Backward, layer: int) -> ArrayReader:
        return self.activations.open(unit.inputs[layer - unit.layer])

    def _writer(self, shard_key: tuple[str, int, int], shape: tuple[int, ...], store: bool) -> HiddenWriter:
        samples, sequence, features = shape
        dtype = residual_dtype(self.setup.dtype)
        return self.hidden.hidden_writer(shard_key, (samples, sequence, features), dtype, store, 1)

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


def _pull_back(
    block: DifferentiableLayer,
    hidden_SD: Tensor,
    gradient_of: Callable[[Tensor], Tensor],
    moments: tuple[Moment, ...],
    take: Take | None,
) -> Tensor:
    """Run one sample back through a layer and pass its gradients to `take`."""
    points = sorted({moment.point for moment in moments}) if take is not None else []
    gradient_SD, at = block.pull_back(hidden_SD, gradient_of, points)
    if take is not None:
        for moment in moments:
            take(moment, at[moment.point])
    return gradient_SD


def _see(moments: Sequence[Moment], take: Take | None, gradients: Mapping[str, Tensor]) -> None:
    """Pass a sample's gradients to `take`, for the moments at their points."""
    for moment in moments:
        if take is not None and moment.point in gradients:
            take(moment, gradients[moment.point])


def _beginning(gradient_of: GradientOf) -> GradientOf:
    """Return the gradients at the first tokens of samples, if only these have passed the layer."""
    return lambda sample, output_SD: gradient_of(sample, output_SD)[: len(output_SD)]


def _at_samples(gradient_of: GradientOf, samples: Sequence[int]) -> GradientOf:
    """Return the gradients of some samples of a shard, by their place among these."""
    return lambda place, output_SD: gradient_of(samples[place], output_SD)


def _needs_none(sample: int, output_SD: Tensor) -> Tensor:
    raise AssertionError("no gradient at the layer's output is due: these samples are already past it")


def _read_from(reader: HiddenReader) -> GradientOf:
    return lambda sample, output_SD: reader.read(sample, sample + 1)[0].to(output_SD.device)
