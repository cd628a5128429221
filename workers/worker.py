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
from manifests.records import ArrayRecord, CountedRecord, GradientRecord
from pipeline.methods.experts.completing import completed, needed_records
from pipeline.methods.method import Moment, Statistics, Task
from pipeline.methods.registry import build_methods
from pipeline.units.curves import BeginCurve, CurvePieces, CurveUnit, Predict
from pipeline.units.questions import Answer
from pipeline.units.reads import ReadDone, ReadLayer
from pipeline.units.scores import Compare, CompareDone, Score, Teach, WindowForward
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
    Summable,
    Unit,
    Write,
)
from stores.activations import ActivationStore
from stores.run_directory import ACTIVATIONS, STATISTICS
from stores.staging import write_staged
from stores.statistics import StatisticsStore
from stores.storage import open_storage
from workers.backward import BackwardRunner
from workers.comparing import compare_some
from workers.config import WorkerConfig
from workers.copies import Copies
from workers.curves import curve_result
from workers.device_settings import device_room, tensor_cores
from workers.forward_pass import ForwardRunner
from workers.hidden import HiddenStates
from workers.layers import LayerReader
from workers.memory import return_freed_pages
from workers.pairing import PairRunner
from workers.question_pass import QuestionRunner
from workers.refining import RefineRunner
from workers.shared_moments import SharedMoments
from workers.solving import GroupProblem, solve_done, solve_group, solve_sizes
from workers.sums import LayerSums, Squares
from workers.tensor_transfer import TensorTransfer, get_all
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
        self.sums = LayerSums(self.transfer, self.device, setup.geometry.hidden)
        shared = setup, self.layers, self.hidden, self.activations, self.sums, self._tokens, self._computing
        self.pairs, self.backward = PairRunner(*shared), BackwardRunner(*shared)
        self.runners: dict[type, Any] = {Forward: ForwardRunner(*shared), Pair: self.pairs, Backward: self.backward}
        self.totals = Totals(self.transfer, self.statistics, self.device, setup.tokens_shape)
        self.refinement = RefineRunner(
            setup, self.layers, self.activations, self._problem, self._statistics, self._computing
        )
        self.shared = SharedMoments()
        self.scores = QuestionRunner(setup, self.device, self.hidden, self.activations, self._computing)
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
            **dict.fromkeys(self.runners, self._pass_shard),
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

    # -- passes ------------------------------------------------------------------------------------------------------

    def _read_part(self, unit: ReadLayer) -> ReadDone:
        return ReadDone(self.transfer.put(self.layers.read_part(unit.layer, unit.part, unit.parts)))

    def _pass_shard(self, unit: Summable) -> ShardDone:
        done: ShardDone = self.runners[type(unit)].run(unit)
        return replace(done, worker=self.name)

    def _choose_grids(self, unit: ChooseGrids) -> ChooseGridsDone:
        forward = unit.forward
        tokens = self.setup.gradient_tokens if isinstance(forward, Backward) else self.setup.calibration_tokens
        squares = Squares(tokens, self.setup.geometry.layers[forward.layer])
        self.runners[type(forward)].begin(forward, squares)
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
        return GroupProblem(method.group(task, geometry).with_data(weights), quantize)

    def _solve(self, unit: Solve) -> SolveDone:
        before = self.transfer.get(unit.before) if unit.before is not None else {}
        problem = self._problem(unit.task)
        with self._computing():
            statistics = self._completed(unit.task, unit.statistics, unit.hint)
        if unit.task.refine is not None or not unit.rounds:
            problem = replace(problem, quantize=None)  # a refined group is rounded after its training
        with self._computing(), tensor_cores(self.setup.dtype):
            solved = solve_group(problem.with_statistics(statistics, self.transfer), unit.ranks, before)
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
            each = solve_sizes(problem.with_statistics(statistics, self.transfer), unit.sizes)
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


def _passing(unit: Unit) -> Unit:
    """Return the unit that runs a shard through a layer: `unit` itself, or the one from which grids are chosen."""
    return unit.forward if isinstance(unit, ChooseGrids) else unit
