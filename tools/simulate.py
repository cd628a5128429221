"""`python -m tools.simulate`: what jobs on large models would take, on the clock of `pipeline.plan.simulator`.

docs/plan.md holds the arithmetic; its tables of predictions are what this prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from manifests.loading import parse_manifest
from pipeline.families.family import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.registry import build_methods, claim_tasks, layer_gradients
from pipeline.plan.job_units import job_units
from pipeline.plan.phases import Pass, phase_seconds
from pipeline.plan.rates import Rates, rates_of
from pipeline.plan.simulator import Failure, Simulated, simulate
from pipeline.plan.work import LayerWork, layer_work
from pipeline.samples import gradient_samples, held_out_windows, importance_shards

LLAMA = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8},
}  # fmt: skip
ITEMSIZE = 2  # bfloat16
SHARDS, LENGTH = 256, 4096  # a sample each


def geometry(model: str) -> Geometry:
    """Of a Llama model of this size."""
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **LLAMA[model]}
    return geometry_of(standard_config(config))


def work_of(model: str, propagate: str, **entry: str) -> LayerWork:
    """A layer's work in a job of 256 × 4096 tokens by one method, `flat_llm` if none is given, at keep 0.8."""
    calibration = {"text": {"files": ["text.txt"]}, "samples": 256, "sequence_length": LENGTH, "shards": SHARDS}
    manifest = parse_manifest({
        "version": 1, "model": {"source": "model"}, "output": "output", "run_dir": "run", "budget": {"keep": 0.8},
        "calibration": {**calibration, "propagate": propagate}, "methods": [{"method": "flat_llm", **entry}],
    })  # fmt: skip
    shape = geometry(model)
    tasks = claim_tasks(build_methods(manifest), shape)
    samples = gradient_samples(None, SHARDS, LENGTH, shape.hidden) if layer_gradients(tasks, 0) else 0
    return layer_work(manifest, shape, tasks, ITEMSIZE, samples * LENGTH, kept=0.8)


def predict(
    model: str,
    propagate: str,
    workers: int,
    rates: Rates,
    cached: bool = False,
    gone_at: Sequence[float] = (),
    **entry: str,
) -> tuple[Simulated, dict[str, float]]:
    """On the simulator's clock, and by the plan's closed form. `gone_at`: seconds at which one worker after another is
    gone, each replaced as soon as one has started."""
    compressed, shape = propagate == "compressed", geometry(model)
    gradients, held_out = gradient_samples(None, SHARDS, LENGTH, shape.hidden), held_out_windows(SHARDS, SHARDS, LENGTH)
    importance = len(importance_shards(SHARDS, SHARDS, LENGTH)) if compressed else 0
    way = Pass(shape.num_layers, SHARDS, workers, importance, compressed, False, cached, gradients, held_out)
    work = work_of(model, propagate, **entry)
    failures = [Failure(at, number % workers) for number, at in enumerate(gone_at)]
    return simulate(list(job_units(work, rates, way)), workers, failures), phase_seconds(work, rates, way)


def rows(rates: Rates, gone_at: Sequence[float] = ()) -> Iterator[str]:
    """The table of predictions."""
    yield "| model | propagate | read again from | GPUs | minutes | in closed form | idle share |"
    yield "|---|---|---|---|---|---|---|"
    for model, propagate, workers, cached in (
        ("70B", "dense", 1, False), ("70B", "dense", 8, False), ("70B", "dense", 1, True), ("70B", "dense", 8, True),
        ("70B", "dense", 64, True), ("70B", "compressed", 1, True), ("70B", "compressed", 8, True),
        ("405B", "dense", 8, False), ("405B", "dense", 8, True),
    ):  # fmt: skip
        found, phases = predict(model, propagate, workers, rates, cached, gone_at)
        place = "memory" if cached else "disk"
        yield f"| {model} | {propagate} | {place} | {workers} | {_figures(found, phases)} |"


def loss_rows(rates: Rates, gone_at: Sequence[float] = ()) -> Iterator[str]:
    """The same of jobs that follow the loss, 70B, dense statistics, and where their workers' minutes go."""
    kinds = ("statistics", "gradient", "reduce", "curves", "solve", "correct", "held-out")
    yield f"| `loss_aware` | GPUs | minutes | in closed form | idle share | {' | '.join(kinds)} |"
    yield f"|---|---|---|---|---|{'---|' * len(kinds)}"
    for entry, workers in ((entry, workers) for entry in ({}, {"correct": "output"}) for workers in (1, 8)):
        found, phases = predict("70B", "dense", workers, rates, True, gone_at, method="loss_aware", **entry)
        named = ", ".join(f"`{name}: {value}`" for name, value in entry.items()) or "as it is"
        spent = " | ".join(f"{found.busy.get(kind, 0.0) / 60 / workers:.1f}" for kind in kinds)
        yield f"| {named} | {workers} | {_figures(found, phases)} | {spent} |"


def _figures(found: Simulated, phases: dict[str, float]) -> str:
    begun = phases["digests"] + phases["start"]
    return f"{(found.seconds - begun) / 60:.1f} | {(sum(phases.values()) - begun) / 60:.1f} | {found.idle_share:.0%}"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(prog="python -m tools.simulate", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--gpu", default="H200", help="whose rates (pipeline/plan/rates.py)")
    options.add_argument(
        "--fail", type=float, nargs="+", default=(), metavar="SECONDS", help="when one worker after another is gone"
    )
    arguments = options.parse_args(argv)
    rates = rates_of(arguments.gpu)
    for row in (*rows(rates, arguments.fail), "", *loss_rows(rates, arguments.fail)):
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
