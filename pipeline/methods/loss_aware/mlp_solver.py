"""The computations that the curve and the solution of one MLP share. docs/methods.md#curves.

Legend: D hidden, N intermediate, k channels kept, m rows of the stack of the readers, T tokens of the sample.

`down` stands for the writer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.blocks import Matrix, roles_of
from pipeline.families.registry import channels_of
from pipeline.kernels.elimination import eliminate
from pipeline.kernels.nystrom import nested_losses, nested_outputs, nystrom_refit
from pipeline.kernels.refit import Refit, evenly_spread, refit, refit_residual
from pipeline.kernels.sensitivity import (
    Directions,
    Factored,
    factored,
    gram_losses,
    losses_by_rank,
    output_directions,
    pushforward,
    tail_losses,
    thin_directions,
    thin_output_directions,
    weighted_directions,
    weighted_losses,
)
from pipeline.methods.loss_aware.mlp_sample import BATCH, Sample, probe_tokens, read_sample, sampled
from pipeline.methods.loss_aware.mlp_sizes import Sizes, decode_kept
from pipeline.methods.method import Ranks, Solution
from pipeline.methods.moments import factored_mean, input_moment, output_gradient
from pipeline.methods.products import passed, summing
from pipeline.methods.tensors import biases_of, channel_priority
from pipeline.methods.work import FIT_TOKENS, PROBE_OUTPUTS, PROBES

CACHE_BYTES = 2**27  # the largest outputs of a sample that are cached, if several sizes are fitted to them


class _Cut(NamedTuple):
    """The readers as a shared `first` (r, D) and `parts` (k, r), or dense: None and (k, D); biases (k)."""

    first: Tensor | None
    parts: Mapping[Matrix, Tensor]
    biases: Mapping[Matrix, Tensor]

    def at(self, rank: int) -> _Cut:
        """Return the readers at a smaller rank."""
        assert self.first is not None
        return _Cut(self.first[:rank], {reader: part[:, :rank] for reader, part in self.parts.items()}, self.biases)


class Solver:
    """Computes losses, channels and refits of one MLP from its statistics."""

    def __init__(self, sizes: Sizes, least: int, order: Sequence[int] | None = None, cache_bytes: int = 0) -> None:
        """Read the weights, the moments and the sample of an MLP.

        least: the smallest width of any call.
        order: the channels, the last removed first, if they have been eliminated down to `least`.
        cache_bytes: the largest outputs of the sample that are cached for further sizes.
        """
        self.cache_bytes = cache_bytes
        self._outputs: dict[tuple[int, int], Tensor] = {}  # by the first token of a part and the number of fitted ones
        self.order, self.least, self.hint = order, least, sizes.statistics.hint
        self.sizes, self.block, self.weights, self.by_loss = sizes, sizes.mlp, sizes.weights, sizes.by_loss
        readers, writer = self.block.readers, self.block.writer
        self.down_DN = sizes.weight(writer).double()
        self.input_DD, self.hidden_NN = sizes.mean(input_moment(readers[0])), sizes.mean(input_moment(writer))
        self.metric_DD = sizes.mean(output_gradient(writer))
        self.gradients_N = {reader: sizes.mean(output_gradient(reader)) for reader in readers}
        self.sample = read_sample(self.block, sizes.statistics)
        self._statistics = sizes.statistics
        self._directions: dict[int, Directions] = {}  # by width
        self._refits: dict[int, tuple[Tensor, dict[str, Any]]] = {}

    def has_tokens_for(self, width: int) -> bool:
        """Return True if the sample has enough tokens to fit `width` channels."""
        return len(self.sample.inputs) >= FIT_TOKENS * width

    @cached_property
    def priority(self) -> Tensor:
        """Return all channels, the last removed first."""
        if self.order is not None:
            return torch.tensor(self.order, device=self.down_DN.device)
        outputs_DN = self._weighted_down if self.by_loss else self.down_DN
        return channel_priority(eliminate(self.hidden_NN, outputs_DN, self.least).order, self.block.width)

    @cached_property
    def width_losses(self) -> Tensor:
        """Return the predicted loss of each width."""
        return self._metric.scale * nested_losses(self._weighted_outputs)

    @cached_property
    def _weighted_down(self) -> Tensor:
        weighted_DN: Tensor = self._metric.factor.T @ self.down_DN
        return weighted_DN

    @cached_property
    def _weighted_outputs(self) -> Tensor:
        return nested_outputs(self.hidden_NN, self._weighted_down, self.priority)

    def losses(self, widths: Collection[int], directed: Collection[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each width with the predicted losses by rank of the readers, assuming a linear activation, and of down.

        Widths ascend. `directed`: the widths at which the caller needs directions. Moments grow by the channels of each
        width in turn, so that the choice of `widths` does not change the result.
        """
        if self.narrow:
            yield from self._narrow_losses(widths, directed)
            return
        before, pull_DD, spread_DD = 0, torch.zeros_like(self.input_DD), torch.zeros_like(self.metric_DD)
        for width in self.sizes.widths:
            if before >= max(widths):
                return
            pull_DD = pull_DD + self._pull(self.priority[before:width], self._input.factor)
            spread_DD = spread_DD + _square(self._weighted_outputs[:, before:width].T)
            before = width
            if width in widths and not self.by_loss:
                yield width, *self._losses_of_directions(width)
            elif width in directed:
                self._directions = {width: weighted_directions(self._input, pull_DD)}
                readers = tail_losses(self._directions[width].values)
                yield width, readers, weighted_losses(spread_DD, self._metric.scale)
            elif width in widths:
                yield width, weighted_losses(pull_DD, self._input.scale), weighted_losses(spread_DD, self._metric.scale)

    @property
    def narrow(self) -> bool:
        """Return True if the readers have fewer rows than inputs, so that eigenproblems of the rows are smaller."""
        return self.by_loss and len(self.block.readers) * self.block.width < len(self.input_DD)

    def _narrow_losses(
        self, widths: Collection[int], directed: Collection[int]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the results of `losses`, from eigenproblems of the readers' rows."""
        for width in sorted(widths):
            writer = gram_losses(self._weighted_outputs[:, :width], self._metric.scale)
            pulled_Dm = self._pulled(self.priority[:width])
            if width not in directed:
                yield width, gram_losses(pulled_Dm, self._input.scale), writer
                continue
            self._directions = {width: thin_directions(self._input, pulled_Dm)}
            values_m = self._directions[width].values
            values_D = torch.cat((values_m, values_m.new_zeros(len(pulled_Dm) - len(values_m))))
            yield width, tail_losses(values_D), writer

    def _pulled(self, kept_k: Tensor) -> Tensor:
        """Return Y (D, m) such that Y Yᵀ is `_pull` in the basis of the input's factor."""
        rows = (
            self.weights[reader.weight_key][kept_k].double() * squares_N[kept_k, None].double().sqrt()
            for reader, squares_N in self.gradients_N.items()
        )
        pulled_Dm: Tensor = (torch.cat(list(rows)) @ self._input.factor).T
        return pulled_Dm

    def _losses_of_directions(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the losses of readers and down by rank, for directions that do not follow the loss."""
        kept_k = self.kept(width)
        readers = losses_by_rank(self.reader_directions(kept_k), self.input_DD, self._pull(kept_k))
        refit_Dk, moment_kk = self.refit(kept_k)[0], self.moment(kept_k)
        directions = self.down_directions(refit_Dk, moment_kk)
        return readers, losses_by_rank(directions, pushforward(refit_Dk, moment_kk), self.metric_DD)

    def read(self, kept_k: Tensor, ranks: Ranks) -> Solution:
        """Return the readers on the kept channels, at their rank."""
        width, rank, readers = kept_k.numel(), ranks[self.block.reader_group], self.block.readers
        stack = self.sizes.reader_stack(width)
        parts = {reader.role: self.weights[reader.weight_key][kept_k].double() for reader in readers}
        biases = {name: bias[kept_k] for name, bias in biases_of(self.weights, readers).items()}
        if rank >= stack.full:
            tensors = {f"{role}.weight": part for role, part in parts.items()}
            return Solution(tensors | biases, self._pruned(readers, width))
        order = self.reader_directions(kept_k)
        second_mr = torch.cat(list(parts.values())) @ order.decode[:, :rank]
        tensors, forms = stack.store(parts, order.encode[:rank], second_mr)
        return Solution(tensors | biases, forms)

    def written(self, weight_Dk: Tensor, moment_kk: Tensor, ranks: Ranks) -> Solution:
        """Return down on the kept channels, at its rank. `moment_kk`: the moment of its inputs."""
        width, rank, writer = weight_Dk.shape[1], ranks[self.block.writer_group], self.block.writer
        stack, biases = self.sizes.writer_stack(width), biases_of(self.weights, (writer,))
        if rank >= stack.full:
            return Solution({writer.weight_key: weight_Dk, **biases}, self._pruned((writer,), width))
        order = self.down_directions(weight_Dk, moment_kk)
        tensors, forms = stack.store({writer.role: weight_Dk}, order.encode[:rank] @ weight_Dk, order.decode[:, :rank])
        return Solution(tensors | biases, forms)

    def _pruned(self, matrices: tuple[Matrix, ...], width: int) -> dict[str, FormSpec]:
        form = FormSpec(form="pruned", rank=width)
        return dict.fromkeys(roles_of(matrices), form) if width < self.block.width else {}

    def kept(self, width: int) -> Tensor:
        """Return the kept channels (width,), ascending. Raises ValueError if the curve's hint is of another MLP."""
        if width >= self.block.width:
            return torch.arange(self.block.width, device=self.down_DN.device)
        widths = self.sizes.widths
        if self.hint and width in widths:
            kept_k = decode_kept(self.hint, widths.index(width)).to(self.down_DN.device)
            if kept_k.numel() != width or len(self.hint) != self.block.width:
                raise ValueError(
                    f"the curve has {len(self.hint)} channels and keeps {kept_k.numel()}; "
                    f"the MLP has {self.block.width}, of which {width} are to be kept"
                )
            return kept_k
        return self.priority[:width].sort().values

    def reader_directions(self, kept_k: Tensor) -> Directions:
        """Return the directions of the stack of readers on the kept channels."""
        width = kept_k.numel()
        if width not in self._directions and self.narrow:
            self._directions = {width: thin_directions(self._input, self._pulled(kept_k))}
        elif width not in self._directions:
            pull_DD = self._pull(kept_k, self._input.factor, by_loss=self.by_loss)
            self._directions = {width: weighted_directions(self._input, pull_DD)}  # only of the current width
        return self._directions[width]

    def bends(self, kept_k: Tensor, linear: Tensor, pruned: float) -> list[float]:
        """Return, for each of `PROBES`, the measured loss divided by the `linear` prediction.

        down is refitted to the cut readers, which removes most of the activation's effect. Errors of the outputs are
        weighted by the loss. If there are many outputs, errors are measured in random mixtures of them; the estimate
        then varies by about 1 %, equally for all ranks. `pruned`: the predicted loss of the width itself.
        """
        width, factors = kept_k.numel(), [1.0] * len(PROBES)
        ranks = self.sizes.probed_ranks(width)
        if not ranks:
            return factors
        directions, batches = self.reader_directions(kept_k), [*self._probe(width).batches()]
        weighted_qD = self._weighted_mixtures
        targets_qN, start_qk = weighted_qD @ self.down_DN, weighted_qD @ self.refit(kept_k)[0]
        targets = [_read(self._hidden(part, self._whole), targets_qN) for part in batches]
        widest = self._cut(kept_k, directions, max(ranks))
        for rank, place in ranks.items():
            hidden = (self._hidden(part, widest.at(rank)) for part in batches)
            errors = ((t_Tq - _read(cut_Tk, start_qk), cut_Tk) for t_Tq, cut_Tk in zip(targets, hidden, strict=True))
            cost = 0.5 * self.sample.share * refit_residual(errors, len(weighted_qD), width) - pruned
            factors[place] = max(0.0, cost) / float(linear[rank]) if float(linear[rank]) > 0.0 else 1.0
        return factors

    def refit(self, kept_k: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return down refitted on the kept channels, and figures for the report."""
        width = kept_k.numel()
        if width not in self._refits:
            refit_Dk, report = nystrom_refit(self.down_DN, self.hidden_NN, kept_k)
            self._refits = {width: (refit_Dk, dict(report))}  # only of the current width
        return self._refits[width]

    def refit_on_sample(self, kept_k: Tensor, rank: int) -> Refit:
        """Refit down to the outputs of the readers at a rank, on `fitted_tokens` tokens of the sample.

        Targets are rounded as in the forward pass.
        """
        cut = self._cut(kept_k, self.reader_directions(kept_k), rank)
        tokens, whole = self.fitted_tokens(kept_k.numel()), len(self.sample.inputs)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for number, part in enumerate(self.sample.batches()):
                start = number * BATCH
                chosen = evenly_spread(start, len(part.inputs), whole, tokens)
                part = part.at(chosen.to(part.inputs.device))
                yield self._targets(start, tokens, part), self._hidden(part, cut)

        start_Dk = self.refit(kept_k)[0]
        with summing(self.sample.inputs.dtype, start_Dk.device):
            on_sample = refit(pairs(), start_Dk)
        if self.sample.weights is None:
            return on_sample
        return Refit(on_sample.weight, on_sample.moment * self.sample.share)

    def _targets(self, start: int, tokens: int, part: Sample) -> Tensor:
        """Return the dense MLP's outputs on a part of the sample, cached if the outputs of all parts are small."""
        if (cached := self._outputs.get((start, tokens))) is not None:
            return cached
        hidden_TN = self._hidden(part, self._whole)
        targets_TD = passed(hidden_TN, self.weights[self.block.writer.weight_key])
        if tokens * targets_TD.shape[1] * targets_TD.itemsize <= self.cache_bytes:
            self._outputs[start, tokens] = targets_TD
        return targets_TD

    def fitted_tokens(self, width: int) -> int:
        """Return the number of tokens of the sample on which `width` channels are fitted."""
        return min(len(self.sample.inputs), sampled(width))

    def down_directions(self, refit_Dk: Tensor, moment_kk: Tensor) -> Directions:
        """Return the directions of the refitted down. `moment_kk`: the moment of its inputs."""
        metric = (
            self._metric
            if self.by_loss
            else factored(torch.eye(len(self.metric_DD), dtype=self.metric_DD.dtype, device=self.metric_DD.device))
        )
        if self.narrow:
            return thin_output_directions(refit_Dk, moment_kk, metric)
        return output_directions(refit_Dk, moment_kk, metric)

    def moment(self, kept_k: Tensor) -> Tensor:
        """Return the moment of the kept channels."""
        return self.hidden_NN.index_select(0, kept_k).index_select(1, kept_k)

    def others_moment(self, width: int) -> Tensor | None:
        """Return the part of the kept channels' moment that tokens of others add; None for an MLP with enough tokens.

        Only from the dense readers: cut ones differ little.
        """
        if (others := self._statistics.others.get(self.block.name)) is None:
            return None
        hidden_mN = self._hidden(Sample(others.inputs, None, 1.0), self._whole).double() * others.factor
        hidden_mk = hidden_mN[:, self.kept(width)]
        return _square(hidden_mk) / self._statistics.tokens

    def _probe(self, width: int) -> Sample:
        """Return an evenly spread part of the sample."""
        return self.sample.at(slice(None, None, max(1, len(self.sample.inputs) // probe_tokens(width))))

    @cached_property
    def _weighted_mixtures(self) -> Tensor:
        """Return X (q, D) with XᵀX the metric, exactly or in the mean over random signs of `PROBE_OUTPUTS` rows."""
        weighted_DD: Tensor = self._metric.scale**0.5 * self._metric.factor.T
        if len(weighted_DD) <= PROBE_OUTPUTS:
            return weighted_DD
        signs_qD = torch.randint(0, 2, (PROBE_OUTPUTS, len(weighted_DD)), generator=torch.Generator().manual_seed(0))
        mixed_qD: Tensor = (2.0 * signs_qD - 1.0).to(weighted_DD) @ weighted_DD / PROBE_OUTPUTS**0.5
        return mixed_qD

    @cached_property
    def _input(self) -> Factored:
        return factored_mean(self._statistics, input_moment(self.block.readers[0]))

    @cached_property
    def _metric(self) -> Factored:
        return factored_mean(self._statistics, output_gradient(self.block.writer))

    @cached_property
    def _whole(self) -> _Cut:
        readers = self.block.readers
        biases = {reader: self.weights[reader.bias_key] for reader in readers if reader.bias}
        return _Cut(None, {reader: self.weights[reader.weight_key] for reader in readers}, biases)

    def _cut(self, kept_k: Tensor, directions: Directions, rank: int) -> _Cut:
        decode_Dr = directions.decode[:, :rank]
        seconds = {reader: weight[kept_k].double() @ decode_Dr for reader, weight in self._whole.parts.items()}
        biases = {reader: bias[kept_k] for reader, bias in self._whole.biases.items()}
        return _Cut(directions.encode[:rank], seconds, biases)

    def _hidden(self, part: Sample, cut: _Cut) -> Tensor:
        """Compute act(gate) ⊙ up, or act(up), in the sample's dtype, as the forward pass does.

        Values of an expert are multiplied by its routing weights.
        """
        dtype, biases = part.inputs.dtype, cut.biases
        read_TF = part.inputs if cut.first is None else passed(part.inputs, cut.first)
        values = []
        for reader, weight in cut.parts.items():
            product = passed(read_TF, weight)
            values.append(product + biases[reader].to(dtype) if reader in biases else product)
        hidden_TF = channels_of(self.block)(*values)
        return hidden_TF if part.weights is None else hidden_TF * part.weights[:, None].to(dtype)

    def _pull(self, kept_k: Tensor, factor_DD: Tensor | None = None, by_loss: bool = True) -> Tensor:
        """Return Σ s w wᵀ over some channels of the readers, in the basis of `factor_DD` if given."""
        pull_DD = torch.zeros_like(self.input_DD)
        for reader, squares_N in self.gradients_N.items():
            weight_kD = self.weights[reader.weight_key][kept_k].double()
            if by_loss:
                weight_kD *= squares_N[kept_k, None].double().sqrt()
            pull_DD += _square(weight_kD if factor_DD is None else weight_kD @ factor_DD)
        return pull_DD


def _square(values_kD: Tensor) -> Tensor:
    return values_kD.T @ values_kD


def _read(values_TF: Tensor, weight_qF: Tensor) -> Tensor:
    """Multiply in float32 or better."""
    dtype = torch.promote_types(values_TF.dtype, torch.float32)
    return values_TF.to(dtype) @ weight_qF.to(dtype).T
