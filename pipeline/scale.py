"""`python -m pipeline.scale RUN_DIR --workers N`: gives a running job more workers, or fewer."""

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

from manifests.errors import InputError
from pipeline.console.arguments import parser, run_command
from pipeline.console.printing import say
from stores.lock import read_lock
from stores.run_directory import existing_run


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser(
        "scale", "Changes the number of workers of a running job until it ends. The output stays the same."
    )
    options.add_argument("run_dir", help="the run directory of the job")
    options.add_argument("--workers", type=int, required=True, help="from 1 to the number of calibration shards")
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    run_dir, workers = existing_run(arguments.run_dir), arguments.workers
    if workers < 1:
        raise InputError(f"--workers {workers}: a job needs at least one; to stop it, send SIGTERM")
    owner = read_lock(run_dir.storage)
    if owner is None or not owner["alive"]:
        raise InputError(f"{run_dir.place}: no job is running here; set workers.max in its manifest")
    run_dir.request_workers(workers, owner["token"])
    say(
        f"asked process {owner['pid']} on {owner['host']} for {workers} workers; it notices within seconds, "
        f"and `python -m pipeline.status {run_dir.place}` shows how many are ready"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
