"""Play hostile input: `python -m tools.soak.fuzz [--cases N] [--seed S] [--only KIND] [--case KIND:NUMBER]`.

A case passes if

- each command ends by itself with an exit code that is right for it and a message, without a traceback or an "internal
  error", and within bounds of memory, file size and time (`tools/soak/sandbox.py`);
- nothing changed outside RUN_DIR and OUTPUT, and no code of the checkpoint was run;
- a job that ends with 0 has written a checkpoint that `verify` accepts, and after damage to RUN_DIR one with the bytes
  of an undisturbed job.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from tests.end_to_end.jobs import file_digests
from tools.soak import input_cases, stored_cases
from tools.soak.sandbox import GROWTH_BYTES, Ended, run_commands, snapshot
from tools.soak.world import INDEX, STOPS, VERIFY, Case, World, make_world

MAY_CHANGE = ("run", "output")
AMX_ANSWER = "added tmp/lamina-amx-"  # `manifests.packages`, on processors that promise AMX
SHOWN = 700
KINDS = {**input_cases.KINDS, **stored_cases.KINDS}
COLUMNS = ("cases", "0", "1", "2", "75", "failed")


@dataclass
class Verdict:
    """The end of a case; it passed if there are no faults."""

    name: str
    case: Case
    ended: list[Ended]
    faults: list[str] = field(default_factory=list)


def judge(world: World, kind: str, number: int, seed: int) -> Verdict:
    """Prepare and play a case."""
    case = KINDS[kind](world, Random(f"{seed}/{kind}/{number}"))
    had_output = (world.work / "output" / INDEX).exists()
    with snapshot(world.work, MAY_CHANGE) as changed:
        ended = run_commands(world.work, case.commands, world.scratch)
    verdict = Verdict(f"{kind}:{number}", case, ended)
    elsewhere = case.elsewhere or kind in ("manifest", "options")  # these name other places
    for end in ended:
        verdict.faults += _faults(end, kind, elsewhere)
    allowed = ("added", "changed tmp") if elsewhere else (AMX_ANSWER,)
    verdict.faults += [change for change in changed if not change.startswith(allowed)]
    if (world.work / "pwned").exists():
        verdict.faults.append("code of the checkpoint was run")
    if not verdict.faults:
        verdict.faults += _output_faults(world, case, ended[-1], kind, had_output)
    return verdict


def _faults(end: Ended, kind: str, elsewhere: bool) -> Iterator[str]:
    command = end.command[0]
    right = (0, 1, 2) if command == "verify" or kind in ("ledger", "run_dir") else (0, 2)
    if end.code not in right:
        yield f"{command}: exit code {end.code}, right are {right}"
    for words in ("Traceback", "internal error"):
        if words in end.err or words in end.out:
            yield f"{command}: {words!r}"
    if end.code and command != "verify" and not any(w in end.err for w in ("wrong input: ", "failed: ", "usage: ")):
        yield f"{command}: no message"
    if end.outside and not elsewhere:
        yield f"{command}: writes outside: {end.outside[:3]}"
    if end.grown_bytes > GROWTH_BYTES:
        yield f"{command}: grew by {end.grown_bytes:,} bytes"


def _output_faults(world: World, case: Case, last: Ended, kind: str, had_output: bool) -> Iterator[str]:
    if last.command[0] != "run":
        return
    output = world.work / "output"
    written = (output / INDEX).exists()
    if last.code == 0 and written and kind != "output":
        check = run_commands(world.work, [VERIFY], world.scratch)[0]
        if check.code != 0:
            yield f"run ended with 0, but verify says:\n{check.out}{check.err}"
    if last.code != 0 and written and not had_output:
        yield f"run ended with {last.code}, but OUTPUT has an index"
    if case.repairable and last.code == 0:
        expected = world.reference[STOPS[case.stop or "walk"][0]]
        if differing := {name for name, _ in file_digests(output).items() ^ expected.items()}:
            yield f"other bytes than those of an undisturbed job: {', '.join(sorted(differing))}"
    if case.repairable and last.code == 1:
        yield "run again, it fails again"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.fuzz")
    options.add_argument("--cases", type=int, default=2400, help="of all kinds together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=KINDS, help="one kind")
    options.add_argument("--case", metavar="KIND:NUMBER", help="one case, with everything it prints")
    options.add_argument("--directory", help="where to work, if possible in memory; it is emptied at the end")
    arguments = options.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=arguments.directory) as directory:
        torch.set_num_threads(1)
        os.fsync = lambda _: None  # type: ignore[assignment]  # no power cut is tested: it would only take time
        world = make_world(Path(directory).resolve())
        if arguments.case:
            return _one(world, arguments.case, arguments.seed)
        return _all(world, arguments)


def _one(world: World, name: str, seed: int) -> int:
    kind, _, number = name.partition(":")
    verdict = judge(world, kind, int(number), seed)
    print(f"{verdict.name} ({verdict.case.name})")
    for end in verdict.ended:
        print(f"$ {' '.join(end.command)}")
        print(f"exit {end.code}, {end.seconds:.2f} s, grown {end.grown_bytes:,}, refused {end.outside}")
        print(end.out[-4000:] + end.err[-4000:])
    print("\n".join(verdict.faults) or "passed")
    return 1 if verdict.faults else 0


def _all(world: World, arguments: argparse.Namespace) -> int:
    kinds = [arguments.only] if arguments.only else list(KINDS)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    slowest_s, grown_bytes, started = 0.0, 0, time.monotonic()
    for kind in kinds:
        for number in range(-(-arguments.cases // len(kinds))):
            verdict = judge(world, kind, number, arguments.seed)
            outcomes[kind].update([str(verdict.ended[-1].code), "cases", *["failed"] * bool(verdict.faults)])
            slowest_s = max([slowest_s, *(end.seconds for end in verdict.ended)])
            grown_bytes = max([grown_bytes, *(end.grown_bytes for end in verdict.ended)])
            if verdict.faults:
                _print(verdict)
        print(f"{kind}: {outcomes[kind]['cases']} cases", file=sys.stderr, flush=True)
    total = sum(outcomes.values(), Counter[str]())
    print("".join(f"{name:>10}" for name in ("kind", *COLUMNS)))
    for name, counts in (*outcomes.items(), ("all", total)):
        print("".join(f"{value:>10}" for value in (name, *(counts[column] for column in COLUMNS))))
    print(
        f"{time.monotonic() - started:.0f} s; slowest command {slowest_s:.1f} s; most memory of a command beyond "
        f"that of the process it is forked from {grown_bytes / 2**20:.0f} MiB (bound {GROWTH_BYTES / 2**20:.0f})"
    )
    return 1 if total["failed"] else 0


def _print(verdict: Verdict) -> None:
    print(f"FAILED {verdict.name} ({verdict.case.name}): {' '.join(verdict.ended[-1].command)[:200]}")
    for fault in verdict.faults:
        print(f"  {fault}")
    log = max((end.err for end in verdict.ended), key=lambda text: "internal" in text or "Traceback" in text)
    log = re.sub(r"(.)\1{20,}", r"\1\1...", log)[-SHOWN:]
    print("  | " + log.strip().replace("\n", "\n  | "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
