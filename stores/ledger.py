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
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

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

logger = logging.getLogger(__name__)


class Ledger:
    """The entries of one place. One process commits (it holds the run's lock); any may read meanwhile.

    Data that a record names must be durable before `commit`, and may go only after a later `commit` or `retract`.
    """

    def __init__(self, place: Place, lock: RunLock | None = None) -> None:
        """`lock`: under which it is committed to; see `RunLock.fence`."""
        self.storage = open_storage(place)
        self.lock = lock
        self._told: set[str] = set()  # damaged entries are read again and again

    def commit(self, key: Key[E], record: E) -> None:
        """Makes `record` the one of `key`, durably; then drops what it supersedes.

        Raises:
            ValueError: no key, or something in it that JSON cannot say.
            InUseError: another has taken the lock; nothing was committed.
            StorageError: the entry could not be written; the record before it still counts.
        """
        self._append(key, record)

    def retract(self, key: str) -> None:
        """Undoes the commit of `key`, durably; nothing when there is none. Raises StorageError."""
        if self._generations(key):
            self._append(key, None)

    def get(self, key: Key[E]) -> E | None:
        """The record of `key`; None when it was never committed, was retracted, is damaged or makes no sense (a warning
        says so).

        Raises:
            InputError: the entry was written by a newer Lamina.
            StorageError: the entry cannot be read.
        """
        for _ in range(RACES):
            with suppress(_DroppedMeanwhileError):
                entry = self._latest(key)
                return None if entry is None else entry["record"]
        raise StorageError(f"ledger {self.storage.at()}: entries of {key!r} vanish while read; what cleans up there?")

    def keys(self, prefix: str = "") -> list[Key[Any]]:
        """The committed keys that begin with `prefix`, ascending."""
        return [key for key in self._all_keys() if key.startswith(prefix) and self.get(key) is not None]

    def sweep(self) -> None:
        """Removes temporary files, superseded generations, and retractions that nothing older needs."""
        self.storage.sweep()
        for key in self._all_keys():
            generations = self._generations(key)
            valid = [number for number, name in generations if self._read(name, key, number) is not None]
            if valid:
                self._drop_below(key, valid[-1])
                if self.get(key) is None:  # only now: with an older one there, removing the retraction would undo it
                    self.storage.delete([name for number, name in generations if number >= valid[-1]])

    def clear(self) -> None:
        """Forgets everything, durably. A crash halfway leaves entries that are still true."""
        self.storage.delete([name for key in self._all_keys() for _, name in self._generations(key)])
        self.storage.sweep()

    def _append(self, key: str, record: object) -> None:
        if not KEY.fullmatch(key):
            raise ValueError(f"ledger key {key!r}: expected parts of letters, digits, _ and - with / between them")
        for _ in range(RACES):
            fence = self.lock.fence() if self.lock else 0
            last = max((number for number, _ in self._generations(key)), default=0)
            if self.lock and fence and last >= (fence + 1) * OF_ONE_OWNER:
                self.lock.check()  # a later owner's, unless somebody removed the lock, whose generations began anew
            generation = max(last, fence * OF_ONE_OWNER) + 1
            with suppress(FileExistsError):
                self.storage.put_if_absent(_name(key, generation), _encode(key, generation, record))
                self._drop_below(key, generation)  # only after the new one is durable
                return
        raise StorageError(f"ledger {self.storage.at()}: others commit {key!r} meanwhile; is a second job running?")

    def _drop_below(self, key: str, generation: int) -> None:
        self.storage.delete([name for number, name in self._generations(key) if number < generation])

    def _latest(self, key: str) -> dict[str, Any] | None:
        entries = (self._read(name, key, generation) for generation, name in reversed(self._generations(key)))
        return next((entry for entry in entries if entry is not None), None)

    def _read(self, name: str, key: str, generation: int) -> dict[str, Any] | None:
        try:
            if (size := self.storage.size(name)) > MAX_ENTRY_BYTES:
                raise _DamagedError(f"{size:,} bytes, more than {MAX_ENTRY_BYTES:,}")
            return _decode(self.storage.read(name), key, generation)
        except FileNotFoundError as error:
            raise _DroppedMeanwhileError(name) from error
        except InputError as error:
            raise InputError(f"{self.storage.at(name)}: {error}") from None
        except (_DamagedError, ValueError) as error:
            if name not in self._told:
                at = self.storage.at(name)
                logger.warning("ledger entry %s is damaged (%s): ignored, its work is done again", at, error)
            self._told.add(name)
            return None

    def _generations(self, key: str) -> list[tuple[int, str]]:
        start = key.replace("/", ".") + "."
        matches = (ENTRY_NAME.fullmatch(name) for name in self.storage.names() if name.startswith(start))
        return sorted((int(match["generation"]), match[0]) for match in matches if match and _key_of(match) == key)

    def _all_keys(self) -> list[Key[Any]]:
        return sorted({Key(_key_of(match)) for match in map(ENTRY_NAME.fullmatch, self.storage.names()) if match})


class LedgerPart(Ledger):
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


def _key_of(match: re.Match[str]) -> str:
    return match["key"].replace(".", "/")


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
