"""The options, error messages and exit codes that all commands share."""

from __future__ import annotations

import argparse
import io
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from manifests import VERSION
from manifests.calibration import Text
from manifests.errors import InputError, LaminaError
from manifests.loading import load_manifest, parse_block
from manifests.schema import Manifest
from manifests.strict_yaml import read_yaml
from manifests.sweep import Sweep, SweepPoint, load_sweep
from pipeline.console.exit_status import ending_of
from pipeline.console.paths import resolve_paths
from pipeline.console.pipes import flushed, until_reader_leaves
from pipeline.console.printing import as_called, say
from pipeline.console.signals import interrupt_on_signals
from pipeline.console.supervision import tell

CONNECT_TIMEOUT_S = 30.0
TEXT_FILES = ".txt, .jsonl, .json or .parquet files, all but the last also as .gz or .zst"
EXIT_CODES = "exit codes: 0 done, 2 wrong manifest or input, 75 interrupted (run again to resume), 1 failed"


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a command's parser with the options that all commands have."""
    options = _Parser(prog=as_called(f"python -m pipeline.{command}"), description=description, epilog=EXIT_CODES)
    options.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    options.add_argument("--version", action="version", version=f"Lamina {VERSION}", help="print the version")
    return options


class _Parser(argparse.ArgumentParser):
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the command, also if the reader of its help has left."""
        code = until_reader_leaves(lambda: flushed(status))
        tell(code=code)
        super().exit(code, message)


def add_address(options: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that needs Ray."""
    options.add_argument("--address", help="a running Ray cluster; default: RAY_ADDRESS, or a local one")
    options.add_argument(
        "--connect-timeout",
        type=float,
        default=CONNECT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long to wait for a cluster; default: %(default)s",
    )


def add_in_process(options: argparse.ArgumentParser) -> None:
    """Add the argument of a command that can compute without Ray."""
    options.add_argument(
        "--in-process", action="store_true", help="one worker in this process, without Ray: for debuggers, tiny models"
    )


def add_text(options: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments of a command that reads a text, for `text_of`."""
    options.add_argument("--text", nargs="+", metavar="FILE", help=f"{TEXT_FILES}{what}")
    options.add_argument(
        "--field",
        action="append",
        help="the column with the text; default: text, or a single column of conversations; repeat to join several",
    )
    options.add_argument(
        "--messages", metavar="FIELD", help="the column with conversations, written by the model's chat template"
    )
    options.add_argument("--tools", metavar="FIELD", help="the column with the conversations' tools; default: tools")
    options.add_argument(
        "--template",
        action="append",
        metavar="NAME=VALUE",
        help="an argument of the chat template, such as enable_thinking=false",
    )


def text_of(arguments: argparse.Namespace) -> Text:
    """Return the text of these arguments. Raises InputError."""
    template: dict[str, Any] = {}
    for argument in arguments.template or ():
        name, separator, value = argument.partition("=")
        if not (separator and name):
            raise InputError(f"--template {argument}: expected NAME=VALUE, such as enable_thinking=false")
        try:
            template[name] = read_yaml(value)
        except ValueError as error:
            raise InputError(f"--template {argument}: the value is not YAML: {error}") from error
    field = arguments.field[0] if arguments.field and len(arguments.field) == 1 else arguments.field
    fields = {
        "files": tuple(arguments.text), "field": field, "messages": arguments.messages, "tools": arguments.tools,
        "template": template or None,
    }  # fmt: skip
    return parse_block(Text, fields, "--text, --field, --messages, --tools, --template")


def check_in_process(address: str | None, workers: int, field: str = "workers.max") -> None:
    """Raise InputError where `--in-process` comes with a cluster, or with several workers in `field`."""
    if address is not None:
        raise InputError(f"--address {address}: --in-process computes without Ray; give one of the two")
    if workers > 1:
        raise InputError(
            f"{field}: {workers}: --in-process has one worker, the command itself; ask for 1, or leave out --in-process"
        )


def add_manifest(options: argparse.ArgumentParser, what: str = "the YAML file of the job") -> None:
    """Add the arguments of a command that reads a manifest, for `read_manifest`."""
    options.add_argument("manifest", help=what)
    add_overrides(options)


def add_overrides(options: argparse.ArgumentParser) -> None:
    """Add the arguments that change a manifest's fields and paths."""
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="overrides a manifest field")
    options.add_argument(
        "--base", type=Path, metavar="DIR", help="the folder of the manifest's relative paths; default: here"
    )


def read_manifest(arguments: argparse.Namespace) -> Manifest:
    """Read the manifest of these arguments, and resolve its paths. Raises InputError."""
    return resolve_paths(load_manifest(arguments.manifest, arguments.set), arguments.base)


def read_sweep(arguments: argparse.Namespace) -> tuple[Sweep, tuple[SweepPoint, ...]]:
    """Read the sweep of these arguments, and resolve the paths of its points. Raises InputError."""
    sweep, points = load_sweep(arguments.manifest, arguments.set)
    return sweep, tuple(replace(point, manifest=resolve_paths(point.manifest, arguments.base)) for point in points)


def run_command(
    body: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, interrupts: bool = False
) -> int:
    """Run a command's body, print its error, and return the exit code.

    `interrupts`: signals raise KeyboardInterrupt in the body, and any error after one counts as it: an import that is
    interrupted may fail in another way. Without it, the body decides what signals do.
    """
    stop = threading.Event()
    if interrupts and threading.current_thread() is threading.main_thread():  # others cannot set handlers
        interrupt_on_signals(stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does, for letters that the locale lacks
    code = until_reader_leaves(lambda: _reported(body, arguments, stop))
    tell(code=code)
    return code


def _reported(body: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, stop: threading.Event) -> int:
    try:
        return flushed(body(arguments))
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if arguments.debug and isinstance(error, (LaminaError, SystemExit)):
            traceback.print_exc()
        elif arguments.debug and isinstance(error, Exception):
            raise
        ending = ending_of(KeyboardInterrupt() if stop.is_set() and isinstance(error, Exception) else error)
        say(ending.line, sys.stderr)
        return ending.exit_code
