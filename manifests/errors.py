"""The errors that reach a user, each with the exit code of the command.

Each takes its message first and passes all arguments to its base, so that it survives pickling between processes.
"""


def reason(error: BaseException) -> str:
    """Return the cause of an error for a message that already names the file: an OSError loses its number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class LaminaError(Exception):
    """A fault that a user can act on; `exit_code` is that of the command.

    `unit`: the key of the unit of work that raised this, if the pool knows it.
    """

    exit_code = 1
    unit = ""


class InputError(LaminaError, ValueError):
    """The manifest, model, text, budget or a directory is wrong. Nearly all such errors are raised before any work."""

    exit_code = 2


class NumericsError(InputError):
    """NaN or infinity in weights or activations; the message names layer and tensor."""


class InUseError(InputError):
    """Another running job uses the run directory or the output."""


class StorageError(LaminaError):
    """A write or read failed while the job ran (full disk, lost mount, no permission); resumable after a fix."""


class CorruptError(StorageError):
    """Stored data does not match the digest, shape or chunk count that was committed for it.

    `path` is the `path` of the record that names the data, so that the entry with that record can be invalidated.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerError(LaminaError, RuntimeError):
    """A worker died or failed on a unit too often; resumable after a fix."""


class LostInputError(LaminaError):
    """An input of a unit was lost with its node; the units that produced it are done again.

    `producers` are the keys of these units, if they are known.
    """

    def __init__(self, message: str, producers: tuple[str, ...] = ()) -> None:
        super().__init__(message, producers)
        self.producers = producers

    def __str__(self) -> str:
        return str(self.args[0])


class Interrupted(LaminaError):
    """SIGTERM or SIGINT: finished work is committed, and the same command resumes."""

    exit_code = 75
