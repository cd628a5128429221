"""The planned phases of a job, without the work that is committed, for the estimate of the remaining time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manifests.records import LedgerKey
from pipeline.console.eta import Eta, PlannedPhase
from pipeline.cost_model.estimate import Plan
from pipeline.cost_model.healing_work import healing_work
from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.phases import WALK, phase_seconds, scored_seconds, solving_seconds
from pipeline.cost_model.prices import START_SECONDS, WORKERS_SECONDS, prices_of
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.texts import job_seconds
from pipeline.driver.job_spec import needs_both_models
from pipeline.driver.ledger_keys import (
    HEALED,
    HELD_OUT,
    HELD_OUT_SCORE,
    LOSS_RATIOS,
    TEACHER,
    TEXTS,
    TRIES,
    block_key,
    block_name,
    curves_key,
    dense_key,
    gradient_key,
    layer_key,
)
from pipeline.inputs.job_inputs import Inputs
from pipeline.job.context import JobContext, driver_job, healing_tokens
from pipeline.job.output_scores import dense_score_key
from pipeline.ranks.calibration import OTHER_SIZES, runs_of_layers

TRIED = 4  # a search for the smallest size within a loss tries about this many sizes


def job_eta(job: JobContext, rates: Rates) -> Eta:
    """Return the phases ahead of a job that begins or resumes. A search for a size is counted as `TRIED` sizes,
    each with its phases. For a sweep see `pipeline.sweeping.sweep_plan.sweep_eta`."""
    inputs, manifest = job.inputs, job.manifest
    prices = prices_of(inputs.planned, rates, job.plan.kept)
    alone = prices.of_layers_alone(manifest)
    seconds = job_seconds(inputs.planned, prices, job.evaluation.ids.shape if job.evaluation else ())
    remaining = _Remaining(job, prices.passes, seconds, phase_seconds(alone))
    planned = [PlannedPhase("start", START_SECONDS)]
    if job.tokens is not None and job.ledger.get(TEXTS) is None:
        planned.append(PlannedPhase("score texts", seconds["texts"]))
    planned += [*remaining.single_phases(), *remaining.sizes()]
    if manifest.heal is not None and job.ledger.get(HEALED) is None:
        planned += [*healing_phases(job, inputs, job.plan, rates), *remaining.scores()]
    planned.append(PlannedPhase("assemble", seconds["assemble"]))
    if "evaluate" in seconds:
        planned += _evaluations(job, seconds["evaluate"])
    return Eta(planned, inputs.geometry.num_layers)


def healing_phases(job: JobContext, inputs: Inputs, plan: Plan, rates: Rates) -> list[PlannedPhase]:
    """Return the training of a healing, and before it the teacher's pass, unless its result is entered.

    `inputs`, `plan`: those of the job, or of a point of a sweep.
    """
    work = healing_work(inputs.manifest, inputs.geometry, plan.kept, healing_tokens(job).trained.numel())
    assert work is not None, "the number of tokens is known"
    seconds = work.seconds(rates, work.processes)
    names = ("score teacher", "heal") if job.ledger.get(TEACHER) is None else ("heal",)
    return [PlannedPhase(name, seconds[name]) for name in names]


@dataclass(frozen=True)
class _Remaining:
    """The phases of a job without their committed layers.

    Attributes:
        seconds: the plan's, for all layers.
        alone: those of the first solve of `budget.measure_layers`, `Prices.of_layers_alone`.
    """

    job: JobContext
    passes: PlannedPasses
    seconds: Mapping[str, float]
    alone: Mapping[str, float]

    def single_phases(self) -> list[PlannedPhase]:
        """Return the phases that come once: passes over the calibration text, and curves."""
        seconds, claimed = self.seconds, self.job.inputs.claimed_layers
        first = "importance" if self.passes.compressed else "statistics"
        planned: list[PlannedPhase] = []
        if first in seconds and self.job.inputs.planned.has_moments:
            amount = seconds[first] + (self._solving[1] - self._last_solves if self.passes.in_pass else 0.0)
            planned += self._phase(first, amount, self._dense_keys)
        if "gradient" in seconds:
            layers = driver_job(self.job.inputs).gradient_layers()
            planned += self._phase("gradient", seconds["gradient"], _keys(gradient_key, layers))
        if "curves" in seconds:
            planned += self._phase("curves", seconds["curves"], _keys(curves_key, claimed))
        return planned

    def sizes(self) -> list[PlannedPhase]:
        """Return the phases of each size: solving, and scores on held-out text. With `budget.measure_layers`, layers
        are solved and scored alone first."""
        ledger, manifest = self.job.ledger, self.job.manifest
        tries = len(ledger.keys(TRIES))
        sizes = 1 if self.job.inputs.max_loss is None else max(1, TRIED - tries)
        sizes += max(0, OTHER_SIZES - tries) if manifest.evaluation.calibrate_prediction else 0
        further = [PlannedPhase(*self._solving), *self.scores()]
        if manifest.measures_layers and ledger.get(LOSS_RATIOS) is None:
            first = self._first_solve("compress", solving_seconds(self.alone))
            return [*first, *self._first_scores(), *self._block_scores(), *further * sizes]
        return [*self._first_solve(*self._solving), *self._first_scores(), *further * (sizes - 1)]

    def scores(self, *models: str) -> list[PlannedPhase]:
        """Return the scores of models on held-out text, by default of the compressed one."""
        scored = self.job.held_out is not None and self._held_out > 0.0
        return [PlannedPhase(f"score {model}", self._held_out) for model in models or ("held-out",) if scored]

    def _first_solve(self, phase: str, seconds: float) -> list[PlannedPhase]:
        """Return the rest of the first solve of all layers: of those that are not committed, or not solved in the
        pass."""
        if self.passes.in_pass and self._missing(self._dense_keys):
            return [PlannedPhase(phase, self._last_solves)]
        return self._phase(phase, seconds, _keys(layer_key, self.job.inputs.claimed_layers))

    def _first_scores(self) -> list[PlannedPhase]:
        """Return the scores on held-out text after the first solve. The outputs of the dense model are stored once."""
        ledger = self.job.ledger
        if ledger.get(HELD_OUT_SCORE) is not None:
            return []
        held_out = ledger.get(HELD_OUT)
        comes_first = self.passes.joined and ledger.get(TEXTS) is None
        has_dense = comes_first or (held_out is not None and held_out.outputs is not None)
        return self.scores("held-out") if has_dense else self.scores("held-out-dense", "held-out")

    def _block_scores(self) -> list[PlannedPhase]:
        """Return the scores of the runs of layers that are not measured. Each passes the layers from its first one."""
        of_layer, layers = self._held_out / self.passes.layers, self.passes.layers
        firsts = (first for first, *_ in runs_of_layers(self.job.inputs.claimed_layers))
        missing = [first for first in firsts if self.job.ledger.get(block_key(first)) is None]
        return [PlannedPhase(f"score {block_name(first)}", of_layer * (layers - first)) for first in missing]

    @property
    def _held_out(self) -> float:
        """The seconds of one model on held-out text."""
        return scored_seconds(self.seconds, self.passes)

    @property
    def _solving(self) -> tuple[str, float]:
        """The phase that solves all layers, and its seconds."""
        seconds = self.seconds
        if self.passes.compressed and self.job.inputs.planned.has_moments:
            return "walk", sum(seconds.get(name, 0.0) for name in WALK)
        walks = any(map(needs_both_models, self.job.inputs.tasks))
        return "correct" if walks else "compress", solving_seconds(seconds)

    @property
    def _last_solves(self) -> float:
        """The seconds of the layers that are not solved within the dense pass."""
        return min(1.0, (self.passes.workers + 2) / self.passes.layers) * self._solving[1]

    @property
    def _dense_keys(self) -> list[LedgerKey[Any]]:
        return _keys(dense_key, range(self.passes.layers))

    def _missing(self, keys: Sequence[LedgerKey[Any]]) -> int:
        return sum(self.job.ledger.get(key) is None for key in keys)

    def _phase(self, phase: str, seconds: float, keys: Sequence[LedgerKey[Any]]) -> list[PlannedPhase]:
        """Return the part of a phase that is not committed: nothing, if each of `keys` is."""
        if not keys:
            return [PlannedPhase(phase, seconds)]
        missing = self._missing(keys)
        return [PlannedPhase(phase, seconds * missing / len(keys), layers=missing)] if missing else []


def _keys(key_of: Callable[[int], LedgerKey[Any]], layers: Sequence[int]) -> list[LedgerKey[Any]]:
    return [key_of(layer) for layer in layers]


def _evaluations(job: JobContext, seconds: float) -> list[PlannedPhase]:
    """Return the evaluations of OUTPUT and of the dense model that are not entered. `seconds`: of one model."""
    has_dense = any(job.ledger.get(key) is not None for key in dense_score_key(job))
    each = [PlannedPhase("start", WORKERS_SECONDS), PlannedPhase("evaluate", seconds)]
    return each * (1 + (job.manifest.evaluation.with_dense and not has_dense))
