"""Plan and simulator against real jobs on this machine, by one worker and by two.

    python -m tools.benchmarks.predictions [--layers N] [--samples 32] [--jobs dense compressed loss_aware]
        [--workers 1 2]

A random model of equal layers of 19.9 M parameters, as many as make start-up small; `flat_llm` under `propagate: dense`
and `compressed`, and `loss_aware`. Rates are those that `plan --probe` measures just before the job, with as many
workers. Prints the plan's seconds, start apart, the simulator's at the same rates, and the job's, by phase as each job
ends and in all at last. Needs an idle machine, and about 16 minutes.
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
from pipeline.cost_model.passes import gradient_tokens, pass_of
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import layer_work
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.registry import build_methods, claim_tasks
from tools.benchmarks.jobs import ROOT, end_on_sigterm, environment, print_table, run_manifest
from tools.benchmarks.memory_over_layers import write_model
from tools.simulator.job_units import job_units
from tools.simulator.simulator import Simulated, simulate

JOBS = {  # propagate, method, layers
    "dense": ("dense", "flat_llm", 12),
    "compressed": ("compressed", "flat_llm", 12),
    "loss_aware": ("dense", "loss_aware", 4),
}
ITEMSIZE = 2  # bfloat16
BEGUN = ("digests", "start")
STARTING = ("checks", "start")  # phases of the job that are the plan's start
PHASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of the job -> of the plan, kinds of simulated units
    "importance": (("importance",), ("importance",)),
    "statistics": (("statistics", "reduce"), ("statistics",)),
    "gradient": (("gradient",), ("gradient", "reduce")),
    "curves": (("curves",), ("curves",)),
    "compress": (("solve",), ("solve", "write")),
    "walk": (("statistics", "reduce", "solve", "propagate"), ("statistics", "solve", "propagate", "write")),
    "score": (("compare", "verify", "held-out"), ("compare", "verify", "held-out")),
    "assemble": (("assemble",), ()),
}


def manifest_of(folder: Path, job: str, workers: int, samples: int) -> dict[str, Any]:
    """A job in `folder`, whose parent holds the model and the text."""
    propagate, method, _ = JOBS[job]
    return {
        "version": 1,
        "model": {"source": str(folder.parent / "model")},
        "output": str(folder / "output"),
        "run_dir": str(folder / "run"),
        "budget": {"keep": 0.8},
        "calibration": {
            "text": {"files": [str(folder.parent / "text.txt")]},
            "samples": samples,
            "sequence_length": 256,
            "shards": 8,
            "propagate": propagate,
        },
        "methods": [{"method": method}],
        "workers": {"min": workers, "max": workers},
    }


def planned(path: Path) -> dict[str, Any]:
    """What `plan --probe` says. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pipeline.plan", str(path), "--probe", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def simulated(document: Mapping[str, Any], plan: Mapping[str, Any]) -> Simulated:
    """At the plan's rates."""
    manifest = parse_manifest(dict(document))
    config = json.loads((Path(manifest.model.source) / "config.json").read_text())
    geometry = geometry_of(standard_config(config))
    tasks = claim_tasks(build_methods(manifest), geometry)
    tokens = gradient_tokens(manifest, geometry, tasks)
    kept = plan["expected_numbers"] / plan["dense_numbers"]
    work = layer_work(manifest, geometry, tasks, ITEMSIZE, tokens, kept)
    way = pass_of(manifest, geometry, tasks)
    return simulate(list(job_units(work, Rates(**plan["rates"]), way)), way.workers)


def by_phase(
    plan: Mapping[str, float], clock: Simulated, measured: Mapping[str, float]
) -> dict[str, tuple[float, float, float]]:
    """The job's phases in their order: seconds by the plan, by the simulator, and measured; what starts it is left
    out."""
    found: dict[str, tuple[float, float, float]] = {}
    before = clock.transfers["start"]
    for name, seconds in measured.items():
        phase = "score" if name.startswith("score") or name == "verify" else name
        if phase in STARTING:
            continue
        if phase in found:
            said, played, taken = found[phase]
            found[phase] = said, played, taken + seconds
            continue
        planned, kinds = PHASES[phase]
        ended = max((clock.ended[kind] for kind in kinds if kind in clock.ended), default=before)
        found[phase] = sum(plan.get(part, 0.0) for part in planned), max(0.0, ended - before), seconds
        before = max(before, ended)
    return found


def compared(folder: Path, job: str, workers: int, samples: int) -> list[list[object]]:
    """Runs the job; a row for each of its phases, and one for all."""
    folder.mkdir()
    document = manifest_of(folder, job, workers, samples)
    (folder / "manifest.json").write_text(json.dumps(document))
    plan = planned(folder / "manifest.json")
    clock = simulated(document, plan)
    seconds = run_manifest(document, folder)["seconds"]
    phases = by_phase(plan["phases"], clock, seconds["phases"])
    said, taken = (sum(each[place] for each in phases.values()) for place in (0, 2))
    rows = [_row(job, workers, name, *figures) for name, figures in phases.items()]
    units = ", ".join(f"{kind} {count} × {spent / count:.3f}" for kind, (count, spent, _) in seconds["units"].items())
    starts = sum(seconds["phases"].get(name, 0.0) for name in STARTING)
    print(f"\n{job}, {workers} worker(s): start {starts:.1f} s; seconds of units: {units}", file=sys.stderr)
    print("rates:", {name: float(f"{rate:.3g}") for name, rate in plan["rates"].items()}, file=sys.stderr)
    played = clock.seconds - clock.transfers["start"] + phases["assemble"][0]
    return [*rows, _row(job, workers, "all", said, played, taken)]


def _row(job: str, workers: int, phase: str, said: float, played: float, taken: float) -> list[object]:
    ratios = [f"{figure / taken:.2f}" if taken else "" for figure in (said, played)]
    return [job, workers, phase, *(f"{figure:.1f}" for figure in (said, played, taken)), *ratios]


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layers", type=int, help="of every job's model")
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    options.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    arguments = options.parse_args(argv)
    end_on_sigterm()
    totals: list[list[object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for job in arguments.jobs:
            layers = arguments.layers or JOBS[job][2]
            base = Path(scratch, str(layers))
            if not base.exists():
                write_model(base / "model", layers)
                (base / "text.txt").write_text(story_text(300_000, seed=1), encoding="utf-8")
            for workers in arguments.workers:
                rows = compared(base / f"{job}-{workers}", job, workers, arguments.samples)
                _print(rows)
                totals.append(rows[-1])
    print()
    _print(totals)
    return 0


def _print(rows: Iterable[list[object]]) -> None:
    titles = ["job", "workers", "phase", "plan, s", "simulator, s", "job, s", "plan / job", "simulator / job"]
    print_table(titles, rows)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
