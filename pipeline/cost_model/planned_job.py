"""The job as the cost model reads it: manifest, geometry, and the tasks of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from manifests.schema import Manifest
from pipeline.driver.job_spec import CalibrationPasses, passes_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group, Method
from pipeline.methods.method import Task
from pipeline.methods.registry import (
    LayerTasks,
    build_methods,
    claim_tasks,
    predict_tasks,
    task_groups,
    tasks_by_layer,
)
from pipeline.units.sharding import held_out_windows


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A manifest, its model, its methods and their tasks.

    Attributes:
        tasks: where points of a sweep are planned together, also tasks of other points, which have no group here.
    """

    manifest: Manifest
    geometry: Geometry
    methods: Sequence[Method[Any]]
    tasks: Sequence[Task]

    @classmethod
    def of(cls, manifest: Manifest, geometry: Geometry, tasks: Sequence[Task] | None = None) -> Self:
        """Return the job of a manifest, by default with the tasks that its methods claim."""
        methods = build_methods(manifest)
        return cls(manifest, geometry, methods, claim_tasks(methods, geometry) if tasks is None else tasks)

    @property
    def itemsize(self) -> int:
        """The bytes of a number in the forward pass, whose dtype is that of most stored numbers."""
        return self.geometry.bits // 8

    @property
    def sequence(self) -> int:
        """The tokens of a calibration sample; 0 without text."""
        return self.manifest.calibration.sequence_length if self.manifest.calibration else 0

    @property
    def tokens(self) -> int:
        """The tokens of all calibration samples."""
        return self.manifest.calibration.samples * self.sequence if self.manifest.calibration else 0

    @property
    def has_moments(self) -> bool:
        """True if a pass sums moments of calibration text. Corrections alone need none."""
        return any(task.moments for task in self.tasks)

    @property
    def hidden_bytes(self) -> int:
        """The bytes of the hidden states of all calibration samples, at one layer."""
        return self.tokens * self.geometry.hidden * self.itemsize

    @property
    def held_out_windows(self) -> int:
        """The windows of held-out text, each as long as a sample; 0 without text."""
        calibration = self.manifest.calibration
        return held_out_windows(calibration.samples, calibration.samples, self.sequence) if calibration else 0

    @cached_property
    def passes(self) -> CalibrationPasses:
        """The passes over the calibration text."""
        return passes_of(self.manifest, self.methods, self.tasks, self.geometry.hidden)

    @property
    def gradient_tokens(self) -> int:
        """The tokens of the backward pass; 0 without gradients."""
        return self.passes.gradient_samples * self.sequence

    def rounds(self, layer: LayerGeometry, role: str) -> bool:
        """Return True if `quantize` rounds a role's matrix."""
        quantize = self.manifest.quantize
        if quantize is None or quantize.skips(role):
            return False
        return role in layer.matrices or role in quantize.outer_roles

    @cached_property
    def groups(self) -> Mapping[str, Group[Any]]:
        """The groups by `Task.key`."""
        return task_groups(self.methods, self.geometry)

    @cached_property
    def predicted(self) -> frozenset[str]:
        """The keys of the tasks whose curves are computed before ranks are chosen."""
        return frozenset(task.key for task in predict_tasks(self.methods, self.geometry))

    @cached_property
    def claimed(self) -> Sequence[tuple[LayerGeometry, LayerTasks]]:
        """The layers that have a task, with their tasks, in ascending order."""
        return [(self.geometry.layers[layer], own) for layer, own in tasks_by_layer(self.tasks).items()]
