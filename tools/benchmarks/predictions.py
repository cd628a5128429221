"""Plan and simulator against real jobs on this machine, by one worker and by two.

    python -m tools.benchmarks.predictions [--layers 24] [--samples 32] [--jobs dense compressed loss_aware]
        [--workers 1 2]

A random model of equal layers of 19.9 M parameters; `flat_llm` under `propagate: dense` and `compressed`, and
`loss_aware`. Rates are those that `plan --probe` measures just before the job, with as many workers. Prints the plan's
seconds, start apart, the simulator's at the same rates, the job's, and a table by phase; needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.quickstart.text import story_text
from manifests.loading import parse_manifest
from pipeline.families.registry import geometry_of, standard_config
from pipeline.job.planning import gradient_tokens, pass_of
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.plan.rates import Rates
from pipeline.plan.simulator import job_units, simulate
from pipeline.plan.work import layer_work
from tools.benchmarks.jobs import ROOT, end_on_sigterm, environment, print_table, run_manifest
from tools.benchmarks.memory_over_layers import write_model

JOBS = {
    "dense": ("dense", "flat_llm"),
    "compressed": ("compressed", "flat_llm"),
    "loss_aware": ("dense", "loss_aware"),
}
ITEMSIZE = 2  # bfloat16
BEGUN = ("digests", "start")
STARTING = ("checks", "start")  # phases of the job that are the plan's start


def manifest_of(folder: Path, job: str, workers: int, samples: int) -> dict[str, Any]:
    """A job in `folder`, whose parent holds the model and the text."""
    propagate, method = JOBS[job]
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


def simulated(document: Mapping[str, Any], plan: Mapping[str, Any]) -> float:
    """Seconds without the start, at the plan's rates."""
    manifest = parse_manifest(dict(document))
    config = json.loads((Path(manifest.model.source) / "config.json").read_text())
    geometry = geometry_of(standard_config(config))
    tasks = claim_tasks(build_methods(manifest), geometry)
    tokens = gradient_tokens(manifest, geometry, tasks)
    kept = plan["expected_numbers"] / plan["dense_numbers"]
    work = layer_work(manifest, geometry, tasks, ITEMSIZE, tokens, kept)
    way = pass_of(manifest, geometry.num_layers, tokens)
    rates = Rates(**plan["rates"])
    begun = sum(plan["phases"][name] for name in BEGUN)
    return simulate(list(job_units(work, rates, way)), way.workers).seconds - begun


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    options.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    arguments = options.parse_args(argv)
    end_on_sigterm()
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        write_model(base / "model", arguments.layers)
        (base / "text.txt").write_text(story_text(300_000, seed=1), encoding="utf-8")
        for job in arguments.jobs:
            for workers in arguments.workers:
                folder = base / f"{job}-{workers}"
                folder.mkdir()
                document = manifest_of(folder, job, workers, arguments.samples)
                (folder / "manifest.json").write_text(json.dumps(document))
                plan = planned(folder / "manifest.json")
                clock = simulated(document, plan)
                seconds = run_manifest(document, folder)["seconds"]
                measured = sum(amount for name, amount in seconds["phases"].items() if name not in STARTING)
                said = plan["estimated_seconds"] - sum(plan["phases"][name] for name in BEGUN)
                rows.append([
                    job, workers, f"{said:.1f}", f"{clock:.1f}", f"{measured:.1f}", f"{said / measured:.2f}",
                    f"{clock / measured:.2f}",
                ])  # fmt: skip
                notes += list(_details(job, workers, plan, seconds))
                print(*notes[-2:], sep="\n", file=sys.stderr)
    print_table(["job", "workers", "plan, s", "simulator, s", "job, s", "plan / job", "simulator / job"], rows)
    print("", *notes, sep="\n")
    return 0


def _details(job: str, workers: int, plan: Mapping[str, Any], seconds: Mapping[str, Any]) -> Iterator[str]:
    yield f"{job}, {workers}: planned {_phases(plan['phases'])}"
    units = {name: figures[1] for name, figures in seconds["units"].items()}
    yield f"{job}, {workers}: measured {_phases(seconds['phases'])}; by units {_phases(units)}"


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:.1f}" for name, amount in seconds.items() if amount >= 0.05)


if __name__ == "__main__":
    sys.exit(main())
