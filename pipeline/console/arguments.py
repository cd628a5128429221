"""How every command begins and ends: its options, an error message without a traceback, a documented exit code."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

from manifests.errors import LaminaError
from pipeline.console.endings import ending_of

EXIT_CODES = "exit codes: 0 done, 2 wrong manifest or input, 75 interrupted (run again to go on), 1 failed"


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """A command's parser with the options that all have."""
    made = argparse.ArgumentParser(prog=f"python -m pipeline.{command}", description=description, epilog=EXIT_CODES)
    made.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return made


def run_command(body: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command's body; prints what went wrong and returns the exit code."""
    try:
        return body(arguments)
    except BrokenPipeError:
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if arguments.debug and isinstance(error, LaminaError):
            traceback.print_exc()
        elif arguments.debug and not isinstance(error, KeyboardInterrupt):
            raise
        ending = ending_of(error)
        print(ending.line, file=sys.stderr)
        return ending.exit_code
