"""`python -m pipeline.sweep SWEEP`: many methods and sizes from one calibration. docs/sweep.md."""

from __future__ import annotations

from pipeline.console.signals import exit_on_signals, interrupt_on_signals

if __name__ == "__main__":
    exit_on_signals()  # what follows takes seconds

import json
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any, TextIO

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
from pipeline.console.paths import prepare_folder
from stores.storage import Storage


def run_sweep(
    sweep: Sweep,
    points: tuple[Point, ...],
    *,
    fresh: bool,
    address: str | None,
    stop: threading.Event,
    show: Callable[[dict[str, Any]], None],
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    in_process: bool = False,
) -> dict[str, Any]:
    """Does what is missing of a sweep, and writes sweep.json, .csv and .html to its run directory. Returns the results.

    `show` gets them first: whatever then fails of writing, they are seen; and whatever fails of showing, written.

    Raises:
        InputError: something given is wrong (exit 2); found before anything expensive.
        Interrupted: `stop` was set; resumable (exit 75).
        LaminaError: a point failed; resumable after a fix (exit 1).
    """
    if in_process:
        check_in_process(address, sweep.workers.max)
    with quick_imports():
        from pipeline.job import stages  # takes seconds, which --help and a wrong sweep need not
        from pipeline.sweeping.results import results, write_results
        from pipeline.sweeping.solving import solve_points
        from pipeline.sweeping.sweep_context import open_sweep

    with open_sweep(sweep, points, fresh=fresh, stop=stop, quiet=False, in_process=in_process) as opened:
        job = opened.job
        if not all(map(opened.is_done, opened.points)):
            with job.observer, stages.recorded(job), stages.heartbeat(job) as heartbeat:
                for remark, labels in opened.remarks().items():
                    job.observer.say(f"{', '.join(labels)}: {remark}", logging.WARNING)
                stages.join_cluster(job, address, connect_timeout_s)
                opened = opened.begin()
                solve_points(opened, heartbeat)
        found = results(opened)
        try:
            show(found)
        finally:
            write_results(job.run_dir.storage, found)
        return found


def write_plots(folder: Storage, found: dict[str, Any]) -> None:
    """Every plot as an SVG file, `LOSS-SIZE.svg`. Raises StorageError."""
    from pipeline.sweeping.plots import sweep_plots
    from pipeline.sweeping.sweep_page import standalone

    for name, plot in sweep_plots(found).items():
        folder.replace(f"{name}.svg", standalone(plot).encode())


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = parser("sweep", "Compares methods at several sizes from one calibration; run again, it goes on.")
    add_manifest(options, "what is compared")
    options.add_argument("--fresh", action="store_true", help="start over, whatever the run directory holds")
    options.add_argument("--plots", metavar="DIR", help="write each plot there as an SVG file, besides")
    add_address(options)
    add_in_process(options)
    options.add_argument("--json", action="store_true", help="print the results as JSON")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    stop = threading.Event()
    interrupt_on_signals(stop)
    sweep, points = read_sweep(arguments)
    plots = prepare_folder("--plots", arguments.plots) if arguments.plots else None
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # Ray prints what its nodes say, which is no JSON
        found = run_sweep(
            sweep,
            points,
            fresh=arguments.fresh,
            address=arguments.address,
            stop=stop,
            show=partial(_show, as_json=arguments.json, out=out),
            connect_timeout_s=arguments.connect_timeout,
            in_process=arguments.in_process,
        )
    if plots is not None:
        write_plots(plots, found)
    return 0


def _show(found: dict[str, Any], as_json: bool, out: TextIO) -> None:
    if as_json:
        print(json.dumps(found), file=out, flush=True)
        return
    from rich.console import Console

    from pipeline.sweeping.results import print_results

    print_results(found, Console(file=out))
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
