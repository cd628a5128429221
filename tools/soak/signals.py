"""SIGTERM and SIGINT at random times, from the first import to the last line: 75 each time, and the same bytes.

    python -m tools.soak.signals [--times N] [--seed S] [--early]

A job with calibration, assembly and evaluation on a Ray of its own is stopped and started again until it ends, and then
begun anew. `--early`: in its first seconds, in which modules are imported and Ray starts. Exits 1 if a command ended
otherwise, said `Traceback`, took over 30 s to stop, or left other bytes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests import factories
from tests.end_to_end.children import end_group
from tests.end_to_end.jobs import Job, file_digests

BOOT_S = 0.1  # before Python runs the first line
EARLY_S = 8.0
STOP_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The soak."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--early", action="store_true")
    given = options.parse_args(arguments)
    coin = random.Random(given.seed)
    ended: Counter[str] = Counter()
    slowest, faults = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model, text = factories.make_model(root / "model"), factories.write_text(root / "text.txt", 20_000)
        changes = {
            "workers": {"min": 2, "max": 2},
            "calibration.samples": 96,
            "evaluation": {"perplexity": {"text": {"files": [str(text)]}, "window": 24}},
        }
        job = Job(root / "job", model, text, changes).write()
        started = time.monotonic()
        code, _, said = run_and_stop(job, None, 0.0)
        assert code == 0, said
        whole, wanted = time.monotonic() - started, file_digests(job.output)
        forget(job)
        while sum(ended.values()) < given.times:
            number = coin.choice([signal.SIGTERM, signal.SIGINT])
            code, seconds, said = run_and_stop(job, number, coin.uniform(BOOT_S, EARLY_S if given.early else whole))
            slowest = max(slowest, seconds)
            wrong = code not in (0, 75) or seconds > STOP_S or "Traceback" in said or "*** SIG" in said
            if code == 0:
                wrong |= file_digests(job.output) != wanted
                forget(job)
            ended[f"{number.name}: exit {code}"] += 1
            if wrong:
                faults += 1
                print(f"{number.name}: exit {code} after {seconds:.1f} s\n{said[-3000:]}")
    print(dict(sorted(ended.items())), f"slowest to stop {slowest:.1f} s; {faults} faults")
    return int(faults > 0)


def run_and_stop(job: Job, number: signal.Signals | None, after_s: float) -> tuple[int, float, str]:
    """Exit code, seconds from the signal to the end, and what was said."""
    log = job.root / "log"
    with open(log, "w") as file:
        command = [sys.executable, "-m", "pipeline.run", str(job.manifest)]
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        if number is not None:
            process.wait(after_s)
        process.wait(None if number is None else 0)
    except subprocess.TimeoutExpired:
        assert number is not None
        process.send_signal(number)
    asked = time.monotonic()
    code = process.wait(4 * STOP_S)
    seconds = time.monotonic() - asked
    end_group(process.pid)
    return code, seconds, log.read_text()


def forget(job: Job) -> None:
    """As if it had never run."""
    for folder in (job.run_dir, job.output):
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
