"""What a run directory tells of its job, finished or not. Changes nothing; needs neither source nor output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from manifests.entries import CurvesEntry, DenseEntry, GradientEntry, LayerEntry, StatisticsEntry
from manifests.errors import InputError, StorageError
from manifests.records import Curve, TensorDescription
from manifests.schema import Manifest
from pipeline.cost_model.estimate import MOMENT_BYTES, Plan, make_plan
from pipeline.driver.ledger_keys import COMPLETE, RANKS
from pipeline.families.family import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.method import Task, task_key
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.reporting.unit_log import SUFFIX
from pipeline.rounding.tasks import rounded_tasks
from stores.headers import DTYPES
from stores.lock import read_lock
from stores.run_directory import ENDED, FINGERPRINT, MANIFEST, existing_run
from stores.storage import Place, Storage, matching

LOG_LINES = 60
OF_A_UNIT = {"unit", "kind", "worker", "ended", "seconds", "peak_bytes", "tokens"}
KINDS = ("layer", "curves", "dense", "gradient", "statistics")


@dataclass(frozen=True)
class Run:
    """A job as its run directory has it.

    Attributes:
        state: running, done, interrupted, failed, or stopped (by what left no record, as SIGKILL).
        ended: how its last run ended: outcome, exit code, error, where; None when that left no record.
        fingerprint: what decides its results: source digests, config, semantic manifest, code, dtype, device.
        commits: (time in seconds, key) of every entry of the ledger that still is the latest, in order of time.
        layers: layer -> its entry.
        ranks, importance, curves: what the ranks follow, as far as it is chosen. `curves` are by task.
        summary: the job's own, once it was done.
        statistics_bytes: layer -> bytes of its moments in memory.
        units: what the last run's workers did, in the order in which they were done (`pipeline.reporting.unit_log`).
        log: the last lines of the last log, and the warnings before them.
    """

    path: str
    state: str
    ended: Mapping[str, Any] | None
    owner: Mapping[str, Any] | None
    manifest: Manifest
    manifest_text: str
    fingerprint: Mapping[str, Any]
    commits: tuple[tuple[float, str], ...]
    layers: Mapping[int, LayerEntry]
    ranks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    importance: Mapping[int, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    record_sha256: str | None = None
    statistics_bytes: Mapping[int, int] = field(default_factory=dict)
    units: tuple[Mapping[str, Any], ...] = ()
    log: tuple[str, ...] = ()

    @cached_property
    def geometry(self) -> Geometry:
        """Of the dense model."""
        return geometry_of(standard_config(self.fingerprint["config"]), 8 * self._itemsize)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """What the manifest claims."""
        tasks = claim_tasks(build_methods(self.manifest), self.geometry)
        return tasks if self.manifest.quantize is None else rounded_tasks(tasks, self.manifest, self.geometry)

    @cached_property
    def plan(self) -> Plan:
        """As the job made it, once it is done; before, with bounds on what it stores."""
        plan = make_plan(self.manifest, self.geometry, self.tasks, self._itemsize, self.geometry.model_bytes())
        made = (self.summary or {}).get("plan", {})
        return replace(plan, **{each.name: made[each.name] for each in fields(Plan) if each.name in made})

    @property
    def _itemsize(self) -> int:
        """Bytes of a number in the dtype of the forward pass."""
        return int(getattr(torch, self.fingerprint["dtype"]).itemsize)

    @cached_property
    def caps(self) -> dict[tuple[str, str], int]:
        """(task, name) -> the full rank, of every rank that is chosen from a range or from a curve."""
        found = {
            (task_key(variable.layer, position, variable.group), variable.name): variable.cap
            for position, method in enumerate(build_methods(self.manifest))
            for variable in method.rank_variables(self.geometry)
        }
        of_curves = {
            (task, name): max(values) for task, curve in self.curves.items() for name, values in curve.ranks.items()
        }
        return found | of_curves

    def stored_bytes(self, layer: int) -> dict[str, int]:
        """What a compressed layer stores, by group; `rest` is what nobody claims."""
        prefixes = [
            (prefix + ".", task.name)
            for task in self.tasks
            if task.layer == layer
            for prefix in (
                *(self.geometry.layers[layer].path(role) for role in task.roles),
                self.geometry.layers[layer].group_path(task.roles, task.name),
            )
        ]
        found: dict[str, int] = {}
        for name, tensor in self.layers[layer].staged.tensors.items():
            fitting = [(len(prefix), group) for prefix, group in prefixes if name.startswith(prefix)]
            group = max(fitting)[1] if fitting else "rest"
            found[group] = found.get(group, 0) + tensor_bytes(tensor)
        return found


def read_run(place: Place) -> Run:
    """Reads all of it. Raises InputError when `place` is no run directory, or not one of this version."""
    run_dir = existing_run(place)
    storage, manifest = run_dir.storage, run_dir.read_manifest()
    if manifest is None:
        raise InputError(
            f"{run_dir.place}: no work has begun there (it has no {MANIFEST}); `python -m pipeline.status "
            f"{run_dir.place}` says how its last start ended"
        )
    fingerprint = _json(storage, FINGERPRINT) or {}
    if not isinstance(fingerprint.get("fields"), dict):
        raise InputError(
            f"{storage.at(FINGERPRINT)}: damaged, so that nobody can tell whose work this is; start over with "
            "`python -m pipeline.run MANIFEST --fresh`"
        )
    ledger = run_dir.ledger
    keys = ledger.keys()
    entries: dict[str, Any] = {key: ledger.get(key) for key in keys if key.split("/")[0] in KINDS}
    complete, ranks = ledger.get(COMPLETE), ledger.get(RANKS)
    owner, ended = read_lock(storage), _json(storage, ENDED)
    if ended and owner and ended.get("run") != owner["token"]:
        ended = None  # of an earlier run
    curves = [entry.curves for entry in entries.values() if isinstance(entry, CurvesEntry)]
    return Run(
        path=storage.address,
        state=_state(owner, ended, complete),
        ended=ended,
        owner=owner,
        manifest=manifest,
        manifest_text=storage.read(MANIFEST).decode(),
        fingerprint=fingerprint["fields"],
        commits=_commits(ledger.storage, keys),
        layers={_layer(key): entry for key, entry in entries.items() if isinstance(entry, LayerEntry)},
        ranks=ranks.ranks if ranks else {},
        importance={int(layer): value for layer, value in ranks.importance.items()} if ranks else {},
        curves={task: curve for found in curves for task, curve in found.items()},
        summary=complete.summary if complete else None,
        record_sha256=complete.contract_sha256 if complete else None,
        statistics_bytes=_statistics_bytes(entries),
        units=_units(run_dir.logs),
        log=_log(run_dir.logs),
    )


def tensor_bytes(tensor: TensorDescription) -> int:
    """Of a tensor as a ledger entry describes it."""
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _state(owner: Mapping[str, Any] | None, ended: Mapping[str, Any] | None, complete: object) -> str:
    if owner is not None and owner.get("alive"):
        return "running"
    if ended is not None:
        return str(ended["outcome"])
    return "done" if complete else "stopped"


def _json(storage: Storage, name: str) -> dict[str, Any] | None:
    """None where there is none, or none that can be read."""
    try:
        found = json.loads(storage.read(name))
    except (OSError, StorageError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _layer(key: str) -> int:
    return int(key.partition("/")[2])


def _statistics_bytes(entries: Mapping[str, Any]) -> dict[int, int]:
    """From the shapes in the entries: moments are float64, stored or not."""
    found: dict[int, int] = {}
    for key, entry in entries.items():
        if isinstance(entry, DenseEntry | GradientEntry | StatisticsEntry):
            size = sum(math.prod(record.shape) for record in entry.statistics.values()) * MOMENT_BYTES
            found[_layer(key)] = found.get(_layer(key), 0) + size
    return {layer: size for layer, size in found.items() if size}


def _commits(ledger: Storage, keys: Sequence[str]) -> tuple[tuple[float, str], ...]:
    times: dict[str, float] = {}
    for name, written in ledger.written().items():
        key = name.rsplit(".", 2)[0].replace(".", "/")
        times[key] = max(times.get(key, 0.0), written)
    return tuple(sorted((times[key], key) for key in keys if key in times))


def _units(logs: Storage) -> tuple[Mapping[str, Any], ...]:
    """Lines that a kill has cut off are left out."""
    found = []
    for line in _last_file(logs, f"*{SUFFIX}"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return tuple(unit for unit in found if isinstance(unit, dict) and unit.keys() >= OF_A_UNIT)


def _log(logs: Storage) -> tuple[str, ...]:
    lines = _last_file(logs, "*.log")
    warnings = [line for line in lines[:-LOG_LINES] if " WARNING " in line or " ERROR " in line]
    return (*warnings[-LOG_LINES:], *lines[-LOG_LINES:])


def _last_file(logs: Storage, pattern: str) -> list[str]:
    """The lines of the last of the files of a kind."""
    names = matching(logs, [pattern])
    return logs.read(names[-1]).decode(errors="replace").splitlines() if names else []
