"""OUTPUT before anything is written there: the lock that one job holds on it, and whose files it holds already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import CorruptError, InputError, StorageError
from manifests.records import AssemblingEntry, StagedRecord
from pipeline.checkpoint.compression_record import RECORD_FILE, SEAL, read_record
from pipeline.keys import ASSEMBLING, COMPLETE
from stores.durable import is_hidden, partial_path, storage_errors, sweep_partials, write_durably
from stores.ledger import Ledger
from stores.lock import RunLock

LOCK_FILE = ".lamina.lock"
SHOWN_FILES = 20


@dataclass(frozen=True)
class OutputFiles:
    """The files of OUTPUT that are there.

    Attributes:
        ours: those of this job, also of a run that was interrupted: they may be replaced and removed.
        of_lamina: those of the checkpoint of another of Lamina's jobs.
        foreign: all others but hidden ones, ascending; folders among them.
        fresh: whether the checkpoint of another job of Lamina's may be replaced, too.
    """

    output: Path
    ours: frozenset[str]
    of_lamina: frozenset[str]
    foreign: tuple[str, ...]
    fresh: bool

    def replaceable(self) -> frozenset[str]:
        """What this job may replace and remove.

        Raises:
            InputError: OUTPUT holds anything else; naming it.
        """
        if self.foreign:
            more = f" and {len(self.foreign) - SHOWN_FILES} more" if len(self.foreign) > SHOWN_FILES else ""
            raise InputError(
                f"output: {self.output} holds files that Lamina did not write: "
                f"{', '.join(self.foreign[:SHOWN_FILES])}{more}; move them away, or give another directory"
            )
        if self.of_lamina and not self.fresh:
            raise InputError(
                f"output: {self.output} holds a checkpoint of another job; "
                "give another directory, or --fresh to replace it"
            )
        return self.ours | self.of_lamina


def survey_output(output: Path, ledger: Ledger, fresh: bool = False) -> OutputFiles:
    """Tells the files of OUTPUT apart: by the ledger, and by the compression record that lies there.

    Raises StorageError.
    """
    with storage_errors("listing", output):
        found = [entry for entry in os.scandir(output) if not is_hidden(entry.name)] if output.is_dir() else []
    files = {entry.name for entry in found if not entry.is_dir(follow_symlinks=False)}
    recorded, seal = _recorded(output) if RECORD_FILE in files else (frozenset(), None)
    entered = ledger.get(ASSEMBLING)
    ours: set[str] = set()
    if entered and entered["output"] == str(output.resolve()) and _still_there(output, files, entered):
        ours = files.intersection(entered.get("files", files))
    finished = ledger.get(COMPLETE)
    if finished and seal == finished["contract_sha256"]:
        ours |= recorded & files
    of_lamina = (recorded & files) - ours
    foreign = sorted({entry.name for entry in found} - ours - of_lamina)
    return OutputFiles(output, frozenset(ours), frozenset(of_lamina), tuple(foreign), fresh)


def claim_files(ledger: Ledger, output: Path, names: Iterable[str], shards: Iterable[StagedRecord]) -> None:
    """Enters that files of these names in OUTPUT are this job's, before the first is written or replaced.

    `shards`: records of some of them; by their sizes a folder that took OUTPUT's place later is told from it.
    """
    names = sorted(names)
    sizes = {record["size"] for record in shards}
    sizes |= {(output / name).stat().st_size for name in names if _is_shard(name) and (output / name).is_file()}
    entry = AssemblingEntry(output=str(output.resolve()), files=names, shard_bytes=sorted(sizes))
    ledger.commit(ASSEMBLING, entry)


def _still_there(output: Path, files: set[str], entered: AssemblingEntry) -> bool:
    """Whether the folder is the one that was written to: holds the record, or a shard of a size that it had."""
    sizes = entered.get("shard_bytes")
    if not sizes or RECORD_FILE in files:
        return True
    return any(_is_shard(name) and (output / name).stat().st_size in sizes for name in files)


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _recorded(output: Path) -> tuple[frozenset[str], str | None]:
    """The names in the compression record, and its digest; none when it is damaged."""
    try:
        compression = read_record(output)
    except (InputError, CorruptError):
        return frozenset(), None
    return frozenset({*compression["files"], *compression["shards"], RECORD_FILE}), compression[SEAL]


@contextmanager
def claim_output(output: Path) -> Iterator[RunLock]:
    """The lock of OUTPUT, held; with it OUTPUT is there. Both go when the block ends, unless OUTPUT holds anything.

    Raises InUseError, and InputError when nothing can be written there.
    """
    lock = RunLock(output, LOCK_FILE, temporary=True)
    made = not os.path.lexists(output)
    try:
        try:
            lock.acquire()
            sweep_partials(output, below=False)  # the probe, too, may come back after a power cut
            probe = partial_path(output / "probe")
            write_durably(probe, b"")
            probe.unlink()
        except StorageError as error:
            raise InputError(f"output {output} cannot be used: {error}") from error
        yield lock
    finally:
        lock.release()
        if made:
            with contextlib.suppress(OSError):  # published to, or never made
                output.rmdir()
