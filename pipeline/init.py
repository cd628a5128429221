"""`python -m pipeline.init MODEL --text FILE…`: writes a manifest for a model, and prints the cost of its job."""

from __future__ import annotations

from manifests.packages import prepare_process
from pipeline.console.signals import exit_on_signals
from pipeline.console.supervision import supervise

if __name__ == "__main__":
    exit_on_signals()  # the imports below take seconds
    supervise()
    prepare_process()

import json
import os
import shlex
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import manifests
from manifests.engines import ENGINES
from manifests.errors import InputError, StorageError, reason
from manifests.fit import DEVICES
from pipeline.console.arguments import add_address, add_text, parser, run_command, text_of
from pipeline.console.printing import as_called, say

SHIPPED = Path(manifests.__file__).parent
LEAST_MEMORY = 2**16  # a number below it lacks its unit


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parser("init", "Writes a manifest for a model, a text and this machine, and prints its cost.")
    options.add_argument("model", nargs="?", help="the dense model: a directory, a hub id, or s3://BUCKET/FOLDER")
    add_text(options, "")
    goal = options.add_mutually_exclusive_group()
    goal.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="of the decoder's numbers that stays; default: 0.8. For a source in a stored format it is --bytes 0.8",
    )
    goal.add_argument("--bytes", type=float, metavar="SHARE", help="of the decoder's bytes, by ranks and bits")
    goal.add_argument("--max-loss", type=float, metavar="NATS", help="most loss per token; finds the smallest size")
    goal.add_argument("--fits", metavar="MEMORY", help="of the device that will serve the output, such as 24GB or 8GiB")
    options.add_argument("--context", type=int, metavar="TOKENS", help="with --fits: of a sequence, such as 32768")
    options.add_argument("--sequences", type=int, metavar="N", help="with --fits: served at a time; default: 1")
    options.add_argument("--on", choices=DEVICES, help="with --fits: the device with the memory; default: gpu")
    options.add_argument(
        "--for",
        dest="engine",
        choices=ENGINES,
        help="the engine that will serve the output: only what stays small in it is chosen",
    )
    options.add_argument("-o", "--output", default="job.yaml", metavar="FILE", help="default: %(default)s")
    options.add_argument("--force", action="store_true", help="overwrite the file")
    options.add_argument("--list", action="store_true", help="list the manifests and sweeps that come with Lamina")
    add_address(options)
    options.add_argument("--json", action="store_true", help="print the file's name and the plan as JSON")
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda arguments: _body(arguments, words), options.parse_args(words), interrupts=True)


def _body(arguments: Any, words: list[str]) -> int:
    if arguments.list:
        for line in shipped_lines():
            print(line)
        return 0
    path, fit = _checked_path(arguments), _fit_of(arguments)
    from pipeline.recommendation.recommending import Request, check_goal, recommend  # slow, not needed for --list

    goal = check_goal(arguments.keep, arguments.bytes, arguments.max_loss, fit)
    folder = os.path.relpath(path.parent)
    place = arguments.address, arguments.connect_timeout
    request = Request(arguments.model, text_of(arguments), goal, folder, *place, arguments.engine)
    text, verdict = recommend(request, as_called(f"python -m pipeline.init {shlex.join(words)}"))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"-o {path}: cannot be written ({reason(error)}); give another file") from error
    if arguments.json:
        document = {"manifest": str(path), "plan": verdict.plan, "engines": verdict.engines, "choice": verdict.choice}
        print(json.dumps(document))
        return 0
    for line in verdict.lines():
        say(line)
    say(f"Wrote {path}; run it with: python -m pipeline.run {shlex.quote(str(path))}")
    return 0


def _fit_of(arguments: Any) -> dict[str, Any] | None:
    """Return the fields of `budget.fit` of these arguments; None without --fits. Raises InputError."""
    fields = {"context": arguments.context, "sequences": arguments.sequences, "device": arguments.on}
    serving = {name: value for name, value in fields.items() if value is not None}
    if arguments.fits is None:
        if serving:
            raise InputError("--context, --sequences and --on say what --fits MEMORY should hold; give it, too")
        return None
    if arguments.context is None:
        raise InputError(f"--fits {arguments.fits}: give --context TOKENS, too, such as --context 8192")
    memory = int(arguments.fits) if arguments.fits.isdecimal() else arguments.fits
    if isinstance(memory, int) and memory < LEAST_MEMORY:
        raise InputError(f"--fits {memory}: is a memory of {memory:,} bytes; give a unit, such as {memory}GB")
    engine = {} if arguments.engine is None else {"engine": arguments.engine}
    return {"memory": memory, **serving, **engine}


def _checked_path(arguments: Any) -> Path:
    """Return the file to write. Raises InputError if an argument is missing, or the file exists without --force."""
    if arguments.model is None or not arguments.text:
        raise InputError("give a model and --text FILE, such as `python -m pipeline.init MODEL --text FILE`; or --list")
    path = Path(arguments.output)
    if not path.parent.is_dir():
        raise InputError(f"-o {path}: no folder {path.parent}; create it, or give another file")
    if path.is_dir():
        raise InputError(f"-o {path}: is a folder; give the name of a file in it, such as {path}/job.yaml")
    if path.exists() and not arguments.force:
        raise InputError(f"-o {path}: exists already; give another file, or overwrite it with --force")
    return path


def shipped_lines() -> Iterator[str]:
    """Yield a line for each manifest and sweep of the package: its path and the first sentence of its comment."""
    for path in (*sorted(SHIPPED.glob("*.yaml")), *sorted((SHIPPED / "sweeps").glob("*.yaml"))):
        lines = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
        comment = " ".join(line.removeprefix("# ") for line in lines if not line.startswith("#  "))
        yield f"{path}  {comment.partition('. ')[0].rstrip('.:')}"


if __name__ == "__main__":
    sys.exit(main())
