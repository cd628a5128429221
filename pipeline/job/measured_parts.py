"""The parts of a job whose losses `budget.measure_layers` measures. docs/methods.md#measured-layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from manifests.entries import MeasuredPartEntry
from manifests.records import LedgerKey
from pipeline.driver.ledger_keys import block_key, group_in_all_layers_key
from pipeline.families.geometry import Geometry
from pipeline.methods.method import Task
from pipeline.methods.registry import layers_of
from pipeline.ranks.calibration import blocks_of


@dataclass(frozen=True)
class MeasuredPart:
    """Tasks that are compressed alone to measure their loss: those of one group in all layers, or of some layers.

    Attributes:
        title: for messages.
        bearing: the keys of the tasks whose predictions bear the difference to the measured loss.
        stop: the end of the layers, exclusive; None for a group.
    """

    key: LedgerKey[MeasuredPartEntry]
    title: str
    tasks: tuple[Task, ...]
    bearing: frozenset[str]
    stop: int | None = None

    @property
    def name(self) -> str:
        """The name of the model in which they are compressed alone."""
        return re.sub(r"\W", "-", str(self.key))


def measured_parts(tasks: Sequence[Task], geometry: Geometry) -> list[MeasuredPart]:
    """Return the parts in the order of their measurement.

    First come the groups beside MLPs, each in all layers, because too few of their numbers are in some layers to be
    told from the MLP's. Then come consecutive layers, in which MLPs bear the difference; without MLPs, all groups.
    """
    mlps = {task.key for task in tasks if _is_mlp(task, geometry)}
    groups: defaultdict[tuple[int, str], list[Task]] = defaultdict(list)
    for task in tasks if mlps else ():
        if task.key not in mlps:
            groups[task.method, task.name].append(task)
    parts = [
        MeasuredPart(
            group_in_all_layers_key(method, name),
            f"{name} in all layers",
            tuple(own),
            frozenset(task.key for task in own),
        )
        for (method, name), own in groups.items()
    ]
    for layers in blocks_of(layers_of(tasks)):
        own = [task for task in tasks if task.layer in layers]
        keys = frozenset(task.key for task in own)
        title = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        parts.append(MeasuredPart(block_key(layers[0]), title, tuple(own), keys & mlps or keys, layers[-1] + 1))
    return parts


def _is_mlp(task: Task, geometry: Geometry) -> bool:
    """Return True for an MLP or experts."""
    return any(not set(block.roles).isdisjoint(task.roles) for block in geometry.layers[task.layer].mlps)
