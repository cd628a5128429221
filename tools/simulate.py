"""Predict the time of jobs on large models by simulation: `python -m tools.simulate`.

docs/plan.md explains the arithmetic; docs/results.md holds the tables that this prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from manifests.loading import parse_manifest
from manifests.schema import Manifest
from pipeline.cost_model.commits import layers_per_commit
from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import Prices, prices_of
from pipeline.cost_model.rates import Rates, rates_of
from pipeline.driver.job_spec import Job
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.job.context import job_spec
from tools.simulator.pool import Failure
from tools.simulator.simulator import Simulated, simulate

LLAMA = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8},
}  # fmt: skip
SHARDS, LENGTH = 256, 4096  # a sample each


def geometry(model: str) -> Geometry:
    """Return the geometry of a Llama model of this size."""
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **LLAMA[model]}
    return geometry_of(standard_config(config))


def manifest_of(propagate: str, keep: bool | None = None, **entry: Any) -> Manifest:
    """Return a job of 256 × 4096 tokens by one method, by default `flat_llm`. `keep`: of its statistics."""
    calibration = {"text": {"files": ["text.txt"]}, "samples": 256, "sequence_length": LENGTH, "shards": SHARDS}
    return parse_manifest({
        "version": 1, "model": {"source": "model"}, "output": "output", "run_dir": "run", "budget": {"keep": 0.8},
        "calibration": {**calibration, "propagate": propagate}, "methods": [{"method": "flat_llm", **entry}],
        "workers": {"max": SHARDS}, "statistics": {"keep": keep}, "resume": {"every": "auto"},
    })  # fmt: skip


def prices_for(manifest: Manifest, shape: Geometry, rates: Rates) -> Prices:
    """Return the prices of a job that keeps 0.8 of a model's numbers."""
    return prices_of(PlannedJob.of(manifest, shape), rates, keep=0.8)


def job_of(manifest: Manifest, geometry: Geometry, every: int) -> Job:
    """Return the job as its driver sees it. All its ranks are 1. `every`: as `Job.every`."""
    planned = PlannedJob.of(manifest, geometry)
    spec = job_spec(planned)
    return replace(spec, every=every, allocate=lambda _: {task.key: {"rank": 1} for task in planned.tasks})


@dataclass(frozen=True)
class Case:
    """A job on some GPUs.

    Attributes:
        cached: moments and layers are read again from memory.
        keep: of its statistics.
        entry: its method, by default `flat_llm`.
    """

    model: str
    workers: int
    cached: bool
    propagate: str = "dense"
    keep: bool | None = None
    entry: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, rates: Rates, failures_s: Sequence[float] = ()) -> tuple[Simulated, dict[str, float]]:
        """Predict the job by the simulator, and by the plan's closed form.

        `failures_s`: times at which one worker after another dies; each is replaced as soon as another has started.
        """
        manifest, shape = manifest_of(self.propagate, self.keep, **self.entry), geometry(self.model)
        prices = prices_for(manifest, shape, rates)
        prices = replace(prices, passes=replace(prices.passes, workers=self.workers, cached=self.cached))
        failures = [Failure(at, number % self.workers) for number, at in enumerate(failures_s)]
        return simulate(job_of(manifest, shape, layers_per_commit(prices)), prices, failures), phase_seconds(prices)


def rows(rates: Rates, failures_s: Sequence[float] = ()) -> Iterator[str]:
    """Yield the lines of the table of predictions."""
    yield "| model | propagate | ranks | read again from | GPUs | minutes | in closed form | idle share |"
    yield "|---|---|---|---|---|---|---|---|"
    ranked = (
        Case("70B", 1, False), Case("70B", 8, False), Case("70B", 1, True), Case("70B", 8, True), Case("70B", 64, True),
        Case("70B", 1, True, "compressed"), Case("70B", 8, True, "compressed"), Case("405B", 8, False),
        Case("405B", 8, True),
    )  # fmt: skip
    uniform = (
        Case("70B", 1, True), Case("70B", 8, False), Case("70B", 8, True), Case("405B", 8, False),
        Case("405B", 8, False, keep=False), Case("405B", 8, True),
    )  # fmt: skip
    for case in (*ranked, *(replace(case, entry={"allocation": "uniform"}) for case in uniform)):
        ranks = case.entry.get("allocation", "importance") + (", `keep: false`" if case.keep is False else "")
        place, figures = "memory" if case.cached else "disk", _figures(*case.predict(rates, failures_s))
        yield f"| {case.model} | {case.propagate} | {ranks} | {place} | {case.workers} | {figures} |"


def loss_rows(rates: Rates, failures_s: Sequence[float] = ()) -> Iterator[str]:
    """Yield the table of jobs that follow the loss, 70B, dense statistics, with their workers' minutes by kind."""
    kinds = ("statistics", "gradient", "curves", "solve", "correct", "refine", "held-out")
    yield f"| `loss_aware` | GPUs | minutes | in closed form | idle share | {' | '.join(kinds)} |"
    yield f"|---|---|---|---|---|{'---|' * len(kinds)}"
    entries: tuple[dict[str, Any], ...] = (
        {}, {"correct": "output"}, {"refine": True}, {"refine": {"inputs": "dense"}}, {"refine": {"inputs": "mixed"}},
    )  # fmt: skip
    for entry, workers in product(entries, (1, 8)):
        case = Case("70B", workers, cached=True, entry={"method": "loss_aware", **entry})
        simulated, phases = case.predict(rates, failures_s)
        named = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in entry.items()) or "defaults"
        spent = " | ".join(f"{simulated.busy.get(kind, 0.0) / 60 / workers:.1f}" for kind in kinds)
        yield f"| {named} | {workers} | {_figures(simulated, phases)} | {spent} |"


def _figures(simulated: Simulated, phases: dict[str, float]) -> str:
    start = phases["digests"] + phases["start"]
    minutes = [f"{(seconds - start) / 60:.1f}" for seconds in (simulated.seconds, sum(phases.values()))]
    return f"{' | '.join(minutes)} | {simulated.idle_share:.0%}"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(prog="python -m tools.simulate", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--gpu", default="H200", help="the GPU whose rates apply (pipeline/cost_model/rates.py)")
    options.add_argument(
        "--fail", type=float, nargs="+", default=(), metavar="SECONDS", help="when one worker after another dies"
    )
    arguments = options.parse_args(argv)
    rates = rates_of(arguments.gpu)
    for row in (*rows(rates, arguments.fail), "", *loss_rows(rates, arguments.fail)):
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
