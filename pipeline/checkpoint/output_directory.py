"""OUTPUT before a job writes to it: its lock, and the owners of the files in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manifests.entries import AssemblingEntry
from manifests.errors import CorruptError, InputError, StorageError
from manifests.records import StagedRecord
from pipeline.checkpoint.compression_record import RECORD_FILE, SEAL, read_record
from pipeline.checkpoint.listing import listed_files, sweep_halves
from pipeline.driver.ledger_keys import ASSEMBLING, COMPLETE, RESULT
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.storage import Place, Storage, open_storage

LOCK_FILE = ".lamina.lock"
SHOWN_FILES = 20


@dataclass(frozen=True)
class OutputFiles:
    """The files in OUTPUT, by owner.

    Attributes:
        output: the place, for messages.
        ours: files of this job and of its interrupted runs, which may be replaced and removed.
        of_lamina: files of a checkpoint that another job of Lamina wrote.
        foreign: all other files and folders that are not hidden, ascending.
        fresh: `of_lamina` may also be replaced.
    """

    output: str
    ours: frozenset[str]
    of_lamina: frozenset[str]
    foreign: tuple[str, ...]
    fresh: bool

    def replaceable(self) -> frozenset[str]:
        """Return the files that this job may replace and remove. Raises InputError if OUTPUT has others."""
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
    """Determine the owners of the files in OUTPUT from the ledger and OUTPUT's compression record.

    Raises StorageError.
    """
    storage = open_storage(output)
    names = {*listed_files(storage)}
    files = names.difference(storage.folders())
    recorded, seal = _recorded(storage) if RECORD_FILE in files else (frozenset(), None)
    claim = ledger.get(ASSEMBLING)
    ours: set[str] = set()
    if claim and claim.output == storage.address and _is_same_folder(storage, files, claim):
        ours = files.intersection(files if claim.files is None else claim.files)
    finished, point = ledger.get(COMPLETE), ledger.get(RESULT)
    if seal is not None and seal in (finished and finished.contract_sha256, point and point.seal):
        ours |= recorded & files
    of_lamina = (recorded & files) - ours
    foreign = sorted(names - ours - of_lamina)
    return OutputFiles(storage.at(), frozenset(ours), frozenset(of_lamina), tuple(foreign), fresh)


def claim_files(ledger: Ledger, output: Place, names: Iterable[str], shards: Iterable[StagedRecord]) -> None:
    """Record in the ledger that files of these names in OUTPUT belong to this job, before any is written.

    `shards`: records of some of them, whose sizes distinguish OUTPUT from a folder that replaces it later.
    """
    storage, names = open_storage(output), sorted(names)
    sizes = {record.size for record in shards}
    sizes |= {storage.size(name) for name in storage.files() if name in names and _is_shard(name)}
    entry = AssemblingEntry(output=storage.address, files=tuple(names), shard_bytes=tuple(sorted(sizes)))
    ledger.commit(ASSEMBLING, entry)


def _is_same_folder(storage: Storage, files: set[str], claim: AssemblingEntry) -> bool:
    """Return True if the folder is the claimed one: if it has the record, or a shard with a size in the claim."""
    sizes = claim.shard_bytes
    if not sizes or RECORD_FILE in files:
        return True
    return any(_is_shard(name) and storage.has(name) and storage.size(name) in sizes for name in files)


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _recorded(output: Storage) -> tuple[frozenset[str], str | None]:
    """Return the file names in the compression record and its digest, or nothing if it is damaged."""
    try:
        compression = read_record(output)
    except (InputError, CorruptError):
        return frozenset(), None
    return frozenset({*compression["files"], *compression["shards"], RECORD_FILE}), compression[SEAL]


@contextmanager
def claim_output(output: Place) -> Iterator[RunLock]:
    """Create and lock OUTPUT for the block. At the end, release the lock, and remove OUTPUT if it is new and empty.

    Raises InUseError, and InputError if OUTPUT is not writable.
    """
    storage = open_storage(output)
    lock = RunLock(storage, LOCK_FILE, temporary=True)
    is_new = not storage.exists()
    try:
        try:
            lock.acquire()
            sweep_halves(storage)  # also the file of a write probe that a power cut left behind
            storage.prepare()
        except StorageError as error:
            raise InputError(f"output {storage.at()} cannot be used: {error}") from error
        yield lock
    finally:
        lock.release()
        if is_new:
            storage.remove_empty()
