"""Reads a run directory for a report, without source and output. Writes nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch

from manifests.entries import CurvesEntry, DenseEntry, GradientEntry, HealingCurve, LayerEntry, StatisticsEntry
from manifests.errors import InputError
from manifests.quantize import OUTER_ROLES
from manifests.records import Curve
from manifests.schema import Manifest
from pipeline.cost_model.estimate import Plan, make_plan
from pipeline.cost_model.memory import MOMENT_BYTES
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.driver.ledger_keys import COMPLETE, HEALED, HEALING, RANKS
from pipeline.families.geometry import Geometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.experts.completing import with_samples_of_others
from pipeline.methods.method import Task, task_key
from pipeline.methods.registry import build_methods, claim_tasks
from pipeline.reporting.unit_log import SUFFIX
from pipeline.rounding.tasks import rounded_tasks
from stores.headers import DTYPES
from stores.json_files import read_object
from stores.ledger import Ledger
from stores.lock import read_lock
from stores.run_directory import ENDED, FINGERPRINT, MANIFEST, RunDirectory
from stores.storage import Storage, matching

LOG_LINES = 60
UNIT_FIELDS = {"unit", "kind", "worker", "ended", "seconds", "peak_bytes", "tokens"}
T = TypeVar("T")
Data: TypeAlias = list[tuple[T, Mapping[str, str]]]  # of each plot: what it draws, and words for its texts
KINDS = ("layer", "curves", "dense", "gradient", "statistics")


@dataclass(frozen=True)
class Run:
    """The contents of a run directory.

    Attributes:
        state: running, done, interrupted, failed, or stopped (without a record, as by SIGKILL).
        ended: the record of the end of the last run: outcome, exit code, error, where; None without one.
        fingerprint: decides the results: source digests, config, semantic manifest, code, dtype, device.
        commits: (Unix time, key) of the current ledger entries, in order of time.
        layers: layer -> ledger entry.
        ranks: task -> ranks, once they are chosen; importance: layer -> share; curves: by task.
        healing: the divergences of a healing, finished or not; None without one.
        summary: the summary of the finished job; empty before.
        statistics_bytes: layer -> bytes of its moments in memory.
        units: finished units of the last run, in the order in which they finished (`pipeline.reporting.unit_log`).
        log: the last lines of the last log, and the warnings before them.
    """

    path: str
    state: str
    ended: Mapping[str, Any] | None
    manifest: Manifest
    manifest_text: str
    fingerprint: Mapping[str, Any]
    commits: tuple[tuple[float, str], ...]
    layers: Mapping[int, LayerEntry]
    ranks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    importance: Mapping[int, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    healing: HealingCurve | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    record_sha256: str | None = None
    statistics_bytes: Mapping[int, int] = field(default_factory=dict)
    units: tuple[Mapping[str, Any], ...] = ()
    log: tuple[str, ...] = ()

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry of the dense model."""
        return geometry_of(
            standard_config(self.fingerprint["config"]), 8 * getattr(torch, self.fingerprint["dtype"]).itemsize
        )

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the manifest."""
        tasks = claim_tasks(build_methods(self.manifest), self.geometry)
        rounded = tasks if self.manifest.quantize is None else rounded_tasks(tasks, self.manifest, self.geometry)
        return with_samples_of_others(rounded, self.geometry)

    @cached_property
    def plan(self) -> Plan:
        """The plan in the summary of a finished job; before, a plan with upper bounds on stored bytes."""
        job = PlannedJob.of(self.manifest, self.geometry, self.tasks)
        plan = make_plan(job, self.geometry.model_bytes())
        stored = self.summary.get("plan", {})
        return replace(plan, **{each.name: stored[each.name] for each in fields(Plan) if each.name in stored})

    @cached_property
    def caps(self) -> dict[tuple[str, str], int]:
        """(task, name) -> the full rank, of every rank that is chosen from a range or from a curve."""
        return {
            (task_key(variable.layer, position, variable.group), variable.name): variable.cap
            for position, method in enumerate(build_methods(self.manifest))
            for variable in method.rank_variables(self.geometry)
        } | {(task, name): max(values) for task, curve in self.curves.items() for name, values in curve.ranks.items()}

    @cached_property
    def chosen_points(self) -> dict[str, int]:
        """Task -> the index of its ranks in its curve, of the tasks whose ranks are chosen and on the curve."""
        shared = [(task, self.ranks[task], curve) for task, curve in self.curves.items() if task in self.ranks]
        fitting = [
            (task, place)
            for task, ranks, curve in shared
            for place in reversed(range(len(curve.numbers)))
            if all(curve.ranks[name][place] == rank for name, rank in ranks.items())
        ]
        return dict(fitting)  # the first place of a task

    @property
    def chosen_losses(self) -> dict[str, float]:
        """Task -> the predicted loss of its chosen ranks."""
        return {task: self.curves[task].loss[point] for task, point in self.chosen_points.items()}

    def stored_bytes(self, layer: int) -> dict[str, int]:
        """Return the stored bytes of a compressed layer by group; `rest` is claimed by no task."""
        geometry = self.geometry.layers[layer]
        prefixes = []
        for task in (task for task in self.tasks if task.layer == layer):
            paths = [geometry.path(role) for role in task.roles]
            if not {*task.roles} & {*OUTER_ROLES}:
                paths.append(geometry.group_path(task.roles, task.name))
            prefixes += [(f"{path}.", task.name) for path in paths]
        stored: Counter[str] = Counter()
        for name, tensor in self.layers[layer].staged.tensors.items():
            fitting = ((len(prefix), group) for prefix, group in prefixes if name.startswith(prefix))
            _, group = max(fitting, default=(0, "rest"))
            stored[group] += math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        return stored


def single(data: T) -> Data[T]:
    """Return the data of a figure with one plot; without data it has none."""
    return [(data, {})] if data else []


def read_run(run_dir: RunDirectory) -> Run:
    """Read the run directory of a job. Raises InputError if no work has begun there, or another version's."""
    storage, manifest = run_dir.storage, run_dir.read_manifest()
    if manifest is None:
        raise InputError(
            f"{run_dir.place}: no work has begun there (it has no {MANIFEST}); `python -m pipeline.status "
            f"{run_dir.place}` says how its last start ended"
        )
    fingerprint = read_object(storage, FINGERPRINT) or {}
    if not isinstance(fingerprint.get("fields"), dict):
        raise InputError(
            f"{storage.at(FINGERPRINT)}: damaged, so that the job of this work is unknown; start over with "
            "`python -m pipeline.run MANIFEST --fresh`"
        )
    ledger = run_dir.ledger
    keys = ledger.keys()
    entries: dict[str, Any] = {key: ledger.get(key) for key in keys if key.split("/")[0] in KINDS}
    complete, ranks = ledger.get(COMPLETE), ledger.get(RANKS)
    owner, ended = read_lock(storage), read_object(storage, ENDED)
    if ended and owner and ended.get("run") != owner["token"]:
        ended = None  # of an earlier run
    curves = [entry.curves for entry in entries.values() if isinstance(entry, CurvesEntry)]
    return Run(
        path=storage.address,
        state=_state(owner, ended, complete),
        ended=ended,
        manifest=manifest,
        manifest_text=storage.read(MANIFEST).decode(),
        fingerprint=fingerprint["fields"],
        commits=_commits(ledger.storage, keys),
        layers={_layer(key): entry for key, entry in entries.items() if isinstance(entry, LayerEntry)},
        ranks=ranks.ranks if ranks else {},
        importance={int(layer): value for layer, value in ranks.importance.items()} if ranks else {},
        curves={task: curve for by_task in curves for task, curve in by_task.items()},
        healing=_healing(ledger),
        summary=complete.summary if complete else {},
        record_sha256=complete.contract_sha256 if complete else None,
        statistics_bytes=_statistics_bytes(entries),
        units=_units(run_dir.logs),
        log=_log(run_dir.logs),
    )


def _healing(ledger: Ledger) -> HealingCurve | None:
    if healing := ledger.get(HEALING):
        return healing.curve
    if (healed := ledger.get(HEALED)) is None:
        return None
    steps, divergences = zip(*healed.figures["curve"], strict=True)
    return HealingCurve(steps=steps, divergences=divergences, best=healed.figures["best_step"])


def _state(owner: Mapping[str, Any] | None, ended: Mapping[str, Any] | None, complete: object) -> str:
    if owner is not None and owner.get("alive"):
        return "running"
    if ended is not None:
        return str(ended["outcome"])
    return "done" if complete else "stopped"


def _layer(key: str) -> int:
    return int(key.partition("/")[2])


def _statistics_bytes(entries: Mapping[str, Any]) -> dict[int, int]:
    """Return layer -> bytes of its float64 moments, by the shapes in the entries."""
    sizes: Counter[int] = Counter()
    for key, entry in entries.items():
        if isinstance(entry, DenseEntry | GradientEntry | StatisticsEntry):
            sizes[_layer(key)] += sum(math.prod(record.shape) for record in entry.statistics.values()) * MOMENT_BYTES
    return +sizes


def _commits(ledger: Storage, keys: Sequence[str]) -> tuple[tuple[float, str], ...]:
    times: dict[str, float] = {}
    for name, written in ledger.modified_times().items():
        key = name.rsplit(".", 2)[0].replace(".", "/")
        times[key] = max(times.get(key, 0.0), written)
    return tuple(sorted((times[key], key) for key in keys if key in times))


def _units(logs: Storage) -> tuple[Mapping[str, Any], ...]:
    """Read the last unit log, without lines that a kill has cut off."""
    units = []
    for line in _last_file(logs, f"*{SUFFIX}"):
        with suppress(ValueError):
            units.append(json.loads(line))
    return tuple(unit for unit in units if isinstance(unit, dict) and unit.keys() >= UNIT_FIELDS)


def _log(logs: Storage) -> tuple[str, ...]:
    lines = _last_file(logs, "*.log")
    warnings = [line for line in lines[:-LOG_LINES] if " WARNING " in line or " ERROR " in line]
    return (*warnings[-LOG_LINES:], *lines[-LOG_LINES:])


def _last_file(logs: Storage, pattern: str) -> list[str]:
    """Return the lines of the last file that fits a pattern."""
    names = matching(logs, [pattern])
    return logs.read(names[-1]).decode(errors="replace").splitlines() if names else []
