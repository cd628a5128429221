"""The choice of E' experts of width N' for one layer or for the whole model. docs/methods.md#mixtures.

Statistics of a layer, all of its dense weights:

- `removal_E` (E,): the predicted loss of each expert's removal, nats per token (`kernels.routing.removal_sums`).
- `width_losses_En` (E, n): the predicted loss of each expert at each of n widths, nats per token, after a refit of its
  writer (`loss_aware`'s elimination by C_e and G).

Legend: E experts, N channels of an expert, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeline.methods.experts.scores import kept_experts
from pipeline.ranks.curves import Point

EXPERTS, WIDTH = "experts", "width"


def shape_points(
    removal_E: Tensor,
    width_losses_En: Tensor,
    widths: Sequence[int],
    counts: Sequence[int],
    numbers_per_channel: int,
    groups: int = 1,
    remaining: Sequence[float] | None = None,
) -> list[Point]:
    """Return a point for each (E', N'): the experts with the largest removal losses are kept, all at the same width.

    The loss is the sum of the losses of the removals and of the narrowing, as if they were independent. The full count
    and width lose nothing. `numbers_per_channel`: the numbers stored for a channel of one expert. `remaining`: for each
    count, the share of the removals' loss that a refit leaves; None: all of it. Raises ValueError on shapes that do not
    fit.
    """
    if width_losses_En.shape != (len(removal_E), len(widths)):
        shapes = f"{tuple(width_losses_En.shape)} and {tuple(removal_E.shape)}"
        raise ValueError(f"losses by width and by removal do not fit {len(widths)} widths: {shapes}")
    points = []
    for place, count in enumerate(counts):
        kept = kept_experts(removal_E, count, groups)
        removed = float(removal_E.sum() - removal_E[kept].sum()) if count < len(removal_E) else 0.0
        removed *= 1.0 if remaining is None else remaining[place]
        by_width = width_losses_En[kept].sum(dim=0).tolist()
        points += [
            Point({EXPERTS: count, WIDTH: width}, count * width * numbers_per_channel, max(0.0, removed) + loss)
            for width, loss in zip(widths, by_width, strict=True)
        ]
    return points
