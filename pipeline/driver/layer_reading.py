"""Layers of the source, read once for all nodes: each node reads a part, and takes the others' over the network."""

from __future__ import annotations

from typing import Any

from pipeline.driver.scheduler import Steps
from pipeline.units.units import ReadDone, ReadLayer

Handles = tuple[Any, ...]


class LayerReading:
    """Reads the layers of a pass ahead of it. Where all workers are on one node, each reads its own instead."""

    def __init__(self, steps: Steps, last: int) -> None:
        """`last`: the layer at which the pass ends."""
        self.steps = steps
        self.last = last
        self.begun: dict[int, list[ReadLayer]] = {}
        self.read: dict[int, Handles] = {}

    def weights(self, layer: int) -> tuple[Handles, Handles]:
        """The tensors of a layer, and of the next, which workers read ahead; the one after that is begun."""
        for other in range(layer, min(layer + 2, self.last) + 1):
            self._begin(other)
        self.read = {other: handles for other, handles in self.read.items() if other >= layer}
        return self._there(layer), self._there(layer + 1)

    def _begin(self, layer: int) -> None:
        if layer in self.begun or layer in self.read:
            return
        nodes = self.steps.pool.nodes
        units = [ReadLayer(layer, part, len(nodes), tuple(near)) for part, near in enumerate(nodes)]
        self.begun[layer] = units if len(nodes) > 1 else []
        self.steps.begin(self.begun[layer])

    def _there(self, layer: int) -> Handles:
        if units := self.begun.pop(layer, []):
            found: list[ReadDone] = self.steps.results(units)
            self.read[layer] = tuple(done.tensors for done in found)
        return self.read.get(layer, ())
