"""Runs samples of a shard back through a layer, one at a time.

A layer with more experts than a worker holds has several parts, a slice of experts each. All samples go back through
one part before any goes back through the next. All other layers have one part.

Between parts, a sample's state is five tensors. These are the residual stream that the mixture reads, the gradients at
the outputs of the layer and of the mixture, and the gradients so far at the mixture's inputs and at the router's
weights. They are held or spilled like hidden states, beside the gradients at the layer's output.

Legend: M samples, S sequence, D hidden, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from workers.copies import HiddenReader
from workers.differentiable import LayerGradients, ReturningSample, Take
from workers.hidden import HiddenStates, ShardKey

STREAM, OUTGOING, MIXED, SUM, INPUTS, WEIGHTS = "stream", "outgoing", "mixed", "sum", "inputs", "weights"
GradientOf = Callable[[int, Tensor], Tensor]  # sample of the shard, layer output (S, D) -> its gradient (S, D)
State = dict[tuple[str, int], Tensor]  # fields of one sample (S, ·), and how many parts they have passed


@dataclass(frozen=True)
class SamplesState:
    """The state between parts of some samples of a shard.

    Attributes:
        shard_key: of the gradients at the layer's output.
        name: distinguishes samples that are run back for different purposes.
    """

    hidden: HiddenStates
    shard_key: ShardKey
    name: str

    def key(self, field: str, parts: int = 0) -> ShardKey:
        """Return the key of a field of the samples. `parts`: how many parts it has passed, if it changes in them."""
        return (*self.shard_key, (self.name, field, parts))

    def get(self, field: str, parts: int = 0) -> HiddenReader | None:
        """Return a field of all samples (M, S, ·), or None."""
        return self.hidden.get(self.key(field, parts))

    def keep(self, samples: int, states: Iterable[State]) -> None:
        """Hold fields of all samples, which come sample by sample."""
        writers = {}
        for state in states:
            for (field, parts), value_S in state.items():
                key = self.key(field, parts)
                if key not in writers:
                    shape = (samples, *value_S.shape)
                    assert len(shape) == 3
                    writers[key] = self.hidden.hidden_writer(key, shape, value_S.dtype, False, 1)
                writers[key].append(value_S.detach()[None])
        for key, writer in writers.items():
            self.hidden.keep(key, writer)

    def release(self, field: str, parts: int = 0) -> None:
        """Release a field, if it is held."""
        self.hidden.release(self.key(field, parts))

    @property
    def entered(self) -> bool:
        """True if the gradients at the outputs of layer and mixture are held."""
        return self.get(MIXED) is not None

    def passed(self, parts: int, after: int) -> int | None:
        """Return how many of a layer's parts from `after` on the samples have gone back through; 0: only the shared
        expert; None: not even that.

        `parts`: the number of the layer's parts.
        """
        return next((done for done in range(parts - after, -1, -1) if self.get(INPUTS, done) is not None), None)


class GradientSamples:
    """Some samples of a shard at a layer, on their way back."""

    def __init__(
        self,
        layer: LayerGradients,
        state: SamplesState,
        samples: Sequence[int],
        read: Callable[[int], Tensor],
        *,
        alone: bool = False,
    ) -> None:
        """Create the samples at the layer's output.

        Args:
            samples: their numbers in the shard.
            read: returns the layer's inputs (S, D) of one.
            alone: only the gradients at the points of a part are wanted, no other part follows.
        """
        self.layer = layer
        self.state = state
        self.samples = samples
        self.read = read
        self.alone = alone
        self.parts = layer.block.parts

    def back(self, part: int | None, gradient_of: GradientOf, take: Take, *, reads_output: bool) -> Iterator[Tensor]:
        """Go back through a part of the layer, or through all. After the first part of the layer, yield the gradients
        (S, D) at the layer's inputs.

        The last part also goes back through the shared expert, the first one through router and attention. Parts
        after this one are passed first, without `take`, if the samples have not passed them.

        Args:
            take: receives the gradients of each sample at the points of the part.
            reads_output: `gradient_of` needs the layer's output.

        Raises the errors of `DifferentiableLayer.pull_back`.
        """
        if self.parts == 1:
            for sample in self.samples:
                yield self.layer.whole(self.read(sample), partial(gradient_of, sample), take)
        elif self.alone and part:
            self._part_alone(part, gradient_of, take, reads_output)
        else:
            yield from self._in_parts(part, gradient_of, take, reads_output)

    def forth(self, part: int) -> None:
        """Add the outputs of a part's experts to the sums of all samples. Parts before it are passed first if the sums
        lack them."""
        done = next((done for done in range(part, 0, -1) if self.state.get(SUM, done) is not None), 0)
        self._hold_streams()
        for number in range(done, part + 1):
            self._add(number)

    def _add(self, number: int) -> None:
        experts, sums = self.layer.block.hold(number), self.state.get(SUM, number) if number else None

        def added(place: int) -> State:
            sum_SD = None if sums is None else self._at(sums, place)
            return {(SUM, number + 1): self.layer.added(self._read(STREAM, place), sum_SD, experts)}

        self._keep(added)
        self.state.release(SUM, number)

    def _in_parts(self, part: int | None, gradient_of: GradientOf, take: Take, reads_output: bool) -> Iterator[Tensor]:
        wanted = range(self.parts) if part is None else (part,)
        passed = self.state.passed(self.parts, wanted[0] + 1)
        if passed is None:
            if not self.state.entered:
                self._enter(gradient_of, reads_output)
            self._share(take if self.parts - 1 in wanted else _ignored)
            passed = 0
        for number in range(self.parts - passed - 1, wanted[0] - 1, -1):
            self._through(number, take if number in wanted else _ignored)
        if wanted[0] == 0:
            yield from self._leave(take)

    def _part_alone(self, part: int, gradient_of: GradientOf, take: Take, reads_output: bool) -> None:
        """Compute the gradients at the experts of a part, and at the shared expert if it is the last one."""
        if not self.state.entered:
            self._enter(gradient_of, reads_output)
        experts = self.layer.block.hold(part, 0)
        for place in range(len(self.samples)):
            sample = ReturningSample.of(self._read(STREAM, place))
            sample.mixed = self._read(MIXED, place)
            self.layer.share(sample, take if part + 1 == self.parts else _ignored)
            self.layer.through(sample, experts, take)

    def _enter(self, gradient_of: GradientOf, reads_output: bool) -> None:
        self._hold_streams()
        sums = None
        if reads_output or self.layer.reads_output:
            if self.state.get(SUM, self.parts) is None:
                self.forth(self.parts - 1)
            sums = self.state.get(SUM, self.parts)

        def entered(place: int) -> State:
            sample = ReturningSample.of(self._read(STREAM, place))
            mixed_SD = None if sums is None else self.layer.mixed(sample.stream, self._at(sums, place))
            self.layer.enter(sample, mixed_SD, partial(gradient_of, self.samples[place]))
            return {(OUTGOING, 0): sample.outgoing, (MIXED, 0): sample.mixed}

        self._keep(entered)
        self.state.release(SUM, self.parts)

    def _share(self, take: Take) -> None:
        def shared(place: int) -> State:
            sample = ReturningSample.of(self._read(STREAM, place))
            sample.mixed = self._read(MIXED, place)
            self.layer.share(sample, take)
            return {(INPUTS, 0): sample.inputs, (WEIGHTS, 0): sample.weights}

        self._keep(shared)

    def _through(self, number: int, take: Take) -> None:
        done, experts = self.parts - number - 1, self.layer.block.hold(number, -1)

        def passed(place: int) -> State:
            sample = self._sample(place, done)
            self.layer.through(sample, experts, take)
            return {(INPUTS, done + 1): sample.inputs, (WEIGHTS, done + 1): sample.weights}

        self._keep(passed)
        for field in (INPUTS, WEIGHTS):
            self.state.release(field, done)

    def _leave(self, take: Take) -> Iterator[Tensor]:
        for place, sample in enumerate(self.samples):
            yield self.layer.leave(self._sample(place, self.parts), self.read(sample), take)
        for field in (STREAM, OUTGOING, MIXED):
            self.state.release(field)
        for field in (INPUTS, WEIGHTS):
            self.state.release(field, self.parts)

    def _hold_streams(self) -> None:
        if self.state.get(STREAM) is None:
            self._keep(lambda place: {(STREAM, 0): self.layer.attended(self.read(self.samples[place]))})

    def _keep(self, state_of: Callable[[int], State]) -> None:
        """Hold new fields of all samples. `state_of`: returns those of the sample at a place."""
        self.state.keep(len(self.samples), map(state_of, range(len(self.samples))))

    def _sample(self, place: int, done: int) -> ReturningSample:
        fields = [self._read(field, place) for field in (STREAM, OUTGOING, MIXED)]
        return ReturningSample(*fields, *(self._read(field, place, done).clone() for field in (INPUTS, WEIGHTS)))

    def _read(self, field: str, place: int, parts: int = 0) -> Tensor:
        reader = self.state.get(field, parts)
        assert reader is not None
        return self._at(reader, place)

    def _at(self, reader: HiddenReader, place: int) -> Tensor:
        return reader.read(place, place + 1)[0].to(self.layer.block.device)


def _ignored(gradients: object) -> None:
    """Ignore the gradients."""
