"""Runs windows of tokens through a model and sums losses, or the divergence between two models, over the logits.

Legend: M windows of a shard, S their length, B of these at a time, D hidden, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from manifests.errors import NumericsError
from manifests.records import ArrayRecord, StagedLayer
from pipeline.kernels.checks import all_finite
from pipeline.kernels.gradients import cut_logits
from pipeline.kernels.teacher_rows import encode_rows, row_bytes
from pipeline.units.scores import Score, Scored, Teach, WindowForward, Windows
from pipeline.units.units import ShardDone
from stores.activations import ActivationStore
from workers.config import WorkerConfig
from workers.copies import HiddenReader
from workers.device_settings import tensor_cores
from workers.embedding_and_head import head
from workers.hidden import WINDOWS, HiddenStates, InMemory
from workers.layers import LayerReader
from workers.shards import Computing, Shard

TEACHER = "teacher"  # the phase of stored rows
ROWS_PER_LOGITS = 256  # large enough for a fast product, small enough for its result to stay in a cache
LogitRows = tuple[tuple[Tensor, ...], Tensor]  # logits (T, V) of one or more models, and the next tokens (T,)


def summed_loss(parts: Iterable[LogitRows]) -> Scored:
    """Sum the losses of tokens under one model."""
    total, count = 0.0, 0
    for (logits_TV,), target_T in parts:
        rows = cut_logits(logits_TV, target_T)
        losses = [functional.cross_entropy(rows_TV, rows_T, reduction="none") for rows_TV, rows_T in rows]
        total += torch.cat(losses).double().sum().item()
        count += len(target_T)
        del logits_TV, rows  # before the next are computed
    return Scored(total, count)


def summed_divergence(parts: Iterable[LogitRows]) -> Scored:
    """Sum the divergence of the second model from the first, which is dense, and the losses under both."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for (dense_TV, compressed_TV), target_T in parts:
        rows = cut_logits(dense_TV, compressed_TV, target_T)
        figures_3T = torch.cat([_divergence_and_losses(*part) for part in rows], dim=1)
        sums += torch.stack([figure_T.sum() for figure_T in figures_3T]).cpu()
        count += len(target_T)
        del dense_TV, compressed_TV, rows  # before the next are computed
    divergence, dense_loss, compressed_loss = sums.tolist()
    return Scored(compressed_loss, count, dense_loss, divergence)


def _divergence_and_losses(dense_TV: Tensor, compressed_TV: Tensor, target_T: Tensor) -> Tensor:
    """Return the divergence (3, T) of each token in float64, and its losses under the dense and the other model."""
    dense_TV, compressed_TV = (logits.log_softmax(dim=1) for logits in (dense_TV, compressed_TV))
    losses = [-log_p.gather(1, target_T[:, None])[:, 0].double() for log_p in (dense_TV, compressed_TV)]
    gain_TV = compressed_TV.sub_(dense_TV)  # in place, because these tensors are the largest
    divergence_T = -gain_TV.mul_(dense_TV.exp_()).sum(dim=1, dtype=torch.float64)
    return torch.stack([divergence_T, *losses])


class ScoreRunner:
    """Runs a worker's `WindowForward` and `Score` units, in the dtype of the windows."""

    def __init__(
        self,
        setup: WorkerConfig,
        device: torch.device,
        hidden: HiddenStates,
        activations: ActivationStore,
        computing: Computing,
    ) -> None:
        self.setup = setup
        self.device = device
        self.hidden = hidden
        self.activations = activations
        self.computing = computing
        self.reader: LayerReader | None = None

    def forward(self, unit: WindowForward) -> ShardDone:
        """Run one shard through one layer. Raises the errors of `Worker.execute`."""
        shard = self.shard(unit)
        inputs, layer = shard.inputs(unit), shard.layer(unit.layer, unit.staged)
        if layer.parts == 1 or unit.part is not None:
            shard.layers.read_ahead(unit.ahead, unit.ahead_staged)
        record = shard.through(layer, inputs, part=unit.part, store=unit.store)
        if record is not None and unit.layer + 1 == self.setup.geometry.num_layers:
            self.hidden.release_shard(shard.lineage, unit.shard)
        samples, length, _ = shard.shape
        return ShardDone({}, None, record, samples * length)

    def score(self, unit: Score) -> Scored:
        """Score one shard. Raises the errors of `Worker.execute`."""
        shard = self.shard(unit)
        inputs, last = shard.inputs(unit), unit.staged
        if unit.dense is None:
            scored = summed_loss(shard.logits((inputs, last)))
        else:
            scored = summed_divergence(shard.logits((self.activations.open(unit.dense), None), (inputs, last)))
        self.hidden.release_shard(shard.lineage, unit.shard)
        return scored

    def shard(self, unit: WindowForward | Score) -> WindowShard:
        """Return the shard of a unit."""
        return WindowShard(self, unit)

    def teach(self, unit: Teach) -> ArrayRecord:
        """Store the rows of one shard. Raises the errors of `Worker.execute`."""
        shard = WindowShard(self, unit)
        samples, length, _ = shard.shape
        inputs, scored = shard.inputs(unit), length - unit.windows.unscored
        shape = (samples, scored, row_bytes(self.setup.geometry.vocab))
        first, waiting, waiting_rows = shard.first_window * scored, list[Tensor](), 0
        with self.activations.writer(TEACHER, unit.layer, unit.shard, shape, torch.uint8) as writer:
            for (logits_TV,), _ in shard.logits((inputs, unit.staged)):
                waiting.append(encode_rows(logits_TV, first).cpu())
                first, waiting_rows = first + len(logits_TV), waiting_rows + len(logits_TV)
                whole = waiting_rows // scored * scored
                if whole:
                    rows_TW = torch.cat(waiting)
                    writer.append(rows_TW[:whole].unflatten(0, (-1, scored)))
                    waiting, waiting_rows = [rows_TW[whole:]], waiting_rows - whole
            record = writer.commit()
        self.hidden.release_shard(shard.lineage, unit.shard)
        return record

    def layers(self, windows: Windows) -> LayerReader:
        """Return the reader of layers in the dtype of the windows."""
        dtype = getattr(torch, windows.dtype)
        if self.reader is None or self.reader.setup.dtype != dtype:
            self.reader = LayerReader(replace(self.setup, dtype=dtype), self.device)
        return self.reader

    def release(self) -> None:
        """Free the device, and discard layers that were read ahead."""
        if self.reader is not None:
            self.reader.release()
            self.reader.ahead = None


class WindowShard(Shard):
    """The windows of one unit."""

    def __init__(self, owner: ScoreRunner, unit: WindowForward | Score) -> None:
        self.owner = owner
        self.unit = unit
        setup = owner.setup
        self.token_source = next(
            source for source in (unit.windows.tokens, setup.token_ids, setup.tokens) if source is not None
        )
        samples, length, batch = self._sizes()
        super().__init__(
            owner.hidden,
            owner.layers(unit.windows),
            self._computing,
            f"{WINDOWS}{unit.model}",
            unit.shard,
            (samples, length, setup.geometry.hidden),
            batch,
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Return the number of windows, their length, and the number of windows in a micro-batch."""
        first, end = self.unit.windows.ranges[self.unit.shard]
        return end - first, int(self.token_source.shape[1]), self.unit.windows.micro_batch

    def first_layer(self) -> StagedLayer | None:
        """Return the staged layer 0 if it may hold the embedding table."""
        return self.unit.replay[0] if self.unit.layer else self.unit.staged

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self.owner.computing(), tensor_cores(self.owner.setup.dtype):
            yield

    def logits(self, *outputs: tuple[HiddenReader, StagedLayer | None]) -> Iterator[LogitRows]:
        """Yield logits (T, V) for each of the last layers' outputs, and the next tokens (T,), some rows at a time.

        Tokens of a window's prefix, and a first token without one, are not scored.

        Raises NumericsError on NaN or infinity.
        """
        heads = {last and last.path: head(self.layers, last) for _, last in outputs}
        first = self.unit.windows.unscored
        for start, stop in self.batches:
            hidden = [
                reader.read(start, stop).to(self.layers.device)[:, first - 1 : -1].flatten(0, 1)
                for reader, _ in outputs
            ]
            target_T = self.tokens(start, stop)[:, first:].flatten()
            for rows in range(0, len(target_T), ROWS_PER_LOGITS):
                part = slice(rows, rows + ROWS_PER_LOGITS)
                logits = tuple(
                    heads[last and last.path](hidden_TD[part])
                    for hidden_TD, (_, last) in zip(hidden, outputs, strict=True)
                )
                if not all(all_finite(logits_TV) for logits_TV in logits):
                    raise NumericsError("evaluation: the logits hold NaN or infinity")
                yield logits, target_T[part]
                del logits

    @cached_property
    def ids(self) -> HiddenReader:
        """Return the token ids of all windows, which only the embedding and the head read."""
        if isinstance(self.token_source, Tensor):
            return InMemory(self.token_source)
        return self.owner.activations.open(self.token_source)

    @property
    def first_window(self) -> int:
        """Return the number of the shard's first window."""
        return self.unit.windows.ranges[self.unit.shard][0]

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return token ids (B, S) of some of the shard's windows."""
        return self.ids.read(self.first_window + start, self.first_window + stop).long().to(self.layers.device)
