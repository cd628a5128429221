"""Statistics that the experts of a layer share, held between units."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from manifests.records import ArrayRecord
from pipeline.families.blocks import STREAM_POINTS
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.sensitivity import Factored
from pipeline.methods.method import Moment
from pipeline.units.sums import Summed


class SharedMoments:
    """Holds the moments and samples that several groups of a layer need, and their factors.

    Experts share the moment and the sample of their input, and the moment of the gradient at the mixture's output.
    These are read, copied to the device and factored once for all experts of a layer that a worker solves in turn.
    """

    def __init__(self) -> None:
        self._layer = -1
        self._points: frozenset[str] = frozenset()
        self._held: dict[Moment, tuple[ArrayRecord | Summed, Tensor]] = {}
        self._factors: dict[Moment, tuple[Tensor, Factored]] = {}

    def of(self, layer: LayerGeometry) -> SharedMoments:
        """Return self for a layer, without the moments of other layers."""
        if self._layer != layer.index:
            self.release()
        self._layer = layer.index
        inputs = (block.passing for block in layer.mlps)
        self._points = frozenset((*inputs, *STREAM_POINTS)) if len(layer.mlps) > 1 else frozenset()
        return self

    @property
    def factors(self) -> dict[Moment, tuple[Tensor, Factored]]:
        """Return the factors of the layer's moments, which are not held for a layer with one MLP."""
        return self._factors if self._points else {}

    def get(self, moment: Moment, source: ArrayRecord | Summed, read: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of a moment, from `read` unless it is shared and held."""
        if moment.point not in self._points:
            return read()
        held = self._held.get(moment)
        if held is None or held[0] != source:
            held = self._held[moment] = source, read()
        return held[1]

    def release(self) -> None:
        """Discard all of them."""
        self._held.clear()
        self._factors.clear()
