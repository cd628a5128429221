"""Calibration of predicted losses by measurements at a few sizes. docs/methods.md#calibrated-losses.

A predicted loss is the sum of the losses of parts that are compressed alone. It is too small if many parts lose much,
and it ignores errors that calibration text does not show. Both effects grow smoothly with compression, so that three
measurements are enough to correct for them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

ENDS = (900, 500)  # thousandths of `keep`: the sizes that are measured besides the job's own
MIDDLE = 700  # replaces an end within NEAR of the job's own size
NEAR = 50
BLOCKS = 6  # runs of layers that are measured alone
MOST = 16.0  # a larger ratio of measured and predicted losses is noise
OTHER_SIZES = 2  # the number of sizes besides the job's own


def other_sizes(size: float) -> tuple[int, int]:
    """Return two sizes to measure besides this one, in thousandths of `keep`, so that they span 0.9 to 0.5."""
    far = [end for end in ENDS if abs(end - size) > NEAR]
    return (far[0], far[1]) if len(far) == 2 else (max(far[0], MIDDLE), min(far[0], MIDDLE))


def runs_of_layers(layers: Sequence[int]) -> list[Sequence[int]]:
    """Cut the layers into `BLOCKS` runs of about as many, or into single ones."""
    ends = [round(len(layers) * part / BLOCKS) for part in range(BLOCKS + 1)]
    return [layers[begin:end] for begin, end in itertools.pairwise(ends) if begin < end]


def loss_ratios(measured: float, predicted: Mapping[str, float], mlps: Collection[str]) -> dict[str, float]:
    """Return task -> the factor that corrects its predicted loss, so that the sum of all tasks is the measured loss.

    If there are tasks of MLPs, they bear the difference, because predictions of attention are accurate. A factor is
    between 1 / `MOST` and `MOST`.
    """
    bearing = [task for task in predicted if task in mlps] or [*predicted]
    rest = math.fsum(loss for task, loss in predicted.items() if task not in bearing)
    expected = math.fsum(predicted[task] for task in bearing)
    ratio = min(max((measured - rest) / expected, 1.0 / MOST), MOST) if expected > 0.0 else 1.0
    return dict.fromkeys(bearing, ratio)


class CalibratedLoss:
    """A monotone map from predicted to expected loss that meets every measurement.

    Between measurements it is a cubic with harmonic slopes (Fritsch and Carlson 1980; Fritsch and Butland 1984), which
    does not overshoot. Below the smallest measurement it is proportional, above the largest linear. Without
    measurements it is the identity.
    """

    def __init__(self, measured: Iterable[tuple[float, float]]) -> None:
        """`measured`: pairs of predicted and measured loss. Measurements that fall with the predicted loss are noise,
        and are raised to the previous one."""
        points: list[tuple[float, float]] = []
        for predicted, loss in sorted(measured):
            if predicted <= 0.0 or loss <= 0.0 or (points and predicted == points[-1][0]):
                continue
            points.append((predicted, max(loss, points[-1][1] if points else loss)))
        self.predicted = [predicted for predicted, _ in points]
        self.measured = [loss for _, loss in points]
        self.slopes = _slopes(self.predicted, self.measured)

    def __call__(self, predicted: float) -> float:
        """Return the expected loss for a predicted one."""
        x, y, slopes = self.predicted, self.measured, self.slopes
        if not x:
            return predicted
        if predicted <= x[0]:
            return y[0] * predicted / x[0]
        if predicted >= x[-1]:
            return y[-1] + slopes[-1] * (predicted - x[-1])
        place = bisect.bisect_right(x, predicted) - 1
        width = x[place + 1] - x[place]
        t = (predicted - x[place]) / width
        ends = y[place] * (1 + 2 * t) * (1 - t) ** 2 + y[place + 1] * t * t * (3 - 2 * t)
        return ends + width * t * (1 - t) * (slopes[place] * (1 - t) - slopes[place + 1] * t)


def _slopes(x: list[float], y: list[float]) -> list[float]:
    """Return the slope at each point: harmonic means inside, and bounded slopes of a parabola at both ends."""
    if len(x) < 2:
        return [value / at for at, value in zip(x, y, strict=True)]
    widths = [after - before for before, after in itertools.pairwise(x)]
    chords = [(after - before) / width for (before, after), width in zip(itertools.pairwise(y), widths, strict=True)]
    if len(x) == 2:
        return [chords[0], chords[0]]
    inner = [_harmonic(*widths[place : place + 2], *chords[place : place + 2]) for place in range(len(x) - 2)]
    return [_end(*widths[:2], *chords[:2]), *inner, _end(*widths[:-3:-1], *chords[:-3:-1])]


def _harmonic(width: float, next_width: float, chord: float, next_chord: float) -> float:
    if chord == 0.0 or next_chord == 0.0:
        return 0.0
    weight, next_weight = 2 * next_width + width, next_width + 2 * width
    return (weight + next_weight) / (weight / chord + next_weight / next_chord)


def _end(width: float, next_width: float, chord: float, next_chord: float) -> float:
    slope = ((2 * width + next_width) * chord - width * next_chord) / (width + next_width)
    return min(max(slope, 0.0), 3 * chord)
