"""`python -m pipeline.run MANIFEST`: runs a job, from a manifest to an evaluated checkpoint.

docs/architecture.md#the-way-of-a-layer.
"""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals, interrupt_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import json
import sys
import threading
from contextlib import redirect_stdout
from typing import Any

from manifests.importing import quick_imports
from manifests.schema import Manifest
from pipeline.console.arguments import (
    CONNECT_TIMEOUT_S,
    add_address,
    add_in_process,
    add_manifest,
    check_in_process,
    parser,
    read_manifest,
    run_command,
)


def run_job(
    manifest: Manifest,
    *,
    fresh: bool,
    address: str | None,
    stop: threading.Event,
    quiet: bool = False,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    in_process: bool = False,
) -> dict[str, Any]:
    """Run a job to its end, or resume an interrupted one. Return the summary.

    Raises:
        InputError: an input is wrong (exit 2); raised before any expensive work.
        Interrupted: `stop` was set; the job can be resumed (exit 75).
        LaminaError: the job failed; it can be resumed after a fix (exit 1).
    """
    if in_process:
        check_in_process(address, manifest.workers.max)
    prepare_process()  # for callers from Python
    with quick_imports():
        from pipeline.job import stages  # slow imports, only after the arguments are checked

    with stages.open_job(manifest, fresh=fresh, stop=stop, quiet=quiet, in_process=in_process) as job:
        return stages.run_to_end(job, address, connect_timeout_s)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("run", "Compresses a model by a manifest. Run again, it resumes.")
    add_manifest(options)
    options.add_argument("--fresh", action="store_true", help="start over and discard the run directory")
    add_address(options)
    add_in_process(options)
    options.add_argument("--json", action="store_true", help="print the summary as JSON")
    return run_command(_body, options.parse_args(argv))


def _body(arguments: Any) -> int:
    stop = threading.Event()
    interrupt_on_signals(stop)
    manifest = read_manifest(arguments)
    with redirect_stdout(sys.stderr):  # Ray prints messages of its nodes, which must not mix with JSON
        summary = run_job(
            manifest,
            fresh=arguments.fresh,
            address=arguments.address,
            stop=stop,
            connect_timeout_s=arguments.connect_timeout,
            in_process=arguments.in_process,
        )
    if arguments.json:
        print(json.dumps(summary))
    else:
        from pipeline.reporting.summary import print_summary

        print_summary(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
