"""`python -m pipeline.plan MANIFEST`: what the job would do. Reads headers and configs, no weights."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.console.arguments import add_manifest, parser, read_manifest, run_command

if TYPE_CHECKING:
    import torch


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = parser("plan", "Says what a job would read, hold, write and compute; computes nothing on the model.")
    add_manifest(options)
    options.add_argument(
        "--tflops", type=float, help="of one worker, for the estimated time; default: this machine, measured"
    )
    options.add_argument("--json", action="store_true", help="print the plan as JSON")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    manifest = read_manifest(arguments)
    from pipeline.job.inputs import read_inputs  # takes seconds, which --help and a wrong manifest need not
    from pipeline.plan.estimate import make_plan

    inputs = read_inputs(manifest, weights=False)
    plan = make_plan(manifest, inputs.geometry, inputs.tasks, inputs.dtype.itemsize, inputs.source_bytes).report()
    rate = arguments.tflops or measured_tflops(inputs.dtype, manifest.workers.cpus)
    flops = plan["forward_flops"] + plan["moment_flops"] + plan["solve_flops"]
    plan |= {"tflops_per_worker": rate, "estimated_seconds": flops / (rate * 1e12 * plan["workers"])}
    plan["remarks"] = list(inputs.remarks)
    if arguments.json:
        print(json.dumps(plan))
    else:
        _print(plan)
    return 0


def measured_tflops(dtype: torch.dtype, threads: int, size: int = 512) -> float:
    """10¹² floating-point operations a second in a square product on this machine's CPU."""
    import torch

    torch.set_num_threads(threads)
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    left @ right
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < 0.2:
        left @ right
        products += 1
    return products * 2 * size**3 / (time.perf_counter() - started) / 1e12


def _print(plan: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="plan", show_header=False)
    for name, value in plan.items():
        if name == "remarks":
            continue
        if name.endswith("_bytes") or name.endswith("bytes_per_layer"):
            shown = f"{value:,} ({value / 2**30:.3f} GiB)"
        elif name.endswith("_flops"):
            shown = f"{value:.3e}"
        else:
            shown = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
    for remark in plan["remarks"]:
        print(remark)


if __name__ == "__main__":
    sys.exit(main())
