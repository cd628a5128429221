"""OUTPUT before anything is written there: the lock that one job holds on it, and whose files it holds already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manifests.entries import AssemblingEntry
from manifests.errors import CorruptError, InputError, StorageError
from manifests.records import StagedRecord
from pipeline.checkpoint.compression_record import RECORD_FILE, SEAL, read_record
from pipeline.checkpoint.listing import listed_files, sweep_halves
from pipeline.driver.ledger_keys import ASSEMBLING, COMPLETE
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.storage import Place, Storage, open_storage

LOCK_FILE = ".lamina.lock"
SHOWN_FILES = 20


@dataclass(frozen=True)
class OutputFiles:
    """The files of OUTPUT that are there.

    Attributes:
        output: the place, as messages have it.
        ours: those of this job, also of a run that was interrupted: they may be replaced and removed.
        of_lamina: those of the checkpoint of another of Lamina's jobs.
        foreign: all others but hidden ones, ascending; folders among them.
        fresh: whether the checkpoint of another job of Lamina's may be replaced, too.
    """

    output: str
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


def survey_output(output: Place, ledger: Ledger, fresh: bool = False) -> OutputFiles:
    """Tells the files of OUTPUT apart: by the ledger, and by the compression record that lies there.

    Raises StorageError.
    """
    storage = open_storage(output)
    found = {*listed_files(storage)}
    files = found.difference(storage.folders())
    recorded, seal = _recorded(storage) if RECORD_FILE in files else (frozenset(), None)
    entered = ledger.get(ASSEMBLING)
    ours: set[str] = set()
    if entered and entered.output == storage.address and _still_there(storage, files, entered):
        ours = files.intersection(files if entered.files is None else entered.files)
    finished = ledger.get(COMPLETE)
    if finished and seal == finished.contract_sha256:
        ours |= recorded & files
    of_lamina = (recorded & files) - ours
    foreign = sorted(found - ours - of_lamina)
    return OutputFiles(storage.at(), frozenset(ours), frozenset(of_lamina), tuple(foreign), fresh)


def claim_files(ledger: Ledger, output: Place, names: Iterable[str], shards: Iterable[StagedRecord]) -> None:
    """Enters that files of these names in OUTPUT are this job's, before the first is written or replaced.

    `shards`: records of some of them; by their sizes a folder that took OUTPUT's place later is told from it.
    """
    storage, names = open_storage(output), sorted(names)
    sizes = {record.size for record in shards}
    sizes |= {storage.size(name) for name in storage.files() if name in names and _is_shard(name)}
    entry = AssemblingEntry(output=storage.address, files=tuple(names), shard_bytes=tuple(sorted(sizes)))
    ledger.commit(ASSEMBLING, entry)


def _still_there(storage: Storage, files: set[str], entered: AssemblingEntry) -> bool:
    """Whether the folder is the one that was written to: holds the record, or a shard of a size that it had."""
    sizes = entered.shard_bytes
    if not sizes or RECORD_FILE in files:
        return True
    return any(_is_shard(name) and storage.has(name) and storage.size(name) in sizes for name in files)


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _recorded(output: Storage) -> tuple[frozenset[str], str | None]:
    """The names in the compression record, and its digest; none when it is damaged."""
    try:
        compression = read_record(output)
    except (InputError, CorruptError):
        return frozenset(), None
    return frozenset({*compression["files"], *compression["shards"], RECORD_FILE}), compression[SEAL]


@contextmanager
def claim_output(output: Place) -> Iterator[RunLock]:
    """The lock of OUTPUT, held; with it OUTPUT is there. Both go when the block ends, unless OUTPUT holds anything.

    Raises InUseError, and InputError when nothing can be written there.
    """
    storage = open_storage(output)
    lock = RunLock(storage, LOCK_FILE, temporary=True)
    made = not storage.exists()
    try:
        try:
            lock.acquire()
            sweep_halves(storage)  # the probe, too, may come back after a power cut
            storage.prepare()
        except StorageError as error:
            raise InputError(f"output {storage.at()} cannot be used: {error}") from error
        yield lock
    finally:
        lock.release()
        if made:
            storage.remove_empty()
