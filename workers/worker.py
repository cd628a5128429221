"""A worker: does units one after another. Knows neither Ray nor which method or family it serves.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from manifests.errors import CorruptError, NumericsError
from pipeline.kernels.moments import add_head_moment_, cosine_sums
from pipeline.methods.method import Moment
from pipeline.methods.registry import build_methods
from pipeline.ports import Forward, ForwardDone, Reduce, Score, Solve, SolveDone, Unit, Write
from stores.activations import ActivationStore
from stores.staging import write_staged
from stores.statistics import StatisticsStore
from workers.block import Tap, final_norm
from workers.exchange import Exchange
from workers.hidden import Collector, HiddenStates, Slices
from workers.layers import LayerReader
from workers.setup import Setup

ROWS_PER_LOGITS = 1024


class Worker:
    """Holds the hidden states of the shards it was given, and one layer."""

    def __init__(self, setup: Setup, exchange: Exchange) -> None:
        self.setup = setup
        self.exchange = exchange
        self.device = torch.device("cuda" if setup.use_gpu else "cpu")
        self.methods = build_methods(setup.manifest) if setup.manifest else ()
        self.activations = ActivationStore(setup.run_dir / "activations.zarr")
        self.statistics = StatisticsStore(setup.run_dir / "statistics.zarr")
        self.tokens = self.activations.open(setup.tokens) if setup.tokens else None
        self.hidden = HiddenStates(self.activations, setup.hidden_bytes)
        self.layers = LayerReader(setup, self.device)
        self.compute_seconds = 0.0  # spent inside products and decompositions

    @torch.inference_mode()
    def execute(self, unit: Unit) -> Any:
        """Does one unit. Doing it again does no harm.

        Raises:
            NumericsError: NaN or infinity, naming layer and tensor.
            CorruptError: stored data that was read is damaged.
            StorageError: a write failed.
        """
        handlers: dict[type, Callable[[Any], Any]] = {
            Forward: self._forward,
            Reduce: self._reduce,
            Solve: self._solve,
            Write: self._write,
            Score: self._score,
        }
        try:
            return handlers[type(unit)](unit)
        except CorruptError:
            self.hidden.forget_stored()  # the driver takes the damaged record back; a reader of it must not outlive that
            raise

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, unit: Forward) -> ForwardDone:
        inputs = self._inputs(unit, unit.layer)
        block = self.layers.block(unit.layer, unit.staged)
        self.layers.read_ahead(unit.ahead)
        totals: dict[Moment, Tensor] = {}
        taps = [(moment.point, self._tap(unit.layer, moment, totals)) for moment in unit.moments]
        place = (unit.lineage, unit.layer + 1, unit.shard)
        collector = self._collector(place, unit.store) if unit.emit else None
        cosine = (0.0, 0)
        for start, stop in self._micro_batches(unit.shard):
            hidden_BSD = inputs.read(start, stop).to(self.device)
            with self._computing():
                output_BSD = block.run(hidden_BSD, taps, output=unit.emit or unit.cosine)
            if output_BSD is not None and unit.cosine:
                total, count = cosine_sums(hidden_BSD, output_BSD)
                cosine = (cosine[0] + total, cosine[1] + count)
            if output_BSD is not None and collector is not None:
                collector.append(output_BSD)
        record = self.hidden.keep(place, collector) if collector is not None else None
        return ForwardDone(
            partials={moment: self.exchange.put({"moment": total}) for moment, total in totals.items()},
            cosine=cosine if unit.cosine else None,
            activation=dict(record) if record and unit.store else None,
            tokens=self._samples(unit.shard) * self._sequence,
        )

    def _inputs(self, unit: Forward | Score, layer: int) -> Slices:
        """The hidden states that go into a layer: held, committed, or made from the last that are.

        The way back ends at `unit.base`, whose inputs are in the store, or are the embeddings if it is 0.
        """
        nearest = layer
        while (held := self.hidden.get((unit.lineage, nearest, unit.shard))) is None and nearest > unit.base:
            nearest -= 1
        if held is None:
            held = self._base_inputs(unit)
        for before in range(nearest, layer):
            held = self._replay(unit, before, held)
        return held

    def _base_inputs(self, unit: Forward | Score) -> Slices:
        place = (unit.lineage, unit.base, unit.shard)
        if unit.base_record is not None:
            return self.hidden.load(place, unit.base_record)
        if unit.base != 0:
            raise AssertionError(f"{unit.key}: no committed hidden states for layer {unit.base}")
        collector = self._collector(place, store=False)
        embed = self._embedding()
        first, _ = self._range(unit.shard)
        for start, stop in self._micro_batches(unit.shard):
            collector.append(embed(first + start, first + stop))
        self.hidden.keep(place, collector)
        held = self.hidden.get(place)
        assert held is not None
        return held

    def _replay(self, unit: Forward | Score, layer: int, inputs: Slices) -> Slices:
        """A layer once more, for its outputs alone."""
        place = (unit.lineage, layer + 1, unit.shard)
        block = self.layers.block(layer, unit.replay[layer - unit.base])
        collector = self._collector(place, store=False)
        for start, stop in self._micro_batches(unit.shard):
            with self._computing():
                output_BSD = block.run(inputs.read(start, stop).to(self.device))
            assert output_BSD is not None
            collector.append(output_BSD)
        self.hidden.keep(place, collector)
        held = self.hidden.get(place)
        assert held is not None
        return held

    def _embedding(self) -> Callable[[int, int], Tensor]:
        block = self.setup.config["block"]
        name = f"{block['embed']}.weight"
        positions = f"{block['positions']['module']}.weight" if block["positions"] else None
        tensors = self.layers.outer(name, *([positions] if positions else []))

        def embed(start: int, stop: int) -> Tensor:
            ids_BS = self._tokens(start, stop)
            hidden_BSD = functional.embedding(ids_BS, tensors[name])
            if positions:
                offset = block["positions"]["offset"]
                hidden_BSD = hidden_BSD + tensors[positions][offset : offset + ids_BS.shape[1]]
            return hidden_BSD

        return embed

    def _tap(self, layer: int, moment: Moment, totals: dict[Moment, Tensor]) -> Tap:
        def add(values: Tensor) -> None:
            width = values.shape[-1] // moment.heads
            if moment not in totals:
                totals[moment] = torch.zeros(moment.groups, width, width, dtype=torch.float64, device=self.device)
            try:
                add_head_moment_(totals[moment], values, moment.heads, moment.groups)
            except ValueError as error:
                raise NumericsError(f"layer {layer}: activations at {moment.point}: {error}") from error

        return add

    # -- statistics, solving, writing --------------------------------------------------------------------------------

    def _reduce(self, unit: Reduce) -> Any:
        total: Tensor | None = None
        for handle in unit.partials:
            partial = self.exchange.get(handle)["moment"]
            total = partial.clone() if total is None else total.add_(partial)
        assert total is not None
        return self.statistics.write(unit.layer, f"{unit.lineage}-{unit.moment.key}", total)

    def _solve(self, unit: Solve) -> SolveDone:
        group, geometry = unit.task.group, self.setup.geometry
        names = {
            key: name
            for key, (name, _) in geometry.layer_tensors(group.layer).items()
            if key.partition(".")[0] in group.roles
        }
        weights = self.layers.dense_weights(group.layer, names)
        moments = {moment: self.statistics.read(record).to(self.device) for moment, record in unit.statistics.items()}
        method = self.methods[unit.task.method]
        with self._computing():
            solution = method.compress(group, geometry, weights, moments, unit.ranks)
        factors = {key: tensor.to(_stored_dtype(key, weights)) for key, tensor in solution.tensors.items()}
        return SolveDone(self.exchange.put(factors), solution.forms, solution.report)

    def _write(self, unit: Write) -> Any:
        geometry, source = self.setup.geometry, self.setup.source
        factors = {key: tensor for handle in unit.factors for key, tensor in self.exchange.get(handle).items()}
        solved = {key.partition(".")[0] for key in factors}
        tensors = {}
        for key, tensor in factors.items():
            role, _, part = key.partition(".")
            tensors[f"{geometry.path(unit.layer, role)}.{part}"] = tensor
        claimed = {geometry.path(unit.layer, role) + "." for role in solved}
        prefix = f"{geometry.layers_path}.{unit.layer}."
        copied = [
            name
            for name in source.tensors
            if name.startswith(prefix) and not any(name.startswith(path) for path in claimed)
        ]
        tensors.update(source.read(copied))
        return write_staged(self.setup.run_dir, unit.layer, tensors)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _score(self, unit: Score) -> tuple[float, int]:
        inputs = self._inputs(unit, unit.layer)
        block = self.setup.config["block"]
        head = block["embed"] if self.setup.geometry.tied else block["head"]
        parts = (
            f"{block['final_norm']}.weight",
            f"{block['final_norm']}.bias",
            f"{head}.weight",
            f"{block['head']}.bias",
        )
        tensors = self.layers.outer(*parts)
        norm = final_norm(
            self.layers.config, {name.rpartition(".")[2]: tensors[name] for name in parts[:2] if name in tensors}
        )
        first, _ = self._range(unit.shard)
        total, count = 0.0, 0
        for start, stop in self._micro_batches(unit.shard):
            hidden_BSD = norm(inputs.read(start, stop).to(self.device))[:, :-1].flatten(0, 1)
            target_T = self._tokens(first + start, first + stop)[:, 1:].flatten()
            for rows in range(0, len(target_T), ROWS_PER_LOGITS):
                part = slice(rows, rows + ROWS_PER_LOGITS)
                logits_TV = functional.linear(hidden_BSD[part], tensors[parts[2]], tensors.get(parts[3])).float()
                loss_T = functional.cross_entropy(logits_TV, target_T[part], reduction="none")
                if not torch.isfinite(loss_T).all():
                    raise NumericsError("evaluation: the logits hold NaN or infinity")
                total += loss_T.double().sum().item()
            count += len(target_T)
        return total, count

    @contextmanager
    def _computing(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.compute_seconds += time.perf_counter() - started

    # -- samples -----------------------------------------------------------------------------------------------------

    @property
    def _sequence(self) -> int:
        assert self.setup.tokens is not None
        return int(self.setup.tokens["shape"][1])

    def _range(self, shard: int) -> tuple[int, int]:
        assert self.setup.tokens is not None
        return self.setup.shard_range(shard, self.setup.tokens["shape"][0])

    def _samples(self, shard: int) -> int:
        first, end = self._range(shard)
        return end - first

    def _micro_batches(self, shard: int) -> list[tuple[int, int]]:
        """(start, stop) within the shard."""
        samples, batch = self._samples(shard), self.setup.micro_batch
        return [(start, min(start + batch, samples)) for start in range(0, samples, batch)]

    def _tokens(self, start: int, stop: int) -> Tensor:
        """Token ids (B, S) of samples of the whole calibration set."""
        assert self.tokens is not None
        return self.tokens.read(start, stop).long().to(self.device)

    def _collector(self, place: tuple[str, int, int], store: bool) -> Collector:
        shape_MSD = (self._samples(place[2]), self._sequence, self.setup.geometry.hidden)
        return self.hidden.collector(place, shape_MSD, self.setup.dtype, store, self.setup.micro_batch)


def _stored_dtype(key: str, weights: Mapping[str, Tensor]) -> torch.dtype:
    """A factor is stored in the dtype of the weight it comes from."""
    return weights[f"{key.partition('.')[0]}.weight"].dtype
