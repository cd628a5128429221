"""Runs units of work on one device. Independent of Ray, and of any method or family.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch, V vocabulary.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, CountedRecord, GradientRecord, StagedLayer
from pipeline.kernels.moments import cosine_sums
from pipeline.methods.experts.completing import completed, needed_records
from pipeline.methods.method import Moment, Statistics, Task
from pipeline.methods.registry import build_methods
from pipeline.units.curves import BeginCurve, CurvePieces, CurveUnit, Predict
from pipeline.units.questions import Answer
from pipeline.units.reads import ReadDone, ReadLayer
from pipeline.units.scores import Compare, CompareDone, Score, Teach, WindowForward
from pipeline.units.sharding import GRID_TOKENS
from pipeline.units.sums import Add, CheckGrids, ChooseGrids, ChooseGridsDone, Collect, Summed, Total
from pipeline.units.text_amount import MeasureText
from pipeline.units.units import (
    Backward,
    ConcurrentUnit,
    Forward,
    Measure,
    Pair,
    Reduce,
    Refine,
    RefineDone,
    ShardDone,
    SizesSolved,
    Solve,
    SolveDone,
    SolveSizes,
    SolveUnit,
    Unit,
    Unwritten,
    Write,
)
from stores.activations import ActivationStore
from stores.run_directory import ACTIVATIONS, STATISTICS
from stores.staging import write_staged
from stores.statistics import StatisticsStore
from stores.storage import open_storage
from workers.backward import BackwardPass
from workers.comparing import compare_some
from workers.config import WorkerConfig
from workers.copies import Copies, HiddenReader
from workers.curves import curve_result
from workers.device_settings import device_room, tensor_cores
from workers.embedding_and_head import embedding, split_taps, tapped
from workers.hidden import HiddenStates, HiddenWriter
from workers.layers import LayerReader
from workers.memory import return_freed_pages
from workers.pairing import PairPass
from workers.question_pass import QuestionPass
from workers.refining import RefinePass
from workers.shared_moments import SharedMoments
from workers.sliced_pass import SlicedPass, SlicedShard
from workers.solving import GroupProblem, solve_done, solve_group, solve_sizes
from workers.sums import LayerSums, Squares
from workers.tapped_layer import Tap, TappedLayer, sample_tap
from workers.tensor_transfer import TensorTransfer, get_all, get_available
from workers.text_amount import measure_text
from workers.totals import Totals
from workers.written_tensors import WrittenTensors


class Worker:
    """Runs units. It holds the hidden states of its shards, and one layer."""

    def __init__(self, setup: WorkerConfig, transfer: TensorTransfer) -> None:
        self.name = uuid.uuid4().hex
        self.setup = setup
        self.transfer = transfer
        self.device = torch.device("cuda" if setup.use_gpu else "cpu")
        manifests = setup.points or ((setup.manifest,) if setup.manifest else ())
        self.methods = [(method, manifest.rounding) for manifest in manifests for method in build_methods(manifest)]
        run_dir = open_storage(setup.run_dir)
        self.activations = ActivationStore(run_dir.below(ACTIVATIONS))
        self.statistics = StatisticsStore(run_dir.below(STATISTICS), threads=setup.threads)
        self.tokens = self.activations.open(setup.tokens) if setup.tokens else None
        self.copies, room = Copies(self.device), device_room(self.device, setup.gpu_share, setup.device_bytes)
        self.hidden = HiddenStates(self.activations, setup.hidden_bytes, self.copies, room)
        self.layers = LayerReader(setup, self.device)
        self.sliced = SlicedPass(self.hidden, self._computing)
        self.backward = BackwardPass(setup, self.layers, self.hidden, self.activations, self._computing)
        self.sums = LayerSums(self.transfer, self.device, setup.geometry.hidden)
        self.totals = Totals(self.transfer, self.statistics, self.device, setup.tokens_shape)
        self.pairs = PairPass(setup, self.layers, self.hidden, self.activations, self._tokens, self._computing)
        self.refinement = RefinePass(
            setup, self.layers, self.activations, self._problem, self._statistics, self._computing
        )
        self.shared = SharedMoments()
        self.scores = QuestionPass(setup, self.device, self.hidden, self.activations, self._computing)
        self.compute_seconds = 0.0  # inside products and decompositions

    def execute(self, unit: Unit) -> Any:
        """Run one unit; units may be repeated. Another thread may run a `ConcurrentUnit` at the same time.

        Raises:
            NumericsError: NaN or infinity, naming layer and tensor.
            CorruptError: stored data are damaged.
            LostInputError: hidden states that only this worker had are damaged, or a result was lost with its node.
            StorageError: a write failed.
        """
        handlers: dict[type, Callable[[Any], Any]] = {
            ReadLayer: self._read_part,
            Forward: self._forward,
            Pair: self._pair,
            Backward: self._backward,
            ChooseGrids: self._choose_grids,
            Collect: self.sums.collect,
            CheckGrids: self.totals.check,
            Add: self.totals.add,
            Total: self.totals.store,
            Reduce: self._reduce,
            Measure: self._measure,
            BeginCurve: self._curve,
            CurvePieces: self._curve,
            Predict: self._curve,
            Solve: self._solve,
            SolveSizes: self._solve_sizes,
            Refine: self._refine,
            Write: self._write,
            WindowForward: self.scores.forward,
            Score: self.scores.score,
            Answer: self.scores.answer,
            Teach: self.scores.teach,
            Compare: self._compare,
            MeasureText: lambda unit: measure_text(unit, self.layers, self._tokens, self._computing),
        }
        if not isinstance(unit, ConcurrentUnit):
            self._release_others(unit)
        try:
            # Autograd does not accept tensors of inference mode.
            with torch.no_grad(), torch.inference_mode(not isinstance(_passing(unit), Backward | Refine)):
                return handlers[type(unit)](unit)
        except CorruptError as error:
            # Otherwise the next attempt would read the same data.
            if self.hidden.forget(error.path):
                raise LostInputError(f"{unit.key}: spilled hidden states are damaged: {error}") from error
            raise

    def forget(self) -> None:
        """Discard all hidden states, before units of another model."""
        self.hidden.forget("")

    def close(self) -> None:
        """End the threads of a process that continues."""
        self.layers.thread.shutdown(cancel_futures=True)

    def _release_others(self, unit: Unit) -> None:
        """Release the layers of other kinds of units, so that one layer is held at a time."""
        if not isinstance(_passing(unit), Pair):
            self.pairs.release()
        if not isinstance(unit, SolveUnit | CurveUnit):
            self.shared.release()
        if isinstance(unit, SolveUnit | Refine):
            return_freed_pages()  # a solve needs the most memory
        if isinstance(unit, WindowForward | Score):
            self.layers.release()
        else:
            self.scores.release()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, unit: Forward) -> ShardDone:
        inputs = self._inputs(unit)
        block = self._block(unit)
        if block.streamed is None or unit.part is not None:  # other units run all slices again, for another shard
            self.layers.read_ahead(unit.ahead, shared=partial(get_available, self.transfer, unit.ahead_weights))
        samples: dict[Moment, Tensor] = {}
        taps = self._taps(unit, samples)
        shard_key = (unit.lineage, unit.layer + 1, unit.shard)
        emit = unit.emit and block.ends_with(unit.part)
        hidden_writer = self._hidden_writer(shard_key, unit.store) if emit else None
        cosine = (0.0, 0)
        kept_inputs = self._keep_inputs(unit, inputs) if unit.keep_inputs else None
        with self.sums.adding(unit):
            for hidden_BSD, output_BSD in self._outputs(unit, block, inputs, taps):
                if output_BSD is not None and hidden_BSD is not None and unit.cosine:
                    total, count = cosine_sums(hidden_BSD, output_BSD)
                    cosine = (cosine[0] + total, cosine[1] + count)
                if output_BSD is not None and hidden_writer is not None:
                    hidden_writer.append(output_BSD)
        record = self.hidden.keep(shard_key, hidden_writer) if hidden_writer is not None else None
        return ShardDone(
            partials={moment: self.transfer.put({"moment": values}) for moment, values in samples.items()},
            cosine=cosine if cosine[1] else None,
            activation=record if unit.store else None,
            tokens=self.setup.samples_of(unit.shard) * self.setup.sequence,
            inputs=kept_inputs,
            worker=self.name,
        )

    def _outputs(
        self, unit: Forward, block: TappedLayer, inputs: HiddenReader, taps: list[tuple[str, Tap]]
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield inputs and outputs of the unit's layer; nothing before the layer's last part."""
        wanted = unit.emit or unit.cosine
        if block.streamed is None:
            run = tapped(self.layers, block, taps)
            for hidden_BSD in self.copies.batches(inputs, self.setup.micro_batches(unit.shard)):
                with self._computing():
                    passed_BSD = run(hidden_BSD, wanted)
                yield hidden_BSD, passed_BSD
            return
        inside, see = split_taps(self.layers, taps)
        at, wanted = self._sliced(unit, block, inputs), wanted or see is not None
        for input_BSD, output_BSD in self.sliced.run(at, inside, unit.part, output=wanted, with_inputs=unit.cosine):
            if see is not None:
                see(output_BSD)
            yield input_BSD, output_BSD

    def _sliced(self, unit: Forward, block: TappedLayer, inputs: HiddenReader) -> SlicedShard:
        shard_key, shape_MSD = (unit.lineage, block.layer, unit.shard), self.setup.shard_shape(unit.shard)
        version = self.layers.version
        return SlicedShard(block, shard_key, version, inputs, shape_MSD, self.setup.micro_batches(unit.shard))

    def _block(self, unit: Forward) -> TappedLayer:
        if isinstance(unit.staged, Unwritten):
            write = unit.staged.write
            tensors = partial(WrittenTensors, write, self.setup, self.transfer)
            return self.layers.unwritten_block(unit.staged, tensors)
        return self.layers.block(unit.layer, unit.staged, partial(get_available, self.transfer, unit.weights))

    def _read_part(self, unit: ReadLayer) -> ReadDone:
        return ReadDone(self.transfer.put(self.layers.read_part(unit.layer, unit.part, unit.parts)))

    def _keep_inputs(self, unit: Forward, inputs: HiddenReader) -> ArrayRecord:
        """Store the inputs of the samples that the backward pass will run."""
        count = self.setup.gradient_count(unit.shard)
        shape_MSD = (count, self.setup.sequence, self.setup.geometry.hidden)
        with self.activations.writer("inputs", unit.layer, unit.shard, shape_MSD, self.setup.dtype) as writer:
            for sample in range(count):
                writer.append(inputs.read(sample, sample + 1))
            return writer.commit()

    def _backward(self, unit: Backward) -> ShardDone:
        return self._summed_pass(unit, self.backward.run, self.setup.gradient_count(unit.shard))

    def _pair(self, unit: Pair) -> ShardDone:
        return self._summed_pass(unit, self.pairs.run, self.setup.samples_of(unit.shard))

    def _summed_pass(self, unit: Any, run: Callable[..., ArrayRecord | None], samples: int) -> ShardDone:
        add = self.sums.adder(unit)
        with tensor_cores(self.setup.dtype), self.sums.adding(unit):
            record = run(unit, add)
        return ShardDone({}, None, record if unit.store else None, samples * self.setup.sequence, worker=self.name)

    def _inputs(self, unit: Forward) -> HiddenReader:
        return self.hidden.inputs(unit.lineage, unit, partial(self._embedded, unit), partial(self._replay, unit))

    def _embedded(self, unit: Forward) -> HiddenReader:
        shard_key = (unit.lineage, 0, unit.shard)
        hidden_writer = self._hidden_writer(shard_key, store=False)
        embed = embedding(self.layers)
        first, _ = self.setup.sample_range(unit.shard)
        for start, stop in self.setup.micro_batches(unit.shard):
            hidden_writer.append(embed(self._tokens(first + start, first + stop)))
        return self.hidden.keep_reader(shard_key, hidden_writer)

    def _replay(self, unit: Forward, layer: int, staged: StagedLayer | None, inputs: HiddenReader) -> HiddenReader:
        """Run a layer again, only for its outputs."""
        shard_key = (unit.lineage, layer + 1, unit.shard)
        block = self.layers.block(layer, staged)
        hidden_writer = self._hidden_writer(shard_key, store=False)
        whole = replace(unit, part=None, emit=True, cosine=False)
        for _, output_BSD in self._outputs(whole, block, inputs, []):
            assert output_BSD is not None
            hidden_writer.append(output_BSD)
        return self.hidden.keep_reader(shard_key, hidden_writer)

    def _taps(self, unit: Forward, samples: dict[Moment, Tensor]) -> list[tuple[str, Tap]]:
        """Return taps for the unit's moments. A shard is not added to sums that contain it."""
        first = self.setup.sample_range(unit.shard)[0] * self.setup.sequence
        taps = [
            (moment.point, sample_tap(moment, samples, first, self.setup.calibration_tokens))
            for moment in unit.moments
            if moment.kind == "sample"
        ]
        return taps + self.sums.taps(unit)

    def _choose_grids(self, unit: ChooseGrids) -> ChooseGridsDone:
        forward = unit.forward
        tokens = self.setup.gradient_tokens if isinstance(forward, Backward) else self.setup.calibration_tokens
        squares = Squares(tokens, self.setup.geometry.layers[forward.layer])
        if isinstance(forward, Pair):
            with tensor_cores(self.setup.dtype):
                self.pairs.begin(forward, squares.see_pair)
        elif isinstance(forward, Backward):
            with tensor_cores(self.setup.dtype):
                self.backward.begin(forward, squares.see, lambda: not squares.silent)
        else:
            inputs, block = self._inputs(forward), self._block(forward)
            hidden_BSD = inputs.read(0, 1)[:, :GRID_TOKENS].to(self.device)
            with self._computing(), block.every_expert():
                tapped(self.layers, block, squares.taps(forward))(hidden_BSD, False)
        return ChooseGridsDone(
            {moment: self.transfer.put(grid.packed()) for moment, grid in squares.grids(forward).items()}
        )

    # -- statistics, solving, writing --------------------------------------------------------------------------------

    def _reduce(self, unit: Reduce) -> ArrayRecord:
        parts = [partial["moment"] for partial in get_all(self.transfer, unit.partials)]
        return self.statistics.write(unit.layer, f"{unit.lineage}-{unit.moment.key}", torch.cat(parts, dim=1))

    def _measure(self, unit: Measure) -> Any:
        group = self._problem(unit.task).group
        with self._computing():
            return group.measure()

    def _curve(self, unit: CurveUnit) -> Any:
        problem = self._problem(unit.task)
        with self._computing(), tensor_cores(self.setup.dtype):
            return curve_result(unit, problem, partial(self._completed, unit.task))

    def _statistics(self, layer: int, records: Mapping[Moment, ArrayRecord | Summed], hint: str = "") -> Statistics:
        """Return the statistics for a method: sums of values, shrunk means of gradients, and the curve's hint."""
        moments, passed, shared = {}, {}, self.shared.of(self.setup.geometry.layers[layer])
        for moment, record in records.items():
            moments[moment] = shared.get(moment, record, partial(self.totals.shrunk, moment, record))
            if isinstance(record, CountedRecord | Summed) and not isinstance(record, GradientRecord):
                passed[moment] = record.tokens
        passed = {moment: tokens for moment, tokens in passed.items() if tokens != self.setup.calibration_tokens}
        sources = self.setup.sources
        return Statistics(moments, self.setup.calibration_tokens, hint, passed, shared.factors, sources=sources)

    def _completed(self, task: Task, records: Mapping[Moment, ArrayRecord | Summed], hint: str = "") -> Statistics:
        """Return the statistics for a task, with the moments of experts with few tokens completed."""
        layer = self.setup.geometry.layers[task.layer]
        read = partial(self.layers.group_weights, task.layer)
        needed = needed_records(task, layer, records)
        return completed(task, layer, self._statistics(task.layer, needed, hint), read)

    def _problem(self, task: Task) -> GroupProblem:
        (method, quantize), geometry = self.methods[task.method], self.setup.geometry.layers[task.layer]
        weights = self.layers.group_weights(task.layer, task.roles)
        return GroupProblem(method.group(task, geometry).given(weights), quantize)

    def _solve(self, unit: Solve) -> SolveDone:
        before = self.transfer.get(unit.before) if unit.before is not None else {}
        problem = self._problem(unit.task)
        with self._computing():
            statistics = self._completed(unit.task, unit.statistics, unit.hint)
        if unit.task.refine is not None:
            problem = replace(problem, quantize=None)  # rounded after the training
        with self._computing(), tensor_cores(self.setup.dtype):
            solved = solve_group(problem.given(statistics, self.transfer), unit.ranks, before)
        return solve_done(solved, self.transfer, unit.parts)

    def _refine(self, unit: Refine) -> RefineDone:
        with tensor_cores(self.setup.dtype):
            solved, figures = self.refinement.run(unit)
        return RefineDone(tuple(solve_done(group, self.transfer) for group in solved), figures)

    def _solve_sizes(self, unit: SolveSizes) -> SizesSolved:
        problem = self._problem(unit.task)
        with self._computing():
            statistics = self._completed(unit.task, unit.statistics, unit.hint)
        with self._computing(), tensor_cores(self.setup.dtype):
            each = solve_sizes(problem.given(statistics, self.transfer), unit.sizes)
            return SizesSolved(tuple(solve_done(solved, self.transfer, unit.parts) for solved in each))

    def _write(self, unit: Write) -> Any:
        tensors = WrittenTensors(unit, self.setup, self.transfer)
        return write_staged(self.setup.run_dir, unit.layer, tensors, self.setup.threads)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _compare(self, unit: Compare) -> CompareDone:
        self.layers.release()
        with self._computing():
            return compare_some(unit, self.setup, self.device, self.transfer)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # not the device, on which copies and sums also run
        self.compute_seconds += time.perf_counter() - started

    # -- samples -----------------------------------------------------------------------------------------------------

    def _tokens(self, start: int, stop: int) -> Tensor:
        """Return token ids (B, S) of calibration samples start to stop."""
        assert self.tokens is not None
        return self.tokens.read(start, stop).long().to(self.device)

    def _hidden_writer(self, shard_key: tuple[str, int, int], store: bool) -> HiddenWriter:
        shape_MSD, batch = self.setup.shard_shape(shard_key[2]), self.setup.micro_batch
        return self.hidden.hidden_writer(shard_key, shape_MSD, self.setup.dtype, store, batch)


def _passing(unit: Unit) -> Unit:
    """Return the unit that runs a shard through a layer: `unit` itself, or the one from which grids are chosen."""
    return unit.forward if isinstance(unit, ChooseGrids) else unit
