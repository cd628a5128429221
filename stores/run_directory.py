"""RUN_DIR: its layout, and the checks that it is usable and belongs to this job. docs/formats.md#run_dir."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from manifests.errors import InputError, StorageError
from manifests.loading import decode_manifest
from manifests.records import StagedRecord
from manifests.schema import Manifest, completed
from manifests.sweep import SweepPoint, decode_points, decode_sweep
from stores.durable import is_hidden
from stores.ledger import ENTRY_NAME, Ledger
from stores.lock import RunLock
from stores.storage import Place, Storage, open_storage

if TYPE_CHECKING:
    from stores.activations import ActivationStore
    from stores.statistics import StatisticsStore

FINGERPRINT_VERSION = 1
MANIFEST = "manifest.yaml"
FINGERPRINT = "fingerprint.json"
REPORT = "report.html"
SWEEP = "sweep.yaml"
RESULTS = ("sweep.json", "sweep.csv", "sweep.html")
SCALE = "scale.json"
ENDED = "ended.json"  # the outcome of the last run
LEDGER = "ledger"
STAGED = "staged"
LOGS = "logs"
STATISTICS = "statistics.zarr"
ACTIVATIONS = "activations.zarr"
STAGED_NAME = re.compile(r"layer-\d{5,}\.[0-9a-f]{32}\.safetensors")
FOLDERS = (LEDGER, STAGED, LOGS, STATISTICS, ACTIVATIONS)
MAX_FINGERPRINT_BYTES = 256 * 1024 * 1024
SAMPLES_FIELD, PREFIX_FIELD = "calibration_tokens", "manifest.calibration.prefix"
FEEDBACK_FIELD = "manifest.quantize.feedback"
SHOWN_FIELDS = 20
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class FingerprintCheck:
    """The result of comparing a job's fingerprint with the stored one. `RunDirectory.bind` acts on it.

    Attributes:
        kind: `same`: the directory is this job's; `new`: it holds no work, at most a refused start; `fresh`: its work
            is to be removed; `adapted`: it is this job's, once the work that depends on differing fields is undone.
        content: the job's fingerprint.
        differing: the fields in which the stored fingerprint differs.
    """

    kind: Literal["same", "new", "fresh", "adapted"]
    content: Mapping[str, Any]
    differing: tuple[str, ...] = ()

    @property
    def reuses_entries(self) -> bool:
        """True if the existing ledger entries count unchanged."""
        return self.kind == "same"


class RunDirectory:
    """The names and stores of one run directory. Writers, but for `prepare`, must hold the lock.

    The constructor touches nothing. It raises InputError as `open_storage` does.
    """

    def __init__(self, place: Place) -> None:
        self.storage = open_storage(place)
        self.logs = self.storage.below(LOGS)
        self.lock = RunLock(self.storage)
        self.ledger = Ledger(self.storage.below(LEDGER), self.lock)

    @property
    def place(self) -> str:
        """The address, for messages."""
        return self.storage.at()

    def with_ledger(self, ledger: Ledger) -> RunDirectory:
        """Return the same run directory with another ledger."""
        other = copy.copy(self)
        other.ledger = ledger
        return other

    @cached_property
    def statistics(self) -> StatisticsStore:
        """The statistics of each layer."""
        from stores.statistics import StatisticsStore  # imports torch, for which `status` need not wait

        return StatisticsStore(self.storage.below(STATISTICS))

    @cached_property
    def activations(self) -> ActivationStore:
        """Hidden states and calibration tokens."""
        from stores.activations import ActivationStore

        return ActivationStore(self.storage.below(ACTIVATIONS))

    def read_manifest(self) -> Manifest | None:
        """Return the job's resolved manifest; None if none was written yet. Raises InputError."""
        if not self.storage.has(MANIFEST):
            return None
        return decode_manifest(self.storage.read(MANIFEST), self.storage.at(MANIFEST))

    def read_output(self) -> str | None:
        """Return the output address of the job or sweep; None if no manifest was written yet. Raises InputError."""
        if self.storage.has(SWEEP):
            return decode_sweep(self.storage.read(SWEEP), self.storage.at(SWEEP)).output
        manifest = self.read_manifest()
        return manifest.output if manifest else None

    def read_points(self) -> tuple[SweepPoint, ...]:
        """Return the points of the sweep; none if no sweep was written yet. Raises InputError."""
        return decode_points(self.storage.read(SWEEP), self.storage.at(SWEEP)) if self.storage.has(SWEEP) else ()

    def prepare(self, need_bytes: int = 0) -> None:
        """Create the layout and try a write.

        Raises InputError: no directory, not writable, less than `need_bytes` free, or other programs' files in the way.
        """
        try:
            self._check_foreign_files()
            self.storage.prepare((STAGED, LOGS, LEDGER))
            free_bytes = self.storage.free_bytes()
        except StorageError as error:
            raise InputError(f"run_dir {self.place} cannot be used: {error}") from error
        if free_bytes is not None and free_bytes < need_bytes:
            raise InputError(
                f"run_dir {self.place}: {_amount(free_bytes)} free, the job needs about {_amount(need_bytes)}; "
                "free some room, or set run_dir to a larger disk"
            )

    def foreign_files(self) -> list[str]:
        """Return files that Lamina would overwrite or remove, but did not write. Raises StorageError."""
        present = set(self.storage.children())
        if not present or any(map(ENTRY_NAME.fullmatch, self.storage.children(LEDGER))):
            return []
        has_note = self.lock.has_note()
        if self.storage.has(FINGERPRINT) and (has_note or self._has_fingerprint()):
            return []
        # Before the fingerprint, Lamina writes only locks, folders, `scale` requests to the lock's owner, and ENDED.
        files = [MANIFEST, FINGERPRINT, REPORT, SWEEP, *RESULTS, *([] if has_note else [SCALE, ENDED])]
        foreign = [name for name in files if name in present]
        for folder in (STAGED, LEDGER, STATISTICS, ACTIVATIONS):
            foreign += [f"{folder}/{name}" for name in self.storage.children(folder) if not is_hidden(name)]
        return foreign

    def _has_fingerprint(self) -> bool:
        """True if the file looks like a fingerprint of Lamina's, of any version."""
        try:
            content = json.loads(self.storage.read_whole(FINGERPRINT, MAX_FINGERPRINT_BYTES))
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and {"version", "fields"} <= content.keys()

    def _check_foreign_files(self) -> None:
        if foreign := self.foreign_files():
            more = f" and {len(foreign) - SHOWN_FIELDS} more" if len(foreign) > SHOWN_FIELDS else ""
            raise InputError(
                f"run_dir {self.place}: holds other files that would be in the way: "
                f"{', '.join(foreign[:SHOWN_FIELDS])}{more}; move them away, or set another run_dir"
            )

    def request_workers(self, workers: int, token: str) -> None:
        """Ask the owner of the lock with this token for another number of workers. Raises StorageError."""
        self.storage.replace(SCALE, json.dumps({"workers": workers, "token": token}).encode())

    def requested_workers(self, token: str) -> int | None:
        """Return the number of workers requested of the owner with this token; None if there is no request."""
        try:
            request = json.loads(self.storage.read(SCALE))
            return int(request["workers"]) if request["token"] == token else None
        except (OSError, StorageError, ValueError, TypeError, KeyError):
            return None  # no request, or a damaged one, which must not end a job

    def sweep_staged(self, live: Iterable[StagedRecord]) -> int:
        """Remove staged layers without a record in `live`, which a crash before their commit leaves behind.

        Return their number. Touches no file that `write_staged` did not name. Raises StorageError.
        """
        live_paths = {record.path for record in live}
        names = (name for name in self.storage.names(STAGED) if STAGED_NAME.fullmatch(name.removeprefix(f"{STAGED}/")))
        strays = [name for name in names if name not in live_paths]
        self.storage.delete(strays)
        return len(strays) + self.storage.below(STAGED).sweep()

    def check_fingerprint(
        self,
        new: Mapping[str, Any],
        fresh: bool = False,
        adaptable: Callable[[list[str]], bool] = lambda _: False,
        before_work: Collection[str] = (),
    ) -> FingerprintCheck:
        """Compare the job's fingerprint with the stored one; `bind` then makes the directory the job's.

        Args:
            new: the fields of the job's fingerprint.
            fresh: the directory's work, of this or another job, is to be removed.
            adaptable: gets the differing fields; returns True if all work that depends on them can be undone.
            before_work: keys that are committed before any work; a directory with no other keys belongs to no job.

        Raises:
            InputError: another job's directory (names the differing fields), or another version.
            StorageError: it cannot be read.
        """
        self.storage.sweep(below=False)
        self.storage.below(STAGED).sweep()
        content = json.loads(json.dumps({"version": FINGERPRINT_VERSION, "fields": dict(new)}, allow_nan=False))
        if fresh:
            return FingerprintCheck("fresh", content)
        if not self.storage.has(FINGERPRINT):
            if self._has_work(before_work):
                raise InputError(
                    f"run_dir {self.place}: holds work, but no fingerprint.json to identify its job; use --fresh"
                )
            return FingerprintCheck("new", content)
        differing = self._differing(self._read_fingerprint(), content)
        if not differing:
            return FingerprintCheck("same", content)
        if not self._has_work(before_work):
            return FingerprintCheck("new", content, tuple(differing))
        if not adaptable(list(differing)):
            raise InputError(self._refusal(differing))
        return FingerprintCheck("adapted", content, tuple(differing))

    def bind(self, check: FingerprintCheck, adapt: Callable[[], None] = lambda: None) -> None:
        """Make the directory the job's, in an order that is safe against a crash between two steps.

        `adapt` undoes the work that depends on the differing fields; it is called for `adapted`. Raises StorageError.
        """
        if check.kind == "fresh" or (check.kind == "new" and check.differing):
            self._forget()
        elif check.kind == "adapted":
            adapt()
        if not check.reuses_entries:
            content = {**check.content, "sha256": _digest(check.content)}
            self.storage.replace(FINGERPRINT, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")

    def _has_work(self, before_work: Collection[str]) -> bool:
        return any(key not in before_work for key in self.ledger.keys())  # noqa: SIM118 - no mapping

    def _forget(self) -> None:
        """Remove all work, the ledger first: unnamed data is only waste, but an entry without data is an error."""
        self.ledger.clear()
        self.statistics.sweep([])
        self.activations.sweep([])
        self.sweep_staged([])
        self.storage.delete([REPORT])

    def _read_fingerprint(self) -> dict[str, Any]:
        at = self.storage.at(FINGERPRINT)
        try:
            content = json.loads(self.storage.read_whole(FINGERPRINT, MAX_FINGERPRINT_BYTES))
            version = content["version"]
            if version == FINGERPRINT_VERSION:
                dict(content["fields"])
                if content["sha256"] != _digest(content):
                    raise ValueError("it differs from its own sha256")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{at}: damaged ({error}); use --fresh to start over") from error
        if version != FINGERPRINT_VERSION:
            raise InputError(
                f"{at}: version {version}, this Lamina knows {FINGERPRINT_VERSION}; "
                "use the Lamina that wrote it, or use --fresh to start over"
            )
        assert isinstance(content, dict)
        return content

    def _differing(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
        """Return differing field -> its old and new values."""
        stored = {name: completed(value) if name == "manifest" else value for name, value in old["fields"].items()}
        before, after = _flatten(stored), _flatten(new["fields"])
        if PREFIX_FIELD in after and before.get(SAMPLES_FIELD) == after.get(SAMPLES_FIELD):
            before.setdefault(PREFIX_FIELD, after[PREFIX_FIELD])  # a version without prefixes drew the same samples
        return {
            field: f"{field}: {_shown(before, field)} -> {_shown(after, field)}"
            for field in sorted(before.keys() | after.keys())
            if field not in before or field not in after or before[field] != after[field]
        }

    def _refusal(self, differing: Mapping[str, str]) -> str:
        shown = [*differing.values()][:SHOWN_FIELDS]
        more = [f"... and {len(differing) - SHOWN_FIELDS} more"] if len(differing) > SHOWN_FIELDS else []
        lines = [f"run_dir {self.place}: holds another job's work; these differ:", *shown, *more]
        remedy = "set another run_dir, restore these, or use --fresh to start over"
        if f"{PREFIX_FIELD}: (none)" in differing.get(PREFIX_FIELD, ""):
            remedy += (
                "\nan earlier version began this work: its samples have a BOS before each document, and no prefix; "
                "go on with that version, or start over"
            )
        if differing.get(FEEDBACK_FIELD) == f'{FEEDBACK_FIELD}: true -> "both"':
            remedy += "\nan earlier version took feedback: null for true; feedback: true goes on with its work"
        return "\n  ".join(lines) + f"\n{remedy}"


def existing_run(place: Place) -> RunDirectory:
    """Return the run directory of a job that has begun or was refused. Raises InputError if there is none."""
    run_dir = RunDirectory(place)
    if fault := run_dir.storage.fault():
        raise InputError(f"{run_dir.place} is {fault}; give the run_dir of a job's manifest")
    if not has_begun(run_dir.storage):
        raise InputError(
            f"{run_dir.place}: no run directory (it has no {FINGERPRINT}); give the run_dir of a job's manifest"
        )
    return run_dir


def has_begun(run_dir: Storage) -> bool:
    """True in the run directory of a job or sweep that has begun or was refused."""
    return run_dir.has(FINGERPRINT) or run_dir.has(ENDED)


def run_of_job(place: Place) -> RunDirectory:
    """Return the run directory of a job, as `existing_run` does. Raises InputError also for that of a sweep."""
    run_dir = existing_run(place)
    if run_dir.storage.has(SWEEP):
        raise InputError(
            f"{run_dir.place}: the run directory of a sweep; give that of a job. `python -m pipeline.sweep` writes the "
            f"results of all points to {run_dir.storage.at(RESULTS[-1])}, and heals the points in `save` if the sweep "
            "has `heal: {}`; `python -m pipeline.push` takes their checkpoints without --run-dir"
        )
    return run_dir


def _amount(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of all but `sha256`: with it a flipped bit shows as damage, not as another job."""
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
