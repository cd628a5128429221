"""`python -m pipeline.status RUN_DIR`: the progress of a job and of its workers. Writes nothing."""

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
import time
from collections.abc import Iterator
from typing import Any

from manifests.entries import PointEntry
from manifests.errors import StorageError
from manifests.records import LedgerKey
from pipeline.console.arguments import parser, run_command
from pipeline.console.printing import say
from pipeline.driver.ledger_keys import COMPLETE, HEALING, HELD_OUT_SCORE, POINTS, RESULT, TEXTS, point_part
from pipeline.evaluation.losses import all_warnings
from stores.lock import read_lock
from stores.run_directory import ENDED, MANIFEST, RunDirectory, existing_run
from stores.storage import Place, Storage, matching

LOG_LINES = 5
RESUME = "; run the same command again to resume"
ADVICE = {"interrupted": RESUME, "stopped": RESUME, "killed": f" (SIGKILL, or its machine is gone){RESUME}"}
ADVICE["failed"] = "; run the same command again when the cause is fixed"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("status", "Shows the progress of a job, running or not.")
    options.add_argument("run_dir", help="the run directory of the job")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(_body, options.parse_args(argv), interrupts=True)


def _body(arguments: Any) -> int:
    state = read_status(arguments.run_dir)
    if arguments.json:
        print(json.dumps(state))
    else:
        say("\n".join(_lines(state)))
    return 0


def read_status(place: Place) -> dict[str, Any]:
    """Return the state of a run directory as JSON. Raises InputError if there is none."""
    run_dir = existing_run(place)
    ledger = run_dir.ledger
    keys = ledger.keys()
    committed = {kind: sum(key.startswith(f"{kind}/") for key in keys) for kind in ("dense", "statistics", "layer")}
    owner = read_lock(run_dir.storage)
    complete, ended = ledger.get(COMPLETE), read_ending(run_dir.storage)
    points = _points(run_dir)
    entered = {"held_out": ledger.get(HELD_OUT_SCORE), "texts": ledger.get(TEXTS)}
    healings = (ledger.get(key) for key in keys if key.rpartition("/")[2] == HEALING)  # of a point, in a sweep
    healing = next(filter(None, healings), None)
    scored = {name: entry.as_json() for name, entry in entered.items() if entry}
    finished = bool(complete) or (points is not None and points["done"] == points["of"])
    return {
        "run_dir": run_dir.place,
        "output": run_dir.read_output(),
        "state": _state(owner, finished, ended),
        "owner": owner,
        "last_run": _last_run(owner, ended),
        "layers": {"importance_or_statistics": committed["dense"], "compressed": committed["layer"]},
        "points": points,
        "healing": healing.as_json() if healing else None,
        "last_commit": max(ledger.storage.modified_times().values(), default=None),
        "summary": complete.summary if complete else None,
        "remark": ((complete.summary if complete else scored).get("texts") or {}).get("remark"),
        "warnings": all_warnings(complete.summary if complete else scored),
        "log": _last_lines(run_dir.logs),
    }


def read_ending(run_dir: Storage) -> dict[str, Any] | None:
    """Return the record of the end of a run (pipeline/job/run_record.py), or None if it is missing or damaged."""
    try:
        record = json.loads(run_dir.read(ENDED))
        return record if record["version"] == 1 and record["outcome"] and "exit_code" in record else None
    except (OSError, StorageError, ValueError, TypeError, KeyError):
        return None


def _points(run_dir: RunDirectory) -> dict[str, int] | None:
    """Return the number of points of a sweep, and of those with a result, healed if the sweep heals them; None for a
    job."""
    if (entry := run_dir.ledger.get(POINTS)) is None:
        return None
    keys: list[LedgerKey[PointEntry]] = [LedgerKey(f"{point_part(digest)}/{RESULT}") for digest in entry.digests]
    results = [run_dir.ledger.get(key) for key in keys]
    points = run_dir.read_points()
    heals = [point.manifest.heal is not None for point in points] or [False] * len(results)
    pairs = zip(results, heals, strict=False)  # a crash may come between the two files of the points
    done = [result is not None and (not asked or result.healed is not None) for result, asked in pairs]
    return {"done": sum(done), "of": len(keys)}


def _state(owner: dict[str, Any] | None, finished: bool, ended: dict[str, Any] | None) -> str:
    if owner is not None and owner.get("alive"):
        return "running"
    if _was_killed(owner, ended):  # also over a finished job, whose healing or scores it was to add
        return "killed"
    if ended is not None and ended["outcome"] != "done":
        return str(ended["outcome"])
    return "finished" if finished else "stopped"


def _was_killed(owner: dict[str, Any] | None, ended: dict[str, Any] | None) -> bool:
    """True if the last owner of the lock neither released it nor wrote a record of its end."""
    return owner is not None and not owner.get("released") and (ended or {}).get("run") != owner.get("token")


def _last_run(owner: dict[str, Any] | None, ended: dict[str, Any] | None) -> dict[str, Any] | None:
    return ended if ended is not None and owner is not None and ended.get("run") == owner.get("token") else None


def _last_lines(logs: Storage) -> list[str]:
    names = matching(logs, ["*.log"])
    return logs.read(names[-1]).decode(errors="replace").splitlines()[-LOG_LINES:] if names else []


def _lines(state: dict[str, Any]) -> Iterator[str]:
    yield f"{state['run_dir']}: {state['state']}{ADVICE.get(state['state'], '')}"
    if (run := state["last_run"]) and run["exit_code"]:
        yield f"exit code {run['exit_code']}, {run.get('where') or 'before any phase'}: {run['error']}"
        yield f"log: {run['log']}"
    yield from [state["remark"]] if state["remark"] else []
    yield from state["warnings"]
    yield f"output: {state['output'] or f'unknown: a run writes {MANIFEST} when it begins to compute'}"
    for name, number in state["layers"].items():
        yield f"layers committed, {name.replace('_', ' ')}: {number}"
    if points := state["points"]:
        yield f"points of the sweep: {points['done']} of {points['of']}"
    if healing := state["healing"]:
        yield _stored_steps(healing)
    if state["last_commit"]:
        age_s = max(0.0, time.time() - state["last_commit"])  # a file server's clock may be ahead of ours
        yield f"last commit: {age_s:.0f} s ago"
    owner = state["owner"]
    if owner and owner.get("alive"):
        yield f"held by process {owner['pid']} on {owner['host']}, heartbeat {owner['heartbeat_age_s']:.0f} s ago"
        progress = owner.get("progress") or {}
        where = [f"phase {progress.get('phase', 'checks')}"]
        if progress.get("layer") is not None:
            where.append(f"layer {progress['layer']}")
        if progress.get("of"):
            counted = "units" if progress.get("loss") is None else "steps"
            where.append(f"{progress['done']} of {progress['of']} {counted}")
        if progress.get("loss") is not None:
            where.append(f"divergence {progress['loss']:.4f} in training")
        if progress.get("seconds_left") is not None:
            where.append(f"about {progress['seconds_left']:,.0f} s of the job left")
        yield ", ".join(where)
        if pool := progress.get("pool"):
            yield f"workers: {pool['ready']} ready, {pool['wanted']} wanted"
        for worker, unit in (progress.get("workers") or {}).items():
            yield f"  {worker}: {unit}"
    for line in state["log"]:
        yield f"  {line}"


def _stored_steps(healing: dict[str, Any]) -> str:
    """Return a line about the last checkpoint of a healing."""
    curve, of = healing["curve"], f" of {healing['steps']}" if "steps" in healing else ""
    parts = [f"healing: checkpoint after step {healing['step']}{of}"]
    if divergences := curve.get("divergences"):
        parts.append(f"divergence on held-out text {divergences[0]:.4f} at the start, {min(divergences):.4f} at best")
    if skipped := curve.get("skipped"):
        parts.append(f"{skipped} steps skipped, whose gradients were not finite")
    if retreats := curve.get("retreats"):
        parts.append(f"back to the best weights, at a lower rate, after step {', '.join(map(str, retreats))}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
