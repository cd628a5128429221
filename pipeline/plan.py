"""`python -m pipeline.plan MANIFEST`: the cost of a job or of a sweep. Reads headers and configs, no weights.

For a model in place of a manifest, it prints the family; for an unknown model, the most similar blocks of known
families.
"""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import InputError
from manifests.loading import read_document
from pipeline.console.amounts import duration
from pipeline.console.arguments import add_address, add_manifest, parser, read_manifest, read_sweep, run_command
from pipeline.console.printing import say

if TYPE_CHECKING:
    from pipeline.job.plan_report import RateSource

NOT_IN_TABLE = (
    "engines", "serving", "fits", "limits", "remarks", "rates", "phases", "points", "estimated_seconds", "read_phases",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser(
        "plan",
        "Estimates memory, disk and time of a job or a sweep, without reading weights.",
    )
    add_manifest(options, "the YAML file of a job or a sweep; or a model, to see whether it is supported")
    options.add_argument("--config", type=Path, metavar="FILE", help="plan for this config.json instead of the source")
    rates = options.add_mutually_exclusive_group()
    rates.add_argument("--gpu", help="a GPU with known rates, such as H200; default: measure this machine")
    rates.add_argument("--tflops", type=float, help="TFLOPS of one worker, for all products")
    rates.add_argument("--probe", action="store_true", help="measure a worker on the cluster, or on a local Ray")
    add_address(options)
    options.add_argument("--json", action="store_true", help="print the plan as JSON")
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    if _is_model(arguments.manifest):
        return _show_model(arguments.manifest)
    if "points" in read_document(arguments.manifest):
        plan = _sweep_plan(arguments)
    else:
        manifest = read_manifest(arguments)
        from pipeline.job.plan_report import plan_report  # slow import, only after the manifest is checked

        plan = plan_report(manifest, arguments.config, _rate_source(arguments))
    if arguments.json:
        print(json.dumps(plan))
    else:
        _print(plan)
    return 0


def _is_model(place: str) -> bool:
    """Tell a directory, an address or a hub id from the path of a manifest."""
    if Path(place).suffix in (".yaml", ".yml") or Path(place).is_file():
        return False
    return Path(place).is_dir() or "/" in place


def _show_model(model: str) -> int:
    """Print a description of a model. Raises InputError, also with a description, for an unknown family."""
    from pipeline.inputs.sources import describe_model  # slow import

    say(describe_model(model))
    say(f"A manifest for it: python -m pipeline.init {model} --text FILE")
    return 0


def _sweep_plan(arguments: Any) -> dict[str, Any]:
    if arguments.config is not None:
        raise InputError("--config: a sweep's points are checked against the model's headers; give the model")
    sweep, points = read_sweep(arguments)
    from pipeline.sweeping.sweep_plan import sweep_report

    return sweep_report(sweep, points, _rate_source(arguments))


def _rate_source(arguments: Any) -> RateSource:
    from pipeline.job.plan_report import RateSource

    return RateSource(arguments.gpu, arguments.tflops, arguments.probe, arguments.address, arguments.connect_timeout)


def _print(plan: Mapping[str, Any]) -> None:
    """Print the verdict, the time, then tables."""
    from rich.console import Console
    from rich.table import Table

    for line in verdict_lines(plan):
        say(line)
    table = Table(title="plan", show_header=False)
    for phase, seconds in plan["phases"].items():
        table.add_row(f"time, {phase}", duration(seconds))
    for phase, amount in plan["read_phases"].items():
        table.add_row(f"read, {phase}", _shown("read_bytes", amount))
    for name, value in plan.items():
        if name not in NOT_IN_TABLE:
            table.add_row(name.replace("_", " "), _shown(name, value))
    Console().print(table)
    if "points" in plan:
        _print_points(plan["points"])
    for line in plan.get("engines", ()):
        say(line)
    for remark in plan["remarks"]:
        if remark not in plan["limits"]:
            say(remark)


def verdict_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the exceeded limits, or that the job fits; then its time and its longest phases."""
    from pipeline.job.plan_report import serving_line, time_line

    yield from plan["limits"] or ["fits, as far as this machine can tell"]
    yield f"{'takes' if plan['fits'] else 'would take'} {time_line(plan)}"
    if serving := plan.get("serving"):
        yield f"serves in {serving_line(serving)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value or "exact"
    if name.endswith("_bytes") or name.endswith("bytes_per_layer"):
        return f"{value:,} ({value / 2**30:.3f} GiB)"
    if name.endswith("_flops"):
        return f"{value:.3e}"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _print_points(points: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="points")
    table.add_column("point")
    for name in ("numbers kept", "time", "output bytes"):
        table.add_column(name, justify="right")
    for row in points:
        table.add_row(row["point"], f"{row['numbers_kept']:.1%}", duration(row["seconds"]), f"{row['output_bytes']:,}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
