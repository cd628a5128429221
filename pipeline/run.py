"""`python -m pipeline.run MANIFEST`: runs a job, from a manifest to an evaluated checkpoint.

docs/architecture.md#the-way-of-a-layer.
"""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import sys
from typing import Any

from pipeline.console.arguments import add_address, add_in_process, add_manifest, parser, read_manifest, run_command
from pipeline.job.running import run_and_print, run_job

__all__ = ["main", "run_job"]


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
    return run_and_print(arguments, read_manifest, arguments.fresh)


if __name__ == "__main__":
    sys.exit(main())
