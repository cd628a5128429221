"""Runs the samples of a shard back through a layer with streamed experts, one slice of experts at a time.

All shards pass one slice before any passes the next, so that a worker reads an expert once in a pass. Between slices, a
shard consists of five tensors for each sample: the residual stream that the mixture reads, the gradients at the
outputs of the layer and of the mixture, and the gradients so far at the mixture's inputs and at the router's weights.
They are held, or spilled, like hidden states, beside the gradients at the layer's output.

Legend: M samples, S sequence, D hidden, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.copies import HiddenReader
from workers.hidden import HiddenStates, ShardKey
from workers.streamed_gradients import Sample, StreamedGradients, Take

STREAM, OUTGOING, MIXED, SUM, INPUTS, WEIGHTS = "stream", "outgoing", "mixed", "sum", "inputs", "weights"
GradientOf = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class SlicedState:
    """The state between slices of some samples of a shard.

    Attributes:
        shard_key: of the gradients at the layer's output.
        name: distinguishes samples that are run back for different purposes.
    """

    hidden: HiddenStates
    shard_key: ShardKey
    name: str

    def key(self, field: str, slices: int = 0) -> ShardKey:
        """Return the key of a field of the samples. `slices`: how many slices it has passed, if it changes in them."""
        return (*self.shard_key, (self.name, field, slices))

    def get(self, field: str, slices: int = 0) -> HiddenReader | None:
        """Return a field of all samples (M, S, ·), or None."""
        return self.hidden.get(self.key(field, slices))

    def keep(self, samples: int, parts: Iterable[dict[tuple[str, int], Tensor]]) -> None:
        """Hold fields of all samples, which come sample by sample."""
        writers = {}
        for part in parts:
            for (field, slices), value_S in part.items():
                key = self.key(field, slices)
                if key not in writers:
                    shape = (samples, *value_S.shape)
                    assert len(shape) == 3
                    writers[key] = self.hidden.hidden_writer(key, shape, value_S.dtype, False, 1)
                writers[key].append(value_S.detach()[None])
        for key, writer in writers.items():
            self.hidden.keep(key, writer)

    def release(self, field: str, slices: int = 0) -> None:
        """Release a field, if it is held."""
        self.hidden.release(self.key(field, slices))

    @property
    def entered(self) -> bool:
        """True if the gradients at the outputs of layer and mixture are held."""
        return self.get(MIXED) is not None

    def passed(self, slices: int, after: int) -> int | None:
        """Return how many of the last slices the samples have passed, of those from `after` on. None: they have not
        gone back through the shared expert, either.

        `slices`: the number of slices of the layer.
        """
        return next((done for done in range(slices - after, -1, -1) if self.get(INPUTS, done) is not None), None)


class SlicedGradients:
    """Runs samples of a shard through slices, first forwards where the layer's output is needed, then backwards."""

    def __init__(self, streamed: StreamedGradients, state: SlicedState, hidden: Sequence[Callable[[], Tensor]]) -> None:
        """`hidden`: returns the layer's inputs (S, D) of each sample."""
        self.streamed = streamed
        self.state = state
        self.hidden = hidden
        assert streamed.block.streamed is not None
        self.slices = len(streamed.block.streamed.ranges)

    def forward(self, number: int) -> None:
        """Add the outputs of a slice's experts to the sums of all samples. Slices before it are passed first if the
        sums lack them."""
        done = next((done for done in range(number, 0, -1) if self.state.get(SUM, done) is not None), 0)
        self._hold_streams()
        for each in range(done, number + 1):
            experts = self.streamed.block.hold(each)
            sums = self.state.get(SUM, each) if each else None
            self.state.keep(
                len(self.hidden),
                (
                    {
                        (SUM, each + 1): self.streamed.added(
                            self._read(STREAM, sample), None if sums is None else self._at(sums, sample), experts
                        )
                    }
                    for sample in range(len(self.hidden))
                ),
            )
            self.state.release(SUM, each)

    def back(self, number: int, gradient_of: GradientOf, take: Take, *, reads_output: bool) -> Iterator[Tensor]:
        """Run all samples back through a slice. After the first slice of the layer, yield the gradients (S, D) at the
        layer's inputs.

        The last slice also runs them back through the shared expert, the first one through router and attention.
        Slices behind `number` are passed first, without `take`, if the samples have not passed them. Arguments as in
        `StreamedGradients.pull_back`.
        """
        passed = self.state.passed(self.slices, number + 1)
        if passed is None:
            if not self.state.entered:
                self._enter(gradient_of, reads_output)
            self._share(take if number + 1 == self.slices else _ignored)
            passed = 0
        for each in range(self.slices - passed - 1, number - 1, -1):
            self._through(each, take if each == number else _ignored)
        if number == 0:
            yield from self._leave(take)

    def alone(self, number: int, gradient_of: GradientOf, take: Take, *, reads_output: bool) -> None:
        """Compute the gradients at the experts of a slice, or at the shared expert if it is the last one. No slice
        follows. Arguments as in `back`."""
        if not self.state.entered:
            self._enter(gradient_of, reads_output)
        experts = self.streamed.block.hold(number, 0)
        for each in range(len(self.hidden)):
            sample = Sample.of(self._read(STREAM, each))
            sample.mixed = self._read(MIXED, each)
            self.streamed.share(sample, take if number + 1 == self.slices else _ignored)
            self.streamed.through(sample, experts, take)

    def _enter(self, gradient_of: GradientOf, reads_output: bool) -> None:
        self._hold_streams()
        sums = None
        if reads_output or self.streamed.reads_output:
            if self.state.get(SUM, self.slices) is None:
                self.forward(self.slices - 1)
            sums = self.state.get(SUM, self.slices)

        def entered() -> Iterator[dict[tuple[str, int], Tensor]]:
            for number in range(len(self.hidden)):
                sample = Sample.of(self._read(STREAM, number))
                mixed_SD = None if sums is None else self.streamed.mixed(sample.stream, self._at(sums, number))
                self.streamed.enter(sample, number, mixed_SD, gradient_of)
                yield {(OUTGOING, 0): sample.outgoing, (MIXED, 0): sample.mixed}

        self.state.keep(len(self.hidden), entered())
        self.state.release(SUM, self.slices)

    def _share(self, take: Take) -> None:
        def shared() -> Iterator[dict[tuple[str, int], Tensor]]:
            for number in range(len(self.hidden)):
                sample = Sample.of(self._read(STREAM, number))
                sample.mixed = self._read(MIXED, number)
                self.streamed.share(sample, take)
                yield {(INPUTS, 0): sample.inputs, (WEIGHTS, 0): sample.weights}

        self.state.keep(len(self.hidden), shared())

    def _through(self, number: int, take: Take) -> None:
        done, experts = self.slices - number - 1, self.streamed.block.hold(number, -1)

        def passed() -> Iterator[dict[tuple[str, int], Tensor]]:
            for each in range(len(self.hidden)):
                sample = self._sample(each, done)
                self.streamed.through(sample, experts, take)
                yield {(INPUTS, done + 1): sample.inputs, (WEIGHTS, done + 1): sample.weights}

        self.state.keep(len(self.hidden), passed())
        for field in (INPUTS, WEIGHTS):
            self.state.release(field, done)

    def _leave(self, take: Take) -> Iterator[Tensor]:
        for number, hidden in enumerate(self.hidden):
            yield self.streamed.leave(self._sample(number, self.slices), hidden(), take)
        for field in (STREAM, OUTGOING, MIXED):
            self.state.release(field)
        for field in (INPUTS, WEIGHTS):
            self.state.release(field, self.slices)

    def _hold_streams(self) -> None:
        if self.state.get(STREAM) is None:
            streams = ({(STREAM, 0): self.streamed.attended(hidden())} for hidden in self.hidden)
            self.state.keep(len(self.hidden), streams)

    def _sample(self, number: int, done: int) -> Sample:
        fields = [self._read(field, number) for field in (STREAM, OUTGOING, MIXED)]
        return Sample(*fields, *(self._read(field, number, done).clone() for field in (INPUTS, WEIGHTS)))

    def _read(self, field: str, sample: int, slices: int = 0) -> Tensor:
        reader = self.state.get(field, slices)
        assert reader is not None
        return self._at(reader, sample)

    def _at(self, reader: HiddenReader, sample: int) -> Tensor:
        return reader.read(sample, sample + 1)[0].to(self.streamed.block.device)


def _ignored(gradients: object) -> None:
    """Ignore the gradients."""
