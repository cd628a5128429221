"""`python -m pipeline.sweep SWEEP`: many methods and sizes from one calibration. docs/sweep.md."""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals, interrupt_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import json
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any, TextIO

from manifests.importing import quick_imports
from manifests.sweep import Sweep, SweepPoint
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
    points: tuple[SweepPoint, ...],
    *,
    fresh: bool,
    address: str | None,
    stop: threading.Event,
    show: Callable[[dict[str, Any]], None],
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    in_process: bool = False,
) -> dict[str, Any]:
    """Compute the missing points of a sweep and write sweep.json, .csv and .html to its run directory.

    Return the results. `show` is called with them before they are written, and they are written even if it fails.

    Raises:
        InputError: an input is wrong (exit 2); raised before any expensive work.
        Interrupted: `stop` was set; the sweep can be resumed (exit 75).
        LaminaError: a point failed; the sweep can be resumed after a fix (exit 1).
    """
    if in_process:
        check_in_process(address, sweep.workers.max)
    prepare_process()  # for callers from Python
    with quick_imports():
        from pipeline.job.run_record import recorded  # slow imports, only after the arguments are checked
        from pipeline.job.stages import heartbeat, join_cluster
        from pipeline.sweeping.point_healing import heal_points
        from pipeline.sweeping.point_solving import solve_points
        from pipeline.sweeping.results import sweep_results, write_results
        from pipeline.sweeping.sweep_context import open_sweep

    with open_sweep(sweep, points, fresh=fresh, stop=stop, in_process=in_process) as opened:
        job = opened.job
        if not all(map(opened.is_done, opened.points)):
            with job.observer, recorded(job), heartbeat(job) as beats:
                for remark, labels in opened.remarks().items():
                    job.observer.say(f"{', '.join(labels)}: {remark}", logging.WARNING)
                for line in job.left_out():
                    job.observer.say(line)
                join_cluster(job, address, connect_timeout_s)
                opened = opened.begin()
                solve_points(opened, beats)
                heal_points(opened, beats)
        results = sweep_results(opened)
        try:
            show(results)
        finally:
            write_results(job.run_dir.storage, results)
        return results


def write_plots(folder: Storage, results: dict[str, Any]) -> None:
    """Write every plot as an SVG file, `LOSS-SIZE.svg`. Raises StorageError."""
    from pipeline.sweeping.plots import sweep_plots

    for name, plot in sweep_plots(results).items():
        folder.replace(f"{name}.svg", plot.svg.encode())


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("sweep", "Compares methods at several sizes from one calibration. Run again, it resumes.")
    add_manifest(options, "the YAML file of the sweep")
    options.add_argument("--fresh", action="store_true", help="start over and discard the run directory")
    options.add_argument("--plots", metavar="DIR", help="also write each plot there, as an SVG file")
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
    with redirect_stdout(sys.stderr):  # Ray prints messages of its nodes, which must not mix with JSON
        results = run_sweep(
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
        write_plots(plots, results)
    return 0


def _show(results: dict[str, Any], as_json: bool, out: TextIO) -> None:
    if as_json:
        print(json.dumps(results), file=out, flush=True)
        return
    from rich.console import Console

    from pipeline.sweeping.results import print_results

    print_results(results, Console(file=out))
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
