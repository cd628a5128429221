"""Fields that several units, or several results, share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from manifests.records import ArrayRecord, StagedLayer
from pipeline.methods.method import Moment


@dataclass(frozen=True, kw_only=True)
class Replaying:
    """A unit that takes a shard onward from the inputs of its layer, which its worker holds or computes again.

    Attributes:
        base: the layer whose inputs are committed (0: the token embeddings); a worker that does not hold the inputs
            starts there, and goes through the layers of `replay` (staged records, or None for dense weights).
        base_record: of these committed inputs; None: the embeddings.
    """

    base: int = 0
    base_record: ArrayRecord | None = None
    replay: tuple[StagedLayer | None, ...] = ()


@dataclass(frozen=True)
class HoldsPartials:
    """A result with handles of samples, by moment: `partials`."""

    partials: Mapping[Moment, Any]

    def with_handles(self, made: Callable[[Any], Any]) -> Self:
        """Replaces each handle by `made(handle)`."""
        return replace(self, partials={moment: made(handle) for moment, handle in self.partials.items()})
