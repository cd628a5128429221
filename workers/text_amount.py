"""Measures how well the statistics of some calibration samples describe other samples.

Legend: B samples, S sequence, D hidden, F features of a point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from manifests.errors import NumericsError
from pipeline.kernels.held_out import held_out_error
from pipeline.kernels.moments import add_head_moment_
from pipeline.units.text_amount import MeasureText, groups_of
from workers.embedding_and_head import embedding
from workers.layers import LayerReader


def measure_text(
    unit: MeasureText,
    layers: LayerReader,
    tokens: Callable[[int, int], Tensor],
    computing: Callable[[], AbstractContextManager[None]],
) -> tuple[float, ...]:
    """Return the held-out errors of fits to a quarter, to half and to all of the samples.

    `tokens`: ids (B, S) of calibration samples start to stop. One worker adds the moments in the order of the samples,
    in float64, so that the errors are the same for any number of workers. Raises NumericsError on NaN or infinity.
    """
    embed, block = embedding(layers), layers.block(0, None)
    features = layers.setup.geometry.layers[0].features(unit.point)

    def add_(total_1FF: Tensor, samples: Sequence[int]) -> Tensor:
        tap = (unit.point, lambda values_BSF: add_head_moment_(total_1FF, values_BSF))
        for sample in samples:
            with computing():
                try:
                    block.run(embed(tokens(sample, sample + 1)), (tap,), output=False)
                except ValueError as error:
                    raise NumericsError(f"layer 0: activations at {unit.point}: {error}") from error
        return total_1FF[0]

    held_out, *parts = groups_of(unit.samples)
    zeros = torch.zeros(2, 1, features, features, dtype=torch.float64, device=layers.device)
    held_out_FF = add_(zeros[0], held_out)
    errors = []
    for part in parts:
        moment_FF = add_(zeros[1], part)
        with computing():
            errors.append(held_out_error(moment_FF, held_out_FF))
    return tuple(errors)
