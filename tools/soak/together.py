"""Two commands at once in one run directory, or in one OUTPUT: one ends the job, the other is refused by name.

    python -m tools.soak.together [--rounds N] [--seed S]

Every round starts a job, and a second command beside it after a random delay. The second has to end well, or with exit
2 and a message that names the first's process; the first job's OUTPUT has to equal that of an undisturbed job. Prints a
line per round; exits 1 if any fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests import factories
from tests.end_to_end.children import Child
from tests.end_to_end.jobs import Job, file_digests

REFUSED = 2
LONGEST_DELAY_S = 4.0
Second = Callable[[Job, Path], tuple[str, list[str]]]
SECONDS: dict[str, Second] = {  # name -> command and arguments that run beside the first job
    "the same manifest": lambda made, _: ("run", [str(made.manifest)]),
    "another manifest": lambda made, _: ("run", [str(made.manifest), "--set", "budget.keep=0.8"]),
    "another run_dir": lambda made, other: ("run", [str(made.manifest), "--set", f"run_dir={other}"]),
    "another output": lambda made, other: ("run", [str(made.manifest), "--set", f"output={other}"]),
    "--fresh": lambda made, _: ("run", [str(made.manifest), "--fresh"]),
    "status": lambda made, _: ("status", [str(made.run_dir)]),
    "report": lambda made, other: ("report", [str(made.run_dir), "--out", f"{other}.html"]),
    "verify": lambda made, _: ("verify", [str(made.output)]),
    "evaluate": lambda made, _: ("evaluate", [str(made.output), "--text", str(made.text), "--window", "64"]),
    "export": lambda made, other: ("export", [str(made.output), "--to", "dense", str(other)]),
}
RUNS = ("the same manifest", "another manifest", "another run_dir", "another output", "--fresh")


def play(name: str, made: Job, delay_s: float, reference: dict[str, str]) -> str:
    """Runs a job with another command beside it. Returns what is wrong with how they ended; empty where nothing is."""
    command, arguments = SECONDS[name](made, made.root / "other")
    first = Child("run", [str(made.manifest)], made.root / "first")
    time.sleep(delay_s)
    second = Child(command, arguments, made.root / "second")
    codes = first.end(), second.end()
    if name in RUNS and REFUSED in codes:
        loser, winner = (first, second) if codes[0] == REFUSED else (second, first)
        if f"pid {winner.pid}" not in loser.said and "another job" not in loser.said:
            return f"the refusal names no holder:\n{loser.said}"
    if "Traceback" in first.said + second.said or "internal error" in first.said + second.said:
        return f"{codes}:\n{first.said}\n{second.said}"
    if 0 not in codes or not set(codes) <= {0, REFUSED}:
        return f"exit codes {codes}:\n{first.said}\n{second.said}"
    if codes[0] == 0 and name not in ("another manifest", "--fresh") and file_digests(made.output) != reference:
        return "OUTPUT differs from that of an undisturbed job"
    verified = Child("verify", [str(made.output if made.output.exists() else made.root / "other")], made.root / "check")
    return "" if verified.end() == 0 else f"OUTPUT does not verify:\n{verified.said}"


def main() -> int:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=2 * len(SECONDS))
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    coin, failures = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, text = factories.make_model(root / "model"), factories.write_text(root / "text.txt")
        alone = Job(root / "alone", model, text).write()
        assert Child("run", [str(alone.manifest)], root / "alone" / "log").end() == 0
        reference = file_digests(alone.output)
        for number in range(arguments.rounds):
            name = list(SECONDS)[number % len(SECONDS)]
            delay_s = coin.choice((0.0, coin.uniform(0, LONGEST_DELAY_S)))
            fault = play(name, Job(root / str(number), model, text).write(), delay_s, reference)
            failures += bool(fault)
            print(f"{number} {name}, after {delay_s:.2f} s: {fault or 'ok'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
