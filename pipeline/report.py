"""`python -m pipeline.report RUN_DIR`: writes one HTML file about a job in any state.

docs/formats.md#run_dir.
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
from typing import Any

from pipeline.console.arguments import parser, run_command
from pipeline.console.paths import prepare_file
from pipeline.console.printing import say
from stores.run_directory import REPORT, run_of_job


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("report", "Writes one HTML file about a job in any state: ranks, errors, memory, time.")
    options.add_argument("run_dir", help="the run directory of the job")
    options.add_argument("--output", help="the file to write; default: report.html in RUN_DIR")
    options.add_argument(
        "--json", action="store_true", help="print the path of the file and the state of the job as JSON"
    )
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    run_dir = run_of_job(arguments.run_dir)
    storage, name = prepare_file("--output", arguments.output) if arguments.output else (run_dir.storage, REPORT)
    from pipeline.reporting.page import render  # slow imports, only for the run directory of a job
    from pipeline.reporting.run_data import read_run

    run = read_run(run_dir)
    path, content = storage.at(name), render(run).encode()
    storage.replace(name, content)
    if arguments.json:
        print(json.dumps({"report": path, "bytes": len(content), "state": run.state}))
    else:
        say(f"report: {path} ({run.state})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
