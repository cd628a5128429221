"""Hostile input, case by case: `python -m tools.soak.fuzz [--cases N] [--seed S] [--only KIND] [--case KIND:NUMBER]`.

A case passes when each command ends by itself with an exit code that is right for it and a message, without a traceback
or an "internal error"; when nothing changed outside RUN_DIR and OUTPUT; when no code of
the checkpoint was run; and within bounds of memory, file size and time (`tools/soak/sandbox.py`). A job that ends with
0 has written a checkpoint that `verify` accepts, and after damage to RUN_DIR one with the bytes of an undisturbed job.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from tests.end_to_end.jobs import file_digests
from tools.soak import sandbox
from tools.soak.case import INDEX, VERIFY, Case
from tools.soak.input_cases import (
    config_case,
    header_case,
    index_case,
    manifest_case,
    options_case,
    text_case,
    tokenizer_case,
)
from tools.soak.sandbox import Ended, run_commands, snapshot
from tools.soak.stored_cases import ledger_case, output_case, run_dir_case
from tools.soak.world import HALVES, World, make_world

MAY_CHANGE = ("run", "output")
SHOWN = 700
KINDS: dict[str, Callable[[World, Random], Case]] = {
    "manifest": manifest_case,
    "options": options_case,
    "header": header_case,
    "index": index_case,
    "config": config_case,
    "tokenizer": tokenizer_case,
    "text": text_case,
    "ledger": ledger_case,
    "run_dir": run_dir_case,
    "output": output_case,
}


@dataclass
class Verdict:
    """What came of a case; `faults` is empty when it passed."""

    name: str
    case: Case
    ended: list[Ended]
    faults: list[str] = field(default_factory=list)


def judge(world: World, kind: str, number: int, seed: int) -> Verdict:
    """Prepares and plays a case."""
    case = KINDS[kind](world, Random(f"{seed}/{kind}/{number}"))
    had_output = (world.work / "output" / INDEX).exists()
    with snapshot(world.work, MAY_CHANGE) as changed:
        ended = run_commands(world.work, case.commands, world.scratch)
    verdict = Verdict(f"{kind}:{number}", case, ended)
    for end in ended:
        verdict.faults += _faults(end, kind, case.elsewhere)
    elsewhere = case.elsewhere or kind in ("manifest", "options")  # these name other places
    verdict.faults += [change for change in changed if not elsewhere or not change.startswith(("added", "changed tmp"))]
    if (world.work / "pwned").exists():
        verdict.faults.append("code of the checkpoint was run")
    if not verdict.faults:
        verdict.faults += _output_faults(world, case, ended, kind, had_output)
    return verdict


def _faults(end: Ended, kind: str, elsewhere: bool) -> Iterator[str]:
    command = end.command[0]
    right = {"verify": (0, 1, 2)}.get(command, (0, 1, 2) if kind in ("ledger", "run_dir") else (0, 2))
    if end.code not in right:
        yield f"{command}: exit code {end.code}, right are {right}"
    for words in ("Traceback", "internal error"):
        if words in end.said or words in end.printed:
            yield f"{command}: {words!r}"
    if end.code and command != "verify" and not any(w in end.said for w in ("wrong input: ", "failed: ", "usage: ")):
        yield f"{command}: no message"
    if end.outside and not elsewhere and kind not in ("manifest", "options"):
        yield f"{command}: writes outside: {end.outside[:3]}"
    if end.grown_bytes > sandbox.GROWTH_BYTES:
        yield f"{command}: grew by {end.grown_bytes:,} bytes"


def _output_faults(world: World, case: Case, ended: list[Ended], kind: str, had_output: bool) -> Iterator[str]:
    if ended[-1].command[0] != "run":
        return
    last, output = ended[-1], world.work / "output"
    if last.code == 0 and (output / INDEX).exists():
        check = run_commands(world.work, [VERIFY], world.scratch)[0]
        if check.code != 0 and kind != "output":
            yield f"run ended with 0, but verify says:\n{check.printed}{check.said}"
    if last.code != 0 and not had_output and (output / INDEX).exists():
        yield f"run ended with {last.code}, but OUTPUT has an index"
    if case.repairable and last.code == 0:
        expected = world.reference[HALVES[case.half or "walk"][0]]
        found = file_digests(output)
        if found != expected:
            differing = sorted({name for name, _ in found.items() ^ expected.items()})
            yield f"other bytes than those of an undisturbed job: {', '.join(differing)}"
    if case.repairable and last.code == 1:
        yield "run again, it fails again"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(prog="python -m tools.soak.fuzz")
    options.add_argument("--cases", type=int, default=2400, help="of all kinds together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=KINDS, help="one kind")
    options.add_argument("--case", metavar="KIND:NUMBER", help="one case, with everything it prints")
    options.add_argument("--directory", help="where to work; in memory if possible, nothing is kept")
    arguments = options.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=arguments.directory) as directory:
        torch.set_num_threads(1)
        os.fsync = lambda _: None  # type: ignore[assignment]  # nobody cuts the power: it would only take time
        world = make_world(Path(directory).resolve())
        if arguments.case:
            return _one(world, arguments.case, arguments.seed)
        return _all(world, arguments)


def _one(world: World, name: str, seed: int) -> int:
    kind, _, number = name.partition(":")
    verdict = judge(world, kind, int(number), seed)
    print(f"{verdict.name} ({verdict.case.what})")
    for end in verdict.ended:
        print(f"$ {' '.join(end.command)}")
        print(f"exit {end.code}, {end.seconds:.2f} s, grown {end.grown_bytes:,}, refused {end.outside}")
        print(end.printed[-4000:] + end.said[-4000:])
    print("\n".join(verdict.faults) or "passed")
    return 1 if verdict.faults else 0


def _all(world: World, arguments: argparse.Namespace) -> int:
    kinds = [arguments.only] if arguments.only else list(KINDS)
    per_kind = -(-arguments.cases // len(kinds))
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    failed: list[Verdict] = []
    slowest, largest, started = 0.0, 0, time.monotonic()
    for kind in kinds:
        began = time.monotonic()
        for number in range(per_kind):
            verdict = judge(world, kind, number, arguments.seed)
            outcomes[kind].update([str(verdict.ended[-1].code), "cases"])
            slowest = max([slowest, *(end.seconds for end in verdict.ended)])
            largest = max([largest, *(end.grown_bytes for end in verdict.ended)])
            if verdict.faults:
                failed.append(verdict)
                outcomes[kind]["failed"] += 1
                _print(verdict)
        print(
            f"{kind}: {outcomes[kind]['cases']} cases in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
        )
    columns = ("cases", "0", "1", "2", "75", "failed")
    print("".join(f"{name:>10}" for name in ("kind", *columns)))
    for kind in kinds:
        print("".join(f"{value:>10}" for value in (kind, *(outcomes[kind][column] for column in columns))))
    totals = [sum(counts[column] for counts in outcomes.values()) for column in columns]
    print("".join(f"{value:>10}" for value in ("all", *totals)))
    print(
        f"{time.monotonic() - started:.0f} s; slowest command {slowest:.1f} s; most memory of a command beyond "
        f"that of the process it is forked from {largest / 2**20:.0f} MiB (bound {sandbox.GROWTH_BYTES / 2**20:.0f})"
    )
    return 1 if failed else 0


def _print(verdict: Verdict) -> None:
    print(f"FAILED {verdict.name} ({verdict.case.what}): {' '.join(verdict.ended[-1].command)[:200]}")
    for fault in verdict.faults:
        print(f"  {fault}")
    said = max((end.said for end in verdict.ended), key=lambda text: "internal" in text or "Traceback" in text)
    said = re.sub(r"(.)\1{20,}", r"\1\1...", said)[-SHOWN:]
    print("  | " + said.strip().replace("\n", "\n  | "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
