"""The exit code and the message of a command that ends by an error."""

from __future__ import annotations

import errno
import traceback
from dataclasses import dataclass
from typing import Literal

from manifests.errors import Interrupted, LaminaError
from pipeline.console.signals import RESUME
from stores.durable import storage_error

Outcome = Literal["done", "interrupted", "failed"]
NO_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # the argument cannot be a path
HEADLINES = {2: "wrong input", Interrupted.exit_code: "interrupted"}


@dataclass(frozen=True)
class Ending:
    """An exit code, the message without its headline, and the file and line of an unexpected error."""

    exit_code: int
    message: str
    where: str | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome as the record of a run names it."""
        return {0: "done", Interrupted.exit_code: "interrupted"}.get(self.exit_code, "failed")  # type: ignore[return-value]

    @property
    def line(self) -> str:
        """The line for the terminal."""
        if self.where:
            return f"internal error: {self.message} ({self.where}); --debug shows more"
        return f"{HEADLINES.get(self.exit_code, 'failed')}: {self.message}"


def ending_of(error: BaseException) -> Ending:
    """Return the message and the exit code of an error."""
    if isinstance(error, LaminaError):
        return Ending(error.exit_code, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Ending(Interrupted.exit_code, f"{str(error) or 'stopped'}; {RESUME}")
    if isinstance(error, SystemExit):  # Ray calls sys.exit, too, such as in its handler of SIGTERM
        return Ending(1, f"a library ended the command by sys.exit({error.code!r}); --debug shows where")
    if isinstance(error, MemoryError):
        return Ending(1, "out of memory; stop other programs, or use a machine with more")
    if isinstance(error, OSError) and error.filename is None:
        reason = error.strerror or str(error) or type(error).__name__
        return Ending(1, f"standard output, or a connection or file without a name: {reason}; fix it, then {RESUME}")
    if isinstance(error, OSError):  # of a file outside the stores
        return Ending(2 if error.errno in NO_PATHS else 1, str(storage_error("using", error.filename, error)))
    trace = traceback.extract_tb(error.__traceback__)
    where = f"{trace[-1].filename}:{trace[-1].lineno}" if trace else "nowhere"
    return Ending(1, f"{type(error).__name__}: {error}", where)
