"""The points of a sweep as jobs that share a run directory, their statistics and their workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from manifests.errors import InputError
from manifests.schema import Budget, Manifest
from manifests.sweep import Point
from pipeline.driver.ledger_keys import point_part
from pipeline.inputs.fingerprint import semantic_fields
from pipeline.inputs.job_inputs import Inputs, check_inputs, opened_model
from pipeline.methods.method import Task
from pipeline.units.sharding import gradient_samples
from stores.ledger import Ledger, LedgerPart
from stores.source import SourceCheckpoint

MOST_TOGETHER = 8  # points: the layers of all of them are staged at once
SHARED = ("dense", "gradient", "tokens", "held_out", "hardware", "source")  # kinds of entries


@dataclass(frozen=True)
class SweptPoint:
    """A point whose manifest fits the model.

    Attributes:
        first: the place of its first method among those of all points, as the workers count them.
        digest: of what decides its bytes: the same point has the same, whatever else is in the sweep.
        curves_digest: of what decides its curves, which size does not.
    """

    point: Point
    inputs: Inputs
    first: int
    digest: str
    curves_digest: str

    def ledger(self, whole: Ledger) -> Ledger:
        """Its view of the sweep's: statistics are everybody's, curves those of the same methods."""
        of_methods = dict.fromkeys(("curves", "measured"), f"methods/{self.curves_digest}")
        return LedgerPart(whole, point_part(self.digest), dict.fromkeys(SHARED, "") | of_methods)


class SharedInputs(Inputs):
    """The inputs of all points together. The same calibration whatever the points ask of it, so that more may come."""

    @property
    def needs_calibration(self) -> bool:
        """Whether there is text."""
        return self.manifest.calibration is not None

    @property
    def gradient_samples(self) -> int:
        """As many as a point takes that asks for gradients."""
        calibration = self.manifest.calibration
        if calibration is None:
            return 0
        asked, length = calibration.gradient.samples, calibration.sequence_length
        return gradient_samples(asked, calibration.samples, length, self.geometry.hidden)


def read_points(points: Sequence[Point], weights: bool = True) -> tuple[SweptPoint, ...]:
    """Every point held against the model, of which headers are read once.

    `weights`: whether those of a hub id are fetched, after everything else proved right.

    Raises:
        InputError: with a line for each fault, and the points that have it; nothing was written.
    """
    return opened_model(points[0].manifest, weights, partial(_check_points, points))


def _check_points(
    points: Sequence[Point], source: SourceCheckpoint, config: Mapping[str, Any]
) -> tuple[SweptPoint, ...]:
    checked: list[Inputs] = []
    faults: dict[str, list[str]] = {}
    for point in points:
        try:
            checked.append(check_inputs(point.manifest, source, config))
        except InputError as error:
            faults.setdefault(str(error), []).append(point.label)
    if faults:
        raise InputError("\n".join(f"{', '.join(labels)}: {fault}" for fault, labels in faults.items()))
    swept: list[SweptPoint] = []
    first = 0
    for point, inputs in zip(points, checked, strict=True):
        fields = semantic_fields(inputs)
        sizeless = {name: value for name, value in fields.items() if name != "budget"}
        swept.append(SweptPoint(point, inputs, first, _digest(fields), _digest(sizeless)))
        first += len(inputs.methods)
    return tuple(swept)


def series_of(points: Sequence[SweptPoint]) -> list[tuple[SweptPoint, ...]]:
    """The points in their order, those together that are alike but for their size."""
    found: list[tuple[SweptPoint, ...]] = []
    for _, alike in groupby(points, key=lambda point: point.curves_digest):
        series = tuple(alike)
        found += [series[start : start + MOST_TOGETHER] for start in range(0, len(series), MOST_TOGETHER)]
    return found


def shared_inputs(swept: Sequence[SweptPoint], output: str) -> SharedInputs:
    """What one pass over the text takes for all of them."""
    manifests, one = [point.point.manifest for point in swept], swept[0].inputs
    manifest = one.manifest.model_copy(
        update={
            "output": output,
            "methods": tuple(entry for found in manifests for entry in found.methods),
            "budget": Budget(keep=max(_share(found) for found in manifests)),
            "quantize": None,
        }
    )
    tasks = tuple(shifted(task, point.first) for point in swept for task in point.inputs.tasks)
    methods = tuple(method for point in swept for method in point.inputs.methods)
    return SharedInputs(manifest, one.source, one.config, one.geometry, methods, tasks, one.dtype)


def shifted(task: Task, first: int) -> Task:
    """A point's task as the workers know it."""
    return replace(task, method=first + task.method)


def _share(manifest: Manifest) -> float:
    return manifest.budget.share if manifest.budget else 1.0


def _digest(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
