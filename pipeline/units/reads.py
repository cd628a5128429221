"""The unit that reads a layer of the source once for the workers of all nodes, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.units.base import HandleResult, WorkUnit


@dataclass(frozen=True)
class ReadLayer(WorkUnit):
    """Reads one of `parts` parts of a layer's source tensors for the workers of all nodes.

    `near`: the workers of one node, one of which runs the unit.
    """

    layer: int
    part: int
    parts: int
    near: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"readlayer/{self.layer}/{self.part}"

    @property
    def handles(self) -> int:
        return 1


@dataclass(frozen=True)
class ReadDone(HandleResult):
    """A handle of source tensors, by name."""

    handle_fields: ClassVar[tuple[str, ...]] = ("tensors",)

    tensors: Any
