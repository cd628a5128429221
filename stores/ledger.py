"""The ledger of finished work: one small immutable file per commit. docs/formats.md#commits.

The second commit of `layer/00003` is `layer.00003.000002.json`, created whole and never changed. The highest generation
that is valid, by its digest and by its class (`manifests.records`), counts; a retraction is a generation without a
record. Records are converted to and from JSON only here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from manifests.entries import KINDS
from manifests.errors import InputError, StorageError
from manifests.records import E, LedgerKey, Record
from stores.lock import RunLock
from stores.storage import Place, open_storage
from stores.threads import parallel_map

LEDGER_VERSION = 1
KEY = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
ENTRY_NAME = re.compile(r"(?P<key>[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)\.(?P<generation>\d{6,})\.json")
GENERATIONS_PER_OWNER = 1_000_000  # of a key: each owner of a lease commits above all earlier owners
RACES = 100
MAX_ENTRY_BYTES = 256 * 1024 * 1024
PARALLEL = 16

Listing: TypeAlias = dict[str, dict[int, str]]  # key -> generation -> name
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Ledger:
    """The entries of one storage. One process commits (it holds the run's lock); any process may read meanwhile.

    Data that a record names must be durable before `commit`, and may be removed only after a later `commit` or
    `retract`. Entries never change, so each is read once. The lock's owner, which alone adds and removes entries, lists
    them once, and again at each commit, to see whether another owner has followed; other processes list at each call.
    """

    def __init__(self, place: Place, lock: RunLock | None = None) -> None:
        """`lock`: the lock that commits need; see `RunLock.fence`."""
        self.storage = open_storage(place)
        self.lock = lock
        self.guard: Callable[[], None] = lambda: None  # called before each commit, which fails if it raises
        self._entries: dict[str, dict[str, Any] | None] = {}  # by name; None: damaged
        self._written: dict[str, bytes] = {}  # by name: committed by this process, not read yet
        self._listed: tuple[str, Listing] | None = None  # the lock's owner, and the entries it listed

    def commit(self, key: LedgerKey[E], record: E) -> None:
        """Make `record` the current one of `key`, durably; then remove older generations.

        Raises:
            ValueError: an invalid key, or a record that JSON cannot represent.
            InUseError: another process has the lock; nothing was committed.
            StorageError: the entry could not be written; the earlier record still counts.

        Also raises any error of `guard`.
        """
        self.guard()
        self._append(key, record)

    def retract(self, key: str) -> None:
        """Undo the commit of `key`, durably; does nothing if there is none. Raises StorageError."""
        if key in self._listing():
            self._append(key, None)

    def get(self, key: LedgerKey[E]) -> E | None:
        """Return the record of `key`; None if it was never committed, was retracted, or is damaged (with a warning).

        Raises:
            InputError: the entry was written by a newer Lamina.
            StorageError: the entry cannot be read.
        """
        record: E | None = self._retry_dropped(lambda listing: self._record(listing.get(key, {})), repr(key))
        return record

    def keys(self, prefix: str = "") -> list[LedgerKey[Any]]:
        """Return the committed keys that begin with `prefix`, ascending."""

        def committed(listing: Listing) -> list[LedgerKey[Any]]:
            matches = {key: names for key, names in listing.items() if key.startswith(prefix)}
            self._read_ahead([names[max(names)] for names in matches.values()])
            return sorted(LedgerKey(key) for key, names in matches.items() if self._record(names) is not None)

        return self._retry_dropped(committed, f"{prefix!r} and on")

    def sweep(self) -> None:
        """Remove temporary files, superseded generations, and retractions without older generations."""
        self.storage.sweep()
        listing, superseded, retractions = self._list(), [], []
        self._read_ahead([name for names in listing.values() for name in names.values()])
        for names in listing.values():
            valid = [number for number in sorted(names) if self._read(names[number]) is not None]
            if valid:
                superseded += [names[number] for number in names if number < valid[-1]]
                if self._record(names) is None:
                    retractions += [names[number] for number in names if number >= valid[-1]]
        self._delete(superseded)
        self._delete(retractions)  # last: while an older generation exists, this would undo the retraction

    def clear(self) -> None:
        """Remove all entries, durably. After a crash halfway the remaining entries are still valid."""
        self._delete([name for names in self._list().values() for name in names.values()])
        self.storage.sweep()

    def _append(self, key: str, record: object) -> None:
        if not KEY.fullmatch(key):
            raise ValueError(f"ledger key {key!r}: expected parts of letters, digits, _ and - with / between them")
        for _ in range(RACES):
            fence = self.lock.fence() if self.lock else 0
            older = dict(self._list().get(key, {}))
            last = max(older, default=0)
            if self.lock and fence and last >= (fence + 1) * GENERATIONS_PER_OWNER:
                self.lock.check()  # a later owner's entry, unless the lock was removed and its generations restarted
            generation = max(last, fence * GENERATIONS_PER_OWNER) + 1
            name, data = _name(key, generation), _encode(key, generation, record)
            with suppress(FileExistsError):
                self.storage.put_if_absent(name, data)
                self._written[name] = data
                self._entries.pop(name, None)  # of an earlier entry of this name
                if self._listed is not None:
                    self._listed[1].setdefault(key, {})[generation] = name
                self._delete(list(older.values()))  # only after the new one is durable
                return
        raise StorageError(f"ledger {self.storage.at()}: other processes commit {key!r}, too; is a second job running?")

    def _delete(self, names: list[str]) -> None:
        self.storage.delete(names)
        if self._listed is not None:
            for key, generation in map(_parts, names):
                self._listed[1].get(key, {}).pop(generation, None)
                if not self._listed[1].get(key, True):
                    del self._listed[1][key]

    def _retry_dropped(self, ask: Callable[[Listing], T], what: str) -> T:
        """Call `ask` with the listing; again with a new one if an entry is removed while it is read."""
        for _ in range(RACES):
            with suppress(_DroppedMeanwhileError):
                return ask(self._listing())
            self._listed = None
        raise StorageError(
            f"ledger {self.storage.at()}: entries of {what} are removed while they are read; find what removes files "
            "there"
        )

    def _record(self, names: Mapping[int, str]) -> Any:
        """Return the record of the highest valid generation."""
        entries = (self._read(names[generation]) for generation in sorted(names, reverse=True))
        entry = next((entry for entry in entries if entry is not None), None)
        return None if entry is None else entry["record"]

    def _read(self, name: str) -> dict[str, Any] | None:
        if name not in self._entries:
            self._entries[name] = self._load(name)
        return self._entries[name]

    def _read_ahead(self, names: Sequence[str]) -> None:
        """Read several entries in parallel where each read is a request."""
        new = [name for name in names if name not in self._entries and name not in self._written]
        if len(new) > 1 and self.storage.folder is None:
            parallel_map(self._read, new, PARALLEL)

    def _load(self, name: str) -> dict[str, Any] | None:
        try:
            data = self._written.pop(name, None) or self.storage.read_whole(name, MAX_ENTRY_BYTES)
            return _decode(data, *_parts(name))
        except FileNotFoundError as error:
            raise _DroppedMeanwhileError(name) from error
        except InputError as error:
            raise InputError(f"{self.storage.at(name)}: {error}") from None
        except (_DamagedError, ValueError) as error:
            at = self.storage.at(name)
            logger.warning("ledger entry %s is damaged (%s): ignored, its work is done again", at, error)
            return None

    def _listing(self) -> Listing:
        """Return the entries: as last listed by the lock's owner; for other processes, as they are now."""
        owner = self._owner()
        return self._listed[1] if owner and self._listed and self._listed[0] == owner else self._list()

    def _list(self) -> Listing:
        listing: Listing = {}
        for name in self.storage.names():
            if ENTRY_NAME.fullmatch(name):
                key, generation = _parts(name)
                listing.setdefault(key, {})[generation] = name
        owner = self._owner()
        self._listed = (owner, listing) if owner else None
        return listing

    def _owner(self) -> str | None:
        return self.lock.token if self.lock is not None and self.lock.is_held else None


class LedgerView(Ledger):
    """A part of a ledger that several jobs share: a view shows its own entries and those of shared kinds.

    A kind is the first part of a key. `KIND/…` is stored as `OWN/KIND/…`, or as `ELSEWHERE[KIND]/KIND/…` if `elsewhere`
    has the kind; where that prefix is "", all views share the entries.
    """

    def __init__(self, whole: Ledger, own: str, elsewhere: Mapping[str, str]) -> None:
        super().__init__(whole.storage)
        self.whole = whole
        self.own = own
        self.elsewhere = elsewhere

    def commit(self, key: LedgerKey[E], record: E) -> None:
        self.whole.commit(self._stored_key(key), record)

    def retract(self, key: str) -> None:
        self.whole.retract(self._stored_key(LedgerKey(key)))

    def get(self, key: LedgerKey[E]) -> E | None:
        return self.whole.get(self._stored_key(key))

    def keys(self, prefix: str = "") -> list[LedgerKey[Any]]:
        """Return the view's own keys that begin with `prefix`, ascending."""
        start = f"{self.own}/"
        return [LedgerKey(key.removeprefix(start)) for key in self.whole.keys(start + prefix)]

    def sweep(self) -> None:
        """Sweep the whole ledger."""
        self.whole.sweep()

    def clear(self) -> None:
        """Remove the view's own entries, durably."""
        for key in self.keys():
            self.retract(key)

    def _stored_key(self, key: LedgerKey[E]) -> LedgerKey[E]:
        prefix = self.elsewhere.get(key.partition("/")[0], self.own)
        return LedgerKey(f"{prefix}/{key}") if prefix else key


class _DamagedError(Exception):
    """An invalid entry, or one that does not match its own digest."""


class _DroppedMeanwhileError(Exception):
    """The committing process removed this generation between listing and reading: a newer one exists."""


def _name(key: str, generation: int) -> str:
    return f"{key.replace('/', '.')}.{generation:06d}.json"


def _parts(name: str) -> tuple[str, int]:
    """Split an entry's name into key and generation."""
    match = ENTRY_NAME.fullmatch(name)
    assert match is not None
    return match["key"].replace(".", "/"), int(match["generation"])


def _encode(key: str, generation: int, record: object) -> bytes:
    entry = {"version": LEDGER_VERSION, "key": key, "generation": generation, "record": record}
    content = json.dumps(entry, allow_nan=False, default=_as_json)
    entry = json.loads(content)  # tuples and int keys become what a reader gets
    return _compact({**entry, "sha256": hashlib.sha256(_canonical(entry)).hexdigest()})


def _as_json(value: object) -> Any:
    if isinstance(value, Record):
        return value.as_json()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _decode(data: bytes, key: str, generation: int) -> dict[str, Any]:
    try:
        entry = json.loads(data)
        stated = entry.pop("sha256")
        digest = hashlib.sha256(_canonical(entry)).hexdigest()
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise _DamagedError(f"not a ledger entry: {error}") from error
    if stated != digest:
        raise _DamagedError("its sha256 does not match")
    version = entry.get("version")
    if version != LEDGER_VERSION:
        raise InputError(
            f"ledger version {version}, this Lamina knows version {LEDGER_VERSION}; "
            "use the Lamina that wrote it, or start over with --fresh"
        )
    if (entry.get("key"), entry.get("generation")) != (key, generation):
        raise _DamagedError(f"it belongs to {entry.get('key')!r}, generation {entry.get('generation')}")
    assert isinstance(entry, dict)
    if not isinstance(entry.get("record", False), dict | None):
        raise _DamagedError("it holds no record")
    if entry["record"] is not None:
        entry["record"] = _validated(key, entry["record"])
    return entry


def _validated(key: str, record: dict[str, Any]) -> Any:
    """Validate a record by the class of its kind; kinds without a class pass unchanged."""
    try:
        kind = next((KINDS[part] for part in key.split("/") if part in KINDS), None)
        return record if kind is None else kind.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _DamagedError(f"invalid record: {where}: {first['msg']}") from error


def _canonical(entry: dict[str, Any]) -> bytes:
    """Return the bytes of which an entry's digest is taken. The stored ones keep the order of fields, for summaries."""
    return _compact(entry, sort_keys=True)


def _compact(entry: dict[str, Any], sort_keys: bool = False) -> bytes:
    text = json.dumps(entry, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()
