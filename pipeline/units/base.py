"""Base classes of units, and of results that refer to tensors by handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from manifests.records import ArrayRecord, StagedLayer


class WorkUnit:
    """A unit of work, done by one worker. No ABC, whose `isinstance` takes most of the pool's time."""

    @property
    def key(self) -> str:
        """Return the unit's name in logs and results."""
        raise NotImplementedError

    @property
    def handles(self) -> int:
        """Return an upper bound on the number of handles in the result."""
        return 0


def layer_part_name(layer: int, part: int | None) -> str:
    """Return the name of a layer, or of a part of one, in keys of units."""
    return f"{layer}" if part is None else f"{layer}.{part}"


@dataclass(frozen=True)
class HandleResult:
    """A result with handles of tensors.

    `handle_fields`: the fields that hold handles, directly or in tuples, mappings or results.
    """

    handle_fields: ClassVar[tuple[str, ...]]

    def with_handles(self, convert: Callable[[Any], Any]) -> Self:
        """Return the result with `convert(handle)` in place of each handle."""
        return replace(self, **{name: _converted(getattr(self, name), convert) for name in self.handle_fields})


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, HandleResult):
        return value.with_handles(convert)
    if isinstance(value, Mapping):
        return {key: _converted(part, convert) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(_converted(part, convert) for part in value)
    return None if value is None else convert(value)


@dataclass(frozen=True, kw_only=True)
class Replaying(WorkUnit):
    """A unit that needs a shard's inputs of a layer, which its worker holds or recomputes.

    Attributes:
        base: the layer whose inputs are committed (0: the token embeddings). A worker that does not hold the inputs
            starts there, and passes the layers of `replay` (staged records, or None for dense weights).
        base_record: the record of the committed inputs; None: the embeddings.
    """

    base: int = 0
    base_record: ArrayRecord | None = None
    replay: tuple[StagedLayer | None, ...] = ()
