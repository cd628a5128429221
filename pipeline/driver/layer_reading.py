"""Reads layers of the source once for all nodes: each node reads a part and sends it to the others."""

from __future__ import annotations

from typing import Any

from pipeline.driver.scheduler import Coroutine, Fiber, batch
from pipeline.driver.session import Session
from pipeline.units.reads import ReadDone, ReadLayer

LAYERS_AHEAD = 2  # layers that are read ahead of the one being computed
Handles = tuple[Any, ...]
Weights = tuple[Handles, Handles]  # the source tensors of a layer and of the next one


class LayerReading:
    """Reads layers ahead of a pass. On a single node, workers read for themselves instead."""

    def __init__(self, session: Session, last: int) -> None:
        """`last`: the layer at which the pass ends."""
        self.session = session
        self.last = last
        self.reading: dict[int, Fiber[list[ReadDone]]] = {}
        self.read: dict[int, Handles] = {}

    def weights(self, layer: int) -> Coroutine[Weights]:
        """Return the tensors of a layer and of the next one, and start to read the layer after that."""
        for other in range(layer, min(layer + LAYERS_AHEAD, self.last) + 1):
            self._start(other)
        self.read = {other: handles for other, handles in self.read.items() if other >= layer}
        current = yield from self._handles(layer)
        following = yield from self._handles(layer + 1)
        return current, following

    def _start(self, layer: int) -> None:
        if layer in self.reading or layer in self.read:
            return
        nodes = self.session.pool.nodes
        if len(self.session.job.parts(layer, ())) > 1:
            nodes = ()  # every node reads the experts itself, slice by slice
        units = [ReadLayer(layer, part, len(nodes), tuple(near)) for part, near in enumerate(nodes)]
        self.reading[layer] = self.session.scheduler.spawn(batch(units if len(nodes) > 1 else ()))

    def _handles(self, layer: int) -> Coroutine[Handles]:
        if layer in self.reading:
            parts: list[ReadDone] = yield self.reading.pop(layer)
            self.read[layer] = tuple(part.tensors for part in parts)
        return self.read.get(layer, ())
