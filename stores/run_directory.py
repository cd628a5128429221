"""RUN_DIR: its layout, whether it can be used, and whether it belongs to the job at hand. docs/formats.md#run_dir."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import InputError, StorageError
from manifests.schema import completed
from stores.durable import (
    fsync_directory,
    is_hidden,
    make_directory,
    partial_path,
    read_whole,
    storage_errors,
    sweep_partials,
    write_durably,
)
from stores.ledger import ENTRY_NAME, Ledger
from stores.lock import RunLock

if TYPE_CHECKING:
    from stores.activations import ActivationStore
    from stores.statistics import StatisticsStore

FINGERPRINT_VERSION = 1
LEDGER = "ledger"
STATISTICS = "statistics.zarr"
ACTIVATIONS = "activations.zarr"
MAX_FINGERPRINT_BYTES = 256 * 1024 * 1024
SHOWN_FIELDS = 20
SHOWN_CHARACTERS = 60


class RunDirectory:
    """The paths and stores below one run directory. Everything but `prepare` needs the lock held by this process.

    Nothing is touched by making one. Raises InputError when `path` is a bucket's address.
    """

    def __init__(self, path: str | Path) -> None:
        if "://" in str(path):
            raise InputError(f"run_dir {path}: buckets cannot hold a run yet; give a directory")
        self.path = Path(path)
        self.manifest = self.path / "manifest.yaml"
        self.fingerprint = self.path / "fingerprint.json"
        self.staged = self.path / "staged"
        self.logs = self.path / "logs"
        self.report = self.path / "report.html"
        self.scale = self.path / "scale.json"
        self.ended = self.path / "ended.json"
        self.ledger = Ledger(self.path / LEDGER)
        self.lock = RunLock(self.path)

    @cached_property
    def statistics(self) -> StatisticsStore:
        """What was measured of each layer."""
        from stores.statistics import StatisticsStore  # imports torch, for which `status` need not wait

        return StatisticsStore(self.path / STATISTICS)

    @cached_property
    def activations(self) -> ActivationStore:
        """Hidden states and calibration tokens."""
        from stores.activations import ActivationStore

        return ActivationStore(self.path / ACTIVATIONS)

    def prepare(self, need_bytes: int = 0) -> None:
        """Creates the layout and tries a write.

        Raises:
            InputError: no directory, not writable, less than `need_bytes` free, or files of others in the way.
        """
        probe = partial_path(self.path / "probe")
        try:
            self._check_foreign_files()
            for directory in (self.path, self.staged, self.logs, self.path / LEDGER):
                make_directory(directory)
            write_durably(probe, b"probe")
            with storage_errors("measuring", self.path):
                probe.unlink()
                free_bytes = shutil.disk_usage(self.path).free
        except StorageError as error:
            raise InputError(f"run_dir {self.path} cannot be used: {error}") from error
        if free_bytes < need_bytes:
            raise InputError(
                f"run_dir {self.path}: {free_bytes / 1e9:.1f} GB free, the job needs about {need_bytes / 1e9:.1f} GB; "
                "free some room, or set run_dir to a larger disk"
            )

    def foreign_files(self) -> list[str]:
        """What has a name that Lamina would write or remove, though Lamina did not write it. Raises StorageError."""
        with storage_errors("listing", self.path):
            if not self.path.is_dir() or any(map(ENTRY_NAME.fullmatch, _names(self.path / LEDGER))):
                return []
            has_note = self.lock.has_note()
            if self.fingerprint.is_file() and (has_note or _is_fingerprint(self.fingerprint)):
                return []
            # Nothing is written before the fingerprint but the locks, what `scale` asks of their owner, and folders.
            files = [self.manifest, self.fingerprint, self.report, self.ended, *([] if has_note else [self.scale])]
            foreign = [path.name for path in files if os.path.lexists(path)]
            for folder in (self.staged, self.path / LEDGER, self.path / STATISTICS, self.path / ACTIVATIONS):
                foreign += [f"{folder.name}/{name}" for name in sorted(_names(folder)) if not is_hidden(name)]
            return foreign

    def _check_foreign_files(self) -> None:
        if foreign := self.foreign_files():
            more = f" and {len(foreign) - SHOWN_FIELDS} more" if len(foreign) > SHOWN_FIELDS else ""
            raise InputError(
                f"run_dir {self.path}: holds files of others that would be in the way: "
                f"{', '.join(foreign[:SHOWN_FIELDS])}{more}; move them away, or set another run_dir"
            )

    def ask_for_workers(self, workers: int, token: str) -> None:
        """Leaves word for the owner of the lock with this token. Needs no lock. Raises StorageError."""
        write_durably(self.scale, json.dumps({"workers": workers, "token": token}).encode())

    def workers_asked_for(self, token: str) -> int | None:
        """What was asked of the owner with this token, if anything: a later one starts as its manifest says."""
        try:
            asked = json.loads(self.scale.read_bytes())
            return int(asked["workers"]) if asked["token"] == token else None
        except (OSError, ValueError, TypeError, KeyError):
            return None  # not asked, or not in a way that a job should end by

    def check_fingerprint(
        self, new: Mapping[str, Any], fresh: bool = False, adapt: Callable[[list[str]], bool] = lambda _: False
    ) -> bool:
        """Binds the directory to a job, or checks that it is this job's. Returns whether it starts from nothing.

        `fresh` forgets what another (or the same) job has done, in the order that a crash between two steps allows.
        `adapt` is given the fields that differ; if it has taken back all work that depends on them, it returns True.

        Raises:
            InputError: it is another job's, naming the fields that differ; or of another version.
            StorageError: it cannot be read or written.
        """
        sweep_partials(self.path, below=False)
        sweep_partials(self.staged)
        content = json.loads(json.dumps({"version": FINGERPRINT_VERSION, "fields": dict(new)}, allow_nan=False))
        if fresh:
            self._forget()
        elif self.fingerprint.exists():
            differing = self._differing(self._read_fingerprint(), content)
            if not differing:
                return False
            if not adapt(list(differing)):
                raise InputError(self._refusal(list(differing.values())))
            self._bind(content)
            return False
        elif self.ledger.keys():
            raise InputError(f"run_dir {self.path}: holds work, but no fingerprint.json to tell whose; use --fresh")
        self._bind(content)
        return True

    def _bind(self, content: Mapping[str, Any]) -> None:
        content = {**content, "sha256": _digest(content)}
        write_durably(self.fingerprint, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")

    def _forget(self) -> None:
        """The ledger first: data that no entry names is only waste, an entry whose data is gone would be a lie."""
        self.ledger.clear()
        self.statistics.sweep([])
        self.activations.sweep([])
        from stores.staging import sweep_staged  # imports torch

        sweep_staged(self.path, [])
        make_directory(self.staged)
        with storage_errors("removing", self.report):
            self.report.unlink(missing_ok=True)
        fsync_directory(self.path)

    def _read_fingerprint(self) -> dict[str, Any]:
        try:
            content = json.loads(read_whole(self.fingerprint, MAX_FINGERPRINT_BYTES))
            version = content["version"]
            if version == FINGERPRINT_VERSION:
                dict(content["fields"])
                if content["sha256"] != _digest(content):
                    raise ValueError("it differs from its own sha256")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{self.fingerprint}: damaged ({error}); use --fresh to start over") from error
        if version != FINGERPRINT_VERSION:
            raise InputError(
                f"{self.fingerprint}: version {version}, this Lamina knows {FINGERPRINT_VERSION}; "
                "go on with the Lamina that wrote it, or use --fresh to start over"
            )
        assert isinstance(content, dict)
        return content

    def _differing(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
        """Field -> its values before and now."""
        known = {name: completed(value) if name == "manifest" else value for name, value in old["fields"].items()}
        before, after = _flatten(known), _flatten(new["fields"])
        return {
            field: f"{field}: {_shown(before, field)} -> {_shown(after, field)}"
            for field in sorted(before.keys() | after.keys())
            if field not in before or field not in after or before[field] != after[field]
        }

    def _refusal(self, differing: list[str]) -> str:
        more = [f"... and {len(differing) - SHOWN_FIELDS} more"] if len(differing) > SHOWN_FIELDS else []
        lines = [f"run_dir {self.path}: holds another job's work; these differ:", *differing[:SHOWN_FIELDS], *more]
        return "\n  ".join(lines) + "\nset another run_dir, restore these, or use --fresh to start over"


def _names(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def _is_fingerprint(path: Path) -> bool:
    """Whether it looks like one of Lamina's, of any version."""
    try:
        content = json.loads(read_whole(path, MAX_FINGERPRINT_BYTES))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"version", "fields"} <= content.keys()


def _digest(content: Mapping[str, Any]) -> str:
    """Of all but `sha256`: a flipped bit is to look like damage, not like another job."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {path: leaf for key, child in value.items() for path, leaf in _flatten(child, f"{prefix}{key}.").items()}
    if isinstance(value, list) and any(isinstance(child, dict) for child in value):
        return _flatten(dict(enumerate(value)), prefix)
    return {prefix.removesuffix("."): value}


def _shown(fields: Mapping[str, Any], field: str) -> str:
    if field not in fields:
        return "(none)"
    text = json.dumps(fields[field])
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
