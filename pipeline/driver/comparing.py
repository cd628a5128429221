"""Compares the staged layers with the dense ones on a few tokens, in the background."""

from __future__ import annotations

from typing import Any

from pipeline.driver.job_spec import LayersEntered
from pipeline.driver.scheduler import NOTHING_DUE, Coroutine
from pipeline.units.scores import COMPARED_LAYERS, Compare


def compare_layers(layers: LayersEntered, tokens: tuple[tuple[int, ...], ...]) -> Coroutine[dict[str, Any]]:
    """Compare the layers once they are staged, some at a time, in order: the outputs of each enter the next.

    Return the figures of `manifests.records.ComparedFigures`.
    """
    figures: dict[str, Any] = {"layer_errors": (), "sketch": ()}
    before = None
    for first in range(0, len(layers), COMPARED_LAYERS):
        stop = min(first + COMPARED_LAYERS, len(layers))
        while not all(map(layers.is_final, range(first, stop))):
            yield NOTHING_DUE
        (result,) = yield [Compare(tokens, tuple(layers[first:stop]), first, before, head=stop == len(layers))]
        of_all = {name: (*figures[name], *result.figures[name]) for name in ("layer_errors", "sketch")}
        figures, before = {**result.figures, **of_all}, result.after
    return figures
