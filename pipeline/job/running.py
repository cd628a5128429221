"""Runs a job from its manifest to its summary, for the commands `run` and `heal`."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from manifests.importing import quick_imports
from manifests.packages import prepare_process
from manifests.schema import Manifest
from pipeline.console.arguments import CONNECT_TIMEOUT_S, check_in_process
from pipeline.console.signals import interrupt_on_signals


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
    with quick_imports():  # slow, and therefore only when the arguments are checked
        from pipeline.checkpoint.compression_record import SEAL
        from pipeline.job.context import begin, check_output, open_job
        from pipeline.job.healing import check_healing, heal_layers, healing_due
        from pipeline.job.output_scores import missing_scores, score_output
        from pipeline.job.run_record import recorded
        from pipeline.job.sizing import compress_to_budget
        from pipeline.job.stages import assemble_output, finish, finished_summary, heartbeat, join_cluster, score_again

    with open_job(manifest, fresh=fresh, stop=stop, quiet=quiet, in_process=in_process) as job:
        check_healing(job)
        summary, faults = finished_summary(job)
        finished = summary is not None and not faults and not healing_due(job)
        if summary and finished and not missing_scores(job):
            return summary
        with job.observer, recorded(job), heartbeat(job) as beats:
            check_output(job, faults, finished)
            join_cluster(job, address, connect_timeout_s)
            begin(job, finished)
            if summary and finished:
                return score_again(job, summary)
            job, effort = compress_to_budget(job, beats)
            job = heal_layers(job, beats)
            compression = assemble_output(job)
            scores = score_output(job, compression[SEAL])
            return finish(job, effort, compression, scores)


def run_and_print(arguments: Any, read: Callable[[Any], Manifest], fresh: bool = False) -> int:
    """Run the job of a command's arguments, and print its summary. Return the exit code. Raises the errors of `read`
    and of `run_job`."""
    stop = threading.Event()
    interrupt_on_signals(stop)
    manifest = read(arguments)
    with redirect_stdout(sys.stderr):  # Ray prints messages of its nodes, which must not mix with JSON
        summary = run_job(
            manifest,
            fresh=fresh,
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
