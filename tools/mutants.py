"""Mutation testing: put small faults into the code, one at a time, and count those that the unit tests find.

    python -m tools.mutants [MODULE ...] [--tenths N] [--workers W] [--report]

Runs mutmut (settings: pyproject.toml) on the modules given by dotted name, or on all modules of its settings.
`--tenths N` tries about N tenths of the mutants of each function, always the same ones. Results stay in mutants/ and
add up from call to call. Prints the share killed by module; `mutmut results` lists survivors, `mutmut show NAME` shows
one. Mutants of messages and of untested code count like others. A mutant may use much memory: run it where that does no
harm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path("mutants")
WIDTH = 120
KILLED = (1, 3)  # pytest: a test failed, or the run broke
TIMED_OUT = (24, -24, 36, 152, 255)
SURVIVED, UNTESTED = 0, (5, 33)
DIGITS = "1369258047"  # a mutant's number begins with 1, so that each function has one of any share


def results() -> dict[str, dict[str, int | None]]:
    """Read the exit code of the tests by module and mutant; None for a mutant that was not tried."""
    modules = {}
    for path in sorted(FOLDER.rglob("*.py.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        if codes:
            module = path.relative_to(FOLDER).as_posix().removesuffix(".py.meta").replace("/", ".")
            modules[module] = codes
    return modules


def patterns(modules: Sequence[str], tenths: int) -> list[str]:
    """Return patterns for the names of mutants to try, MODULE.FUNCTION__mutmut_NUMBER, by the number's last digit."""
    ending = f"*[{DIGITS[:tenths]}]" if tenths < 10 else "*"
    return [f"{module}.{ending}" for module in modules] or [ending]


def table(mutants: Mapping[str, Mapping[str, int | None]]) -> Table:
    """Return the table of mutants by module. A mutant that does not end counts as killed."""
    shown = Table("module", "mutants", "tried", "killed", "timed out", "survived", "no test", "killed / tried")
    total: Counter[str] = Counter()
    for module, codes in mutants.items():
        tried = [code for code in codes.values() if code is not None]
        counts = Counter(
            all=len(codes),
            tried=len(tried),
            killed=sum(code in KILLED for code in tried),
            timed=sum(code in TIMED_OUT for code in tried),
            survived=tried.count(SURVIVED),
            untested=sum(code in UNTESTED for code in tried),
        )
        total += counts
        shown.add_row(module, *_cells(counts))
    shown.add_row("all", *_cells(total))
    return shown


def _cells(counts: Mapping[str, int]) -> list[str]:
    names = ("all", "tried", "killed", "timed", "survived", "untested")
    share = (counts["killed"] + counts["timed"]) / counts["tried"] if counts["tried"] else 0.0
    return [*(f"{counts[name]}" for name in names), f"{share:.1%}"]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as pipeline.kernels or stores.ledger")
    parser.add_argument("--tenths", type=int, default=10, choices=range(1, 11), metavar="N", help="a sample")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="run nothing; print the stored results")
    options = parser.parse_args()
    if not options.report:
        mutmut = str(Path(sys.executable).parent / "mutmut")
        command = [mutmut, "run", "--max-children", str(options.workers)]
        if subprocess.run([*command, *patterns(options.modules, options.tenths)], check=False).returncode:
            return 1
    Console(width=WIDTH).print(table(results()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
