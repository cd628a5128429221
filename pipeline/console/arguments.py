"""How every command ends: an error message without a traceback, and a documented exit code."""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Callable

from manifests.errors import Interrupted, LaminaError
from pipeline.console.signals import GO_ON
from stores.durable import storage_error

NO_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # what was given can be no path
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
    except LaminaError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"{_headline(error)}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"interrupted: {error or 'stopped'}; {GO_ON}", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        return 1
    except MemoryError:
        if arguments.debug:
            raise
        print("failed: out of memory; stop other programs, or run it where there is more", file=sys.stderr)
        return 1
    except OSError as error:  # of no file that a store or a reader answers for
        if arguments.debug:
            raise
        wrong = error.errno in NO_PATHS
        said = storage_error("using", error.filename or "a file", error)
        print(f"{'wrong input' if wrong else 'failed'}: {said}", file=sys.stderr)
        return 2 if wrong else 1
    except Exception as error:
        if arguments.debug:
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"internal error: {type(error).__name__}: {error} ({where.filename}:{where.lineno}); --debug shows more",
            file=sys.stderr,
        )
        return 1


def _headline(error: LaminaError) -> str:
    return {2: "wrong input", 75: "interrupted"}.get(error.exit_code, "failed")
