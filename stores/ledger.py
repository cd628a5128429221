"""What is done: one small immutable file per commit. docs/formats.md#commits.

`layer/00003` committed for the second time is `layer.00003.000002.json`, created whole and never changed. The highest
generation that validates counts, by its digest and by its class (`manifests.records`); a retraction is a generation
without a record. Here records become JSON and JSON records, and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from manifests.entries import KINDS
from manifests.errors import InputError, StorageError
from manifests.records import E, Key, Record
from stores.lock import RunLock
from stores.storage import Place, open_storage

LEDGER_VERSION = 1
KEY = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
ENTRY_NAME = re.compile(r"(?P<key>[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)\.(?P<generation>\d{6,})\.json")
OF_ONE_OWNER = 1_000_000  # generations of a key: what one owner of a lease commits is below all of the next one's
RACES = 100
MAX_ENTRY_BYTES = 256 * 1024 * 1024
PARALLEL = 16

Listing: TypeAlias = dict[str, dict[int, str]]  # key -> generation -> name
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Ledger:
    """The entries of one place. One process commits (it holds the run's lock); any may read meanwhile.

    Data that a record names must be durable before `commit`, and may go only after a later `commit` or `retract`.
    Entries never change: each is read once. The owner of the lock, who alone adds and removes them, lists them once,
    and again where it commits, to see whether another has followed it; others list them whenever they ask.
    """

    def __init__(self, place: Place, lock: RunLock | None = None) -> None:
        """`lock`: under which it is committed to; see `RunLock.fence`."""
        self.storage = open_storage(place)
        self.lock = lock
        self.guard: Callable[[], None] = lambda: None  # called before each commit: what it raises ends that
        self._entries: dict[str, dict[str, Any] | None] = {}  # by name; None: damaged
        self._written: dict[str, bytes] = {}  # by name, what is committed here and was not asked for yet
        self._known: tuple[str, Listing] | None = None  # by whom it is held, and what there is then

    def commit(self, key: Key[E], record: E) -> None:
        """Makes `record` the one of `key`, durably; then drops what it supersedes.

        Raises:
            ValueError: no key, or something in it that JSON cannot say.
            InUseError: another has taken the lock; nothing was committed.
            StorageError: the entry could not be written; the record before it still counts.

        Raises what `guard` raises, too.
        """
        self.guard()
        self._append(key, record)

    def retract(self, key: str) -> None:
        """Undoes the commit of `key`, durably; nothing when there is none. Raises StorageError."""
        if key in self._listing():
            self._append(key, None)

    def get(self, key: Key[E]) -> E | None:
        """The record of `key`; None when it was never committed, was retracted, is damaged or makes no sense (a warning
        says so).

        Raises:
            InputError: the entry was written by a newer Lamina.
            StorageError: the entry cannot be read.
        """
        found: E | None = self._steadily(lambda listing: self._record(listing.get(key, {})), repr(key))
        return found

    def keys(self, prefix: str = "") -> list[Key[Any]]:
        """The committed keys that begin with `prefix`, ascending."""

        def committed(listing: Listing) -> list[Key[Any]]:
            wanted = {key: names for key, names in listing.items() if key.startswith(prefix)}
            self._read_ahead([names[max(names)] for names in wanted.values()])
            return sorted(Key(key) for key, names in wanted.items() if self._record(names) is not None)

        return self._steadily(committed, f"{prefix!r} and on")

    def sweep(self) -> None:
        """Removes temporary files, superseded generations, and retractions that nothing older needs."""
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
        self._delete(retractions)  # only now: with an older one there, this would undo the retraction

    def clear(self) -> None:
        """Forgets everything, durably. A crash halfway leaves entries that are still true."""
        self._delete([name for names in self._list().values() for name in names.values()])
        self.storage.sweep()

    def _append(self, key: str, record: object) -> None:
        if not KEY.fullmatch(key):
            raise ValueError(f"ledger key {key!r}: expected parts of letters, digits, _ and - with / between them")
        for _ in range(RACES):
            fence = self.lock.fence() if self.lock else 0
            older = dict(self._list().get(key, {}))
            last = max(older, default=0)
            if self.lock and fence and last >= (fence + 1) * OF_ONE_OWNER:
                self.lock.check()  # a later owner's, unless somebody removed the lock, whose generations began anew
            generation = max(last, fence * OF_ONE_OWNER) + 1
            name, data = _name(key, generation), _encode(key, generation, record)
            with suppress(FileExistsError):
                self.storage.put_if_absent(name, data)
                self._written[name] = data
                self._entries.pop(name, None)  # of one that was removed since
                if self._known is not None:
                    self._known[1].setdefault(key, {})[generation] = name
                self._delete(list(older.values()))  # only after the new one is durable
                return
        raise StorageError(f"ledger {self.storage.at()}: others commit {key!r} meanwhile; is a second job running?")

    def _delete(self, names: list[str]) -> None:
        self.storage.delete(names)
        if self._known is not None:
            for key, generation in map(_parts, names):
                self._known[1].get(key, {}).pop(generation, None)
                if not self._known[1].get(key, True):
                    del self._known[1][key]

    def _steadily(self, ask: Callable[[Listing], T], what: str) -> T:
        """What `ask` makes of what there is; asked again where that goes while it is read."""
        for _ in range(RACES):
            with suppress(_DroppedMeanwhileError):
                return ask(self._listing())
            self._known = None
        raise StorageError(f"ledger {self.storage.at()}: entries of {what} vanish while read; what cleans up there?")

    def _record(self, names: Mapping[int, str]) -> Any:
        """The one that counts among the generations of a key."""
        entries = (self._read(names[generation]) for generation in sorted(names, reverse=True))
        entry = next((entry for entry in entries if entry is not None), None)
        return None if entry is None else entry["record"]

    def _read(self, name: str) -> dict[str, Any] | None:
        if name not in self._entries:
            self._entries[name] = self._checked(name)
        return self._entries[name]

    def _read_ahead(self, names: Sequence[str]) -> None:
        """Reads several at once, where reading is waiting."""
        new = [name for name in names if name not in self._entries and name not in self._written]
        if len(new) > 1 and self.storage.folder is None:
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="ledger") as pool:
                list(pool.map(self._read, new))

    def _checked(self, name: str) -> dict[str, Any] | None:
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
        """What there is, as the owner of the lock knows it; for others, as it is now."""
        owner = self.lock.token if self.lock is not None and self.lock.is_held else None
        return self._known[1] if owner and self._known and self._known[0] == owner else self._list()

    def _list(self) -> Listing:
        listing: Listing = {}
        for name in self.storage.names():
            if ENTRY_NAME.fullmatch(name):
                key, generation = _parts(name)
                listing.setdefault(key, {})[generation] = name
        held = self.lock is not None and self.lock.is_held
        self._known = (self.lock.token, listing) if self.lock is not None and held else None
        return listing


class LedgerView(Ledger):
    """A ledger as one of several that share it sees it: its entries are its own, but for those of some kinds.

    A kind is the first part of a key. `KIND/…` is `OWN/KIND/…` in the whole, or `ELSEWHERE[KIND]/KIND/…`; where that
    says nothing ("") all of them see the same.
    """

    def __init__(self, whole: Ledger, own: str, elsewhere: Mapping[str, str]) -> None:
        super().__init__(whole.storage)
        self.whole = whole
        self.own = own
        self.elsewhere = elsewhere

    def commit(self, key: Key[E], record: E) -> None:
        """As `Ledger.commit`."""
        self.whole.commit(self._there(key), record)

    def retract(self, key: str) -> None:
        """As `Ledger.retract`."""
        self.whole.retract(self._there(Key(key)))

    def get(self, key: Key[E]) -> E | None:
        """As `Ledger.get`."""
        return self.whole.get(self._there(key))

    def keys(self, prefix: str = "") -> list[Key[Any]]:
        """Those of its own entries that begin with `prefix`, ascending."""
        start = f"{self.own}/"
        return [Key(key.removeprefix(start)) for key in self.whole.keys(start + prefix)]

    def sweep(self) -> None:
        """Of the whole."""
        self.whole.sweep()

    def clear(self) -> None:
        """Forgets its own entries, durably."""
        for key in self.keys():
            self.retract(key)

    def _there(self, key: Key[E]) -> Key[E]:
        place = self.elsewhere.get(key.partition("/")[0], self.own)
        return Key(f"{place}/{key}") if place else key


class _DamagedError(Exception):
    """An entry that does not match its own digest, or is none."""


class _DroppedMeanwhileError(Exception):
    """The committing process dropped this generation between listing and reading: a newer one is there."""


def _name(key: str, generation: int) -> str:
    return f"{key.replace('/', '.')}.{generation:06d}.json"


def _parts(name: str) -> tuple[str, int]:
    """Key and generation of an entry, by its name."""
    match = ENTRY_NAME.fullmatch(name)
    assert match is not None
    return match["key"].replace(".", "/"), int(match["generation"])


def _encode(key: str, generation: int, record: object) -> bytes:
    entry = {"version": LEDGER_VERSION, "key": key, "generation": generation, "record": record}
    content = json.dumps(entry, allow_nan=False, default=_as_json)
    entry = json.loads(content)  # tuples and int keys as they will be read back
    return _canonical({**entry, "sha256": hashlib.sha256(_canonical(entry)).hexdigest()})


def _as_json(value: object) -> Any:
    if isinstance(value, Record):
        return value.as_json()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _decode(data: bytes, key: str, generation: int) -> dict[str, Any]:
    try:
        entry = json.loads(data)
        stated = entry.pop("sha256")
        digest = hashlib.sha256(_canonical(entry)).hexdigest()
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise _DamagedError(f"no ledger entry: {error}") from error
    if stated != digest:
        raise _DamagedError("its sha256 does not match")
    version = entry.get("version")
    if version != LEDGER_VERSION:
        raise InputError(
            f"ledger version {version}, this Lamina knows version {LEDGER_VERSION}; "
            "use the Lamina that wrote it, or start over with --fresh"
        )
    if (entry.get("key"), entry.get("generation")) != (key, generation):
        raise _DamagedError(f"it is of {entry.get('key')!r}, generation {entry.get('generation')}")
    assert isinstance(entry, dict)
    if not isinstance(entry.get("record", False), dict | None):
        raise _DamagedError("it holds no record")
    if entry["record"] is not None:
        entry["record"] = _checked(key, entry["record"])
    return entry


def _checked(key: str, record: dict[str, Any]) -> Any:
    """A record as its class has it; of a kind without one, as it is."""
    try:
        kind = next((KINDS[part] for part in key.split("/") if part in KINDS), None)
        return record if kind is None else kind.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _DamagedError(f"it makes no sense: {where}: {first['msg']}") from error


def _canonical(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
