"""Checks the points of a sweep: jobs that share a run directory, statistics and workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from manifests.errors import InputError
from manifests.schema import Budget, Manifest
from manifests.sweep import SweepPoint
from pipeline.driver.job_spec import CalibrationPasses, needs_both_models, passes_of
from pipeline.driver.ledger_keys import point_part
from pipeline.inputs.fingerprint import semantic_fields
from pipeline.inputs.job_inputs import MEASURE_LAYERS, Inputs, check_inputs, opened_model
from pipeline.methods.method import Task
from stores.ledger import Ledger, LedgerView
from stores.source import SourceCheckpoint

MOST_TOGETHER = 8  # points that are solved jointly; the layers of all of them are staged at once
SHARED = ("dense", "gradient", "tokens", "held_out", "hardware", "source", "teacher")  # kinds of ledger entries


@dataclass(frozen=True)
class SweptPoint:
    """A point whose manifest fits the model.

    Attributes:
        first: the index of its first method among the methods of all points, which the workers number.
        digest: digest of everything that decides its bytes; it does not depend on the other points.
        curves_digest: digest of everything that decides its curves, which is all but the size and `refine`.
    """

    point: SweepPoint
    inputs: Inputs
    first: int
    digest: str
    curves_digest: str

    @property
    def walks(self) -> bool:
        """True if layers are solved or trained on outputs of the compressed layers before them."""
        return any(map(needs_both_models, self.inputs.tasks))

    def ledger(self, whole: Ledger) -> Ledger:
        """Return the point's view of the ledger: all points share statistics, points with the same methods curves."""
        by_methods = dict.fromkeys(("curves", "measured"), f"methods/{self.curves_digest}")
        return LedgerView(whole, point_part(self.digest), dict.fromkeys(SHARED, "") | by_methods)


class SharedInputs(Inputs):
    """The inputs of all points together. Calibration does not depend on the points, so that users can add points."""

    @property
    def needs_calibration(self) -> bool:
        """True if the manifest has calibration text, whether a point needs it or not."""
        return self.manifest.calibration is not None

    @cached_property
    def passes(self) -> CalibrationPasses:
        """The passes with gradients, whether a point needs them or not."""
        return passes_of(self.manifest, self.methods, self.tasks, self.geometry.hidden, gradients=True)


def read_points(points: Sequence[SweepPoint], weights: bool = True) -> tuple[SweptPoint, ...]:
    """Check every point against the model, whose headers are read once.

    `weights`: also download the weights of a hub id, once all checks have passed.

    Raises:
        InputError: a point is wrong; the message has a line for each fault with the points that have it.
    """
    return opened_model(points[0].manifest, weights, partial(_check_points, points))


def _check_points(
    points: Sequence[SweepPoint], source: SourceCheckpoint, config: Mapping[str, Any]
) -> tuple[SweptPoint, ...]:
    checked: list[Inputs] = []
    faults: dict[str, list[str]] = {}
    for place, point in enumerate(points):
        manifest = point.manifest if place == 0 else _without_tasks(point.manifest)  # whose check takes seconds
        try:
            if manifest.measures_layers:
                raise InputError(f"{MEASURE_LAYERS}: a sweep does not measure layers; leave it out, or run single jobs")
            checked.append(check_inputs(manifest, source, config))
        except InputError as error:
            faults.setdefault(str(error), []).append(point.label)
    if faults:
        raise InputError("\n".join(f"{', '.join(labels)}: {fault}" for fault, labels in faults.items()))
    swept: list[SweptPoint] = []
    first = 0
    for point, inputs in zip(points, checked, strict=True):
        fields = semantic_fields(inputs)
        methods = [{**entry, "refine": None} for entry in fields["methods"]]  # layers are trained after their solve
        of_curves = {name: value for name, value in fields.items() if name != "budget"} | {"methods": methods}
        swept.append(SweptPoint(point, inputs, first, _digest(fields), _digest(of_curves)))
        first += len(inputs.methods)
    return tuple(swept)


def _without_tasks(manifest: Manifest) -> Manifest:
    """Return the manifest without tasks, which are those of all points."""
    return manifest.model_copy(update={"evaluation": manifest.evaluation.model_copy(update={"tasks": ()})})


def series_of(points: Sequence[SweptPoint]) -> list[tuple[SweptPoint, ...]]:
    """Group consecutive points that differ in size alone, at most `MOST_TOGETHER` in a group.

    A point whose layers depend on its own compressed layers, or that is refined, is alone in its group.
    """
    series: list[tuple[SweptPoint, ...]] = []
    for _, group in groupby(points, key=lambda point: (point.curves_digest, point.walks)):
        alike = tuple(group)
        most = 1 if alike[0].walks else MOST_TOGETHER
        series += [alike[start : start + most] for start in range(0, len(alike), most)]
    return series


def shared_inputs(swept: Sequence[SweptPoint], output: str) -> SharedInputs:
    """Return the inputs of one pass over the text for all points. Saved points have the same `heal`."""
    manifests, first = [point.point.manifest for point in swept], swept[0].inputs
    manifest = first.manifest.model_copy(
        update={
            "output": output,
            "methods": tuple(entry for manifest in manifests for entry in manifest.methods),
            "budget": Budget(keep=max(manifest.budget.share if manifest.budget else 1.0 for manifest in manifests)),
            "quantize": None,
            "heal": next((manifest.heal for manifest in manifests if manifest.heal), None),
        }
    )
    tasks = tuple(shifted(task, point.first) for point in swept for task in point.inputs.tasks)
    methods = tuple(method for point in swept for method in point.inputs.methods)
    return SharedInputs(manifest, first.source, first.config, first.geometry, methods, tasks, first.dtype)


def shifted(task: Task, first: int) -> Task:
    """Return a point's task with the workers' number of its method."""
    return replace(task, method=first + task.method)


def _digest(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
