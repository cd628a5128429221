"""Compare plan, simulator and the floor with real jobs on this machine, with one worker and with two.

    python -m tools.benchmarks.predictions [--layers N] [--samples 32] [--jobs dense compressed loss_aware]
        [--workers 1 2]

The model is random, of equal layers of 19.9 M parameters. The jobs are `flat_llm` under `propagate: dense` and
`compressed`, and `loss_aware`. Plan and simulator use the rates that `plan --probe` measures just before the job, with
as many workers. The floor (`tools/benchmarks/floor.py`) is the least time that this machine could take; it is known
for `flat_llm`. The start of a job is left out. Prints seconds by phase as each job ends, and the totals last. Needs an
idle machine and about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deploy.quickstart.text import story_text
from manifests.loading import parse_manifest
from pipeline.cost_model.commits import layers_per_commit
from pipeline.cost_model.phases import SOLVING, WALK
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import prices_of
from pipeline.cost_model.rates import Rates
from pipeline.families.registry import geometry_of, standard_config
from tools.benchmarks.floor import floor_of
from tools.benchmarks.jobs import ROOT, end_on_sigterm, environment, manifest_of, print_table, run_manifest
from tools.benchmarks.random_models import write_llama
from tools.simulate import job_of
from tools.simulator.simulator import simulate

JOBS = {  # propagate, method, layers
    "dense": ("dense", "flat_llm", 12),
    "compressed": ("compressed", "flat_llm", 12),
    "loss_aware": ("dense", "loss_aware", 4),
}
STARTING = ("checks", "start")  # the phases that the plan calls `start`
PHASES = {  # of the job -> of the plan
    "importance": ("importance",),
    "statistics": ("statistics", "reduce"),
    "gradient": ("gradient",),
    "curves": ("curves",),
    "compress": SOLVING,
    "walk": WALK,
    "score": ("compare", "verify", "held-out"),
    "assemble": ("assemble",),
}


def document_of(folder: Path, job: str, workers: int, samples: int) -> dict[str, Any]:
    """Return the document of a job in `folder`, whose parent holds the model and the text."""
    propagate, method, _ = JOBS[job]
    model, text = folder.parent / "model", folder.parent / "text.txt"
    calibration = {"samples": samples, "sequence_length": 256, "shards": 8, "propagate": propagate}
    blocks = {"methods": [{"method": method}], "workers": {"min": workers, "max": workers}}
    return manifest_of(folder, model, [text], calibration, **blocks)


def planned(path: Path) -> dict[str, Any]:
    """Return the report of `plan --probe`. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pipeline.plan", str(path), "--probe", "--json"]
    printed = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True).stdout
    report: dict[str, Any] = json.loads(printed)
    return report


def job_phases(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a job's phases in their order, without its start; all scoring is one phase."""
    phases: dict[str, float] = {}
    for name, seconds in measured.items():
        phase = "score" if name.startswith("score") or name == "verify" else name
        if phase not in STARTING:
            phases[phase] = phases.get(phase, 0.0) + seconds
    return phases


def compared(folder: Path, job: str, workers: int, samples: int) -> list[list[object]]:
    """Run a job. Return a row for each of its phases, and one for all."""
    folder.mkdir()
    document = document_of(folder, job, workers, samples)
    (folder / "manifest.json").write_text(json.dumps(document))
    plan = planned(folder / "manifest.json")
    manifest = parse_manifest(document)
    geometry = geometry_of(standard_config(json.loads((folder.parent / "model/config.json").read_text())))
    share = plan["expected_numbers"] / plan["dense_numbers"]
    prices = prices_of(PlannedJob.of(manifest, geometry), Rates(**plan["rates"]), share)
    clock = simulate(job_of(manifest, geometry, layers_per_commit(prices)), prices)
    floors = floor_of(manifest, geometry, workers, folder.parent) if JOBS[job][1] == "flat_llm" else {}
    seconds = run_manifest(document, folder)["seconds"]
    units = ", ".join(f"{kind} {count} × {spent / count:.3f}" for kind, (count, spent, _) in seconds["units"].items())
    starts = sum(seconds["phases"].get(name, 0.0) for name in STARTING)
    print(f"\n{job}, {workers} worker(s): start {starts:.1f} s; seconds of units: {units}", file=sys.stderr)
    print("rates:", {name: float(f"{rate:.3g}") for name, rate in plan["rates"].items()}, file=sys.stderr)
    phases = job_phases(seconds["phases"])
    simulated = job_phases(clock.phases)
    by_plan = {phase: sum(plan["phases"].get(part, 0.0) for part in PHASES[phase]) for phase in phases}
    rows = [
        _row(job, workers, phase, (by_plan[phase], simulated.get(phase, 0.0), floors.get(phase, 0.0)), spent)
        for phase, spent in phases.items()
    ]
    clock_seconds = clock.seconds - clock.start + by_plan.get("assemble", 0.0)
    totals = (sum(by_plan.values()), clock_seconds, sum(floors.values()))
    return [*rows, _row(job, workers, "all", totals, sum(phases.values()))]


def _row(job: str, workers: int, phase: str, expected: tuple[float, float, float], spent: float) -> list[object]:
    ratios = [f"{seconds / spent:.2f}" if spent and seconds else "" for seconds in expected]
    return [job, workers, phase, *(f"{seconds:.1f}" for seconds in (*expected, spent)), *ratios]


def _print(rows: Iterable[list[object]]) -> None:
    names = ("plan", "simulator", "floor")
    print_table(
        ["job", "workers", "phase", *(f"{n}, s" for n in (*names, "job")), *(f"{n} / job" for n in names)], rows
    )
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layers", type=int, help="layers of the model, for every job")
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    options.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    arguments = options.parse_args(argv)
    end_on_sigterm()
    totals: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="lamina-benchmark-") as scratch:
        for job in arguments.jobs:
            layers = arguments.layers or JOBS[job][2]
            base = Path(scratch, str(layers))
            if not base.exists():
                write_llama(base / "model", layers)
                (base / "text.txt").write_text(story_text(300_000, seed=1), encoding="utf-8")
            for workers in arguments.workers:
                rows = compared(base / f"{job}-{workers}", job, workers, arguments.samples)
                _print(rows)
                totals.append(rows[-1])
    print()
    _print(totals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
