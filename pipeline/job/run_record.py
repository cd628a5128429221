"""The record of how a run ended, in RUN_DIR and in its log.

If native code or SIGKILL ends the process, its supervisor writes the record. No record is left if both are killed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from manifests.errors import InUseError, LaminaError
from pipeline.console.exit_status import Ending, ending_of
from pipeline.console.log_files import close_log, open_log
from pipeline.console.supervision import tell
from pipeline.driver.ledger_keys import TEXTS
from pipeline.job.context import JobContext
from stores.run_directory import ENDED

RECORD_VERSION = 1
LOG = logging.getLogger("lamina")


@contextmanager
def recorded(job: JobContext) -> Iterator[None]:
    """Open the log of this run. Record how the block ends, unless another process uses RUN_DIR by then."""
    log = open_log(job.run_dir.logs, job.name, lambda: job.observer.state)
    job.observer.say(f"log: {log}")
    begun = {"version": RECORD_VERSION, "run": job.run_dir.lock.token, "texts": None, "log": log}
    tell(run={"place": job.run_dir.storage.address, "record": begun})
    try:
        yield
    except BaseException as error:
        if not isinstance(error, InUseError):
            _record(job, log, ending_of(error))
        raise
    else:
        _record(job, log, Ending(0, "done"))
    finally:
        close_log()


def _record(job: JobContext, log: str, ending: Ending) -> None:
    LOG.log(logging.ERROR if ending.exit_code else logging.INFO, ending.line if ending.exit_code else "done")
    record = {
        "version": RECORD_VERSION,
        "run": job.run_dir.lock.token,
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "error": ending.message if ending.exit_code else None,
        "where": ending.where or _place(job.observer.state),
        "ended": time.time(),
        "seconds": job.seconds(),
        "texts": texts.as_json() if (texts := job.ledger.get(TEXTS)) else None,
        "log": log,
    }
    try:
        job.run_dir.storage.replace(ENDED, json.dumps(record).encode())
    except LaminaError as error:
        LOG.warning("how this run ended could not be entered: %s", error)
    tell(run=None)


def _place(state: Mapping[str, Any]) -> str | None:
    """Return the phase, and the last finished unit."""
    phase, unit = state.get("phase"), state.get("unit")
    return f"phase {phase}" + (f", after {unit}" if unit else "") if phase else None
