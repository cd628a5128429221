"""`python -m tools.simulate`: what jobs on large models would take, on the clock of `pipeline.plan.simulator`.

docs/plan.md holds the arithmetic; its table of predictions is what this prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from manifests.loading import parse_manifest
from pipeline.families.family import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.plan.phases import START_SECONDS, Pass, phase_seconds
from pipeline.plan.rates import Rates, rates_of
from pipeline.plan.simulator import Simulated, job_units, simulate
from pipeline.plan.work import LayerWork, layer_work

LLAMA = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8},
}  # fmt: skip
ITEMSIZE = 2  # bfloat16
SHARDS = 256


def geometry(model: str) -> Geometry:
    """Of a Llama model of this size."""
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **LLAMA[model]}
    return geometry_of(standard_config(config))


def work_of(model: str, propagate: str) -> LayerWork:
    """A layer's work in a job of 256 × 4096 tokens by `flat_llm` at keep 0.8."""
    calibration = {"text": {"files": ["text.txt"]}, "samples": 256, "sequence_length": 4096, "shards": SHARDS}
    manifest = parse_manifest({
        "version": 1, "model": {"source": "model"}, "output": "output", "run_dir": "run", "budget": {"keep": 0.8},
        "calibration": {**calibration, "propagate": propagate}, "methods": [{"method": "flat_llm"}],
    })  # fmt: skip
    shape = geometry(model)
    return layer_work(manifest, shape, claim_tasks(build_methods(manifest), shape), ITEMSIZE, kept=0.8)


def predict(
    model: str, propagate: str, workers: int, rates: Rates, cached: bool = False, beside: bool = True
) -> tuple[Simulated, dict[str, float]]:
    """On the simulator's clock, and by the plan's closed form."""
    compressed = propagate == "compressed"
    way = Pass(geometry(model).num_layers, SHARDS, workers, compressed, compressed, cached=cached, beside=beside)
    work = work_of(model, propagate)
    return simulate(list(job_units(work, rates, way)), workers), phase_seconds(work, rates, way)


def rows(rates: Rates) -> Iterator[str]:
    """The table of predictions."""
    yield "| model | propagate | moments solved from | GPUs | minutes beside | in closed form | idle share | as built |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, propagate, workers, cached in (
        ("70B", "dense", 1, False), ("70B", "dense", 8, False), ("70B", "dense", 8, True), ("70B", "dense", 64, True),
        ("70B", "compressed", 1, True), ("70B", "compressed", 8, True), ("405B", "dense", 8, False),
        ("405B", "dense", 8, True),
    ):  # fmt: skip
        found, phases = predict(model, propagate, workers, rates, cached)
        place = "the device" if propagate == "compressed" else "memory" if cached else "disk"
        after_start = (found.seconds - START_SECONDS) / 60
        planned = (sum(phases.values()) - phases["held-out"] - START_SECONDS) / 60  # the simulator leaves it out
        built, _ = predict(model, propagate, workers, rates, cached, beside=False)
        as_built = (built.seconds - START_SECONDS) / 60
        figures = f"{after_start:.1f} | {planned:.1f} | {found.idle_share:.0%} | {as_built:.1f}"
        yield f"| {model} | {propagate} | {place} | {workers} | {figures} |"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(prog="python -m tools.simulate", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--gpu", default="H200", help="whose rates (pipeline/plan/rates.py)")
    for row in rows(rates_of(options.parse_args(argv).gpu)):
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
