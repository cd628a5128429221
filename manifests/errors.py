"""The errors that reach a user, each with the exit code of the command that ends by it.

Every one takes its message first and gives all arguments on, so that it survives pickling between processes.
"""


def reason(error: BaseException) -> str:
    """Says why, for a message that names the file already: of an OSError without its number and its path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class LaminaError(Exception):
    """Something went wrong that a user can act on; `exit_code` is what the command returns.

    `unit`: the key of the unit of work that raised this, as the pool says when it does.
    """

    exit_code = 1
    unit = ""


class InputError(LaminaError, ValueError):
    """The manifest, model, text, budget or a directory given is wrong: nothing was computed, nothing written."""

    exit_code = 2


class NumericsError(InputError):
    """NaN or infinity in weights or activations; the message names layer and tensor."""


class InUseError(InputError):
    """Another live job holds the run directory or the output."""


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
    """A worker died or failed on a unit for good; resumable after a fix."""


class LostInputError(LaminaError):
    """Something a unit builds on went with the node that held it; what led to it is done again.

    `producers` are the keys of the units whose results are gone, if they are known.
    """

    def __init__(self, message: str, producers: tuple[str, ...] = ()) -> None:
        super().__init__(message, producers)
        self.producers = producers

    def __str__(self) -> str:
        return str(self.args[0])


class Interrupted(LaminaError):
    """SIGTERM or SIGINT: what is done is committed; the same command goes on."""

    exit_code = 75
