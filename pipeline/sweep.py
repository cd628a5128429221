"""`python -m pipeline.sweep SWEEP`: many methods and sizes from one calibration. docs/sweep.md."""

from __future__ import annotations

from pipeline.console.signals import exit_on_signals, interrupt_on_signals

if __name__ == "__main__":
    exit_on_signals()  # what follows takes seconds

import json
import logging
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from manifests.errors import InputError
from manifests.importing import quick_imports
from manifests.sweep import Point, Sweep
from pipeline.console.arguments import (
    CONNECT_TIMEOUT_S,
    add_address,
    add_in_process,
    add_manifest,
    check_in_process,
    parser,
    read_sweep,
    run_command,
)
from stores.storage import open_storage


def run_sweep(
    sweep: Sweep,
    points: tuple[Point, ...],
    *,
    fresh: bool,
    address: str | None,
    stop: threading.Event,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    in_process: bool = False,
) -> dict[str, Any]:
    """Does what is missing of a sweep, and writes sweep.json, .csv and .html to its run directory. Returns the results.

    Raises:
        InputError: something given is wrong (exit 2); found before anything expensive.
        Interrupted: `stop` was set; resumable (exit 75).
        LaminaError: a point failed; resumable after a fix (exit 1).
    """
    if in_process:
        check_in_process(address, sweep.workers.max)
    with quick_imports():
        from pipeline.job import stages  # takes seconds, which --help and a wrong sweep need not
        from pipeline.sweeping.context import open_sweep
        from pipeline.sweeping.results import results, write_results
        from pipeline.sweeping.solving import solve_points

    with open_sweep(sweep, points, fresh=fresh, stop=stop, quiet=False, in_process=in_process) as opened:
        job = opened.job
        if not all(map(opened.is_done, opened.points)):
            with job.observer, stages.recorded(job), stages.heartbeat(job) as heartbeat:
                for remark, labels in opened.remarks().items():
                    job.observer.say(f"{', '.join(labels)}: {remark}", logging.WARNING)
                stages.join_cluster(job, address, connect_timeout_s)
                solve_points(opened, heartbeat)
        found = results(opened)
        write_results(job.run_dir.storage, found)
        return found


def write_plots(folder: Path, found: dict[str, Any]) -> None:
    """Every plot as an SVG file, `LOSS-SIZE.svg`. Raises InputError when there is no such folder."""
    from pipeline.sweeping.figures import sweep_plots
    from pipeline.sweeping.page import standalone

    if not folder.is_dir():
        raise InputError(f"--plots {folder}: no such folder; make it, or give another")
    storage = open_storage(folder)
    for name, plot in sweep_plots(found).items():
        storage.replace(f"{name}.svg", standalone(plot).encode())


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = parser("sweep", "Compares methods at several sizes from one calibration; run again, it goes on.")
    add_manifest(options, "what is compared")
    options.add_argument("--fresh", action="store_true", help="start over, whatever the run directory holds")
    options.add_argument("--plots", type=Path, metavar="DIR", help="write each plot there as an SVG file, besides")
    add_address(options)
    add_in_process(options)
    options.add_argument("--json", action="store_true", help="print the results as JSON")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    stop = threading.Event()
    interrupt_on_signals(stop)
    sweep, points = read_sweep(arguments)
    with redirect_stdout(sys.stderr):  # Ray prints what its nodes say, which is no JSON
        found = run_sweep(
            sweep,
            points,
            fresh=arguments.fresh,
            address=arguments.address,
            stop=stop,
            connect_timeout_s=arguments.connect_timeout,
            in_process=arguments.in_process,
        )
    if arguments.plots:
        write_plots(arguments.plots, found)
    if arguments.json:
        print(json.dumps(found))
    else:
        from pipeline.sweeping.results import print_results

        print_results(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
