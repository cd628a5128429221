"""Searches for the smallest size whose measured loss is below a limit, guided by predictions.

Sizes are integers, thousandths of `keep`. Each try compresses and scores the model, so the search stops within CLOSE
thousandths of a size that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.ranks.calibration import CalibratedLoss

WHOLE = 1000
CLOSE = 5  # thousandths between a size that failed and one that passed, at which the search stops
TRUSTED = 3  # tries that follow predictions; afterwards the bracket is halved


def next_size(limit: float, tries: Mapping[int, float], least: int, predicted: Callable[[int], float]) -> int:
    """Return the size to try next, or one that was tried already: the answer.

    Args:
        limit: the largest loss, in nats per token.
        tries: size -> measured loss.
        least: the smallest possible size.
        predicted: size -> predicted loss; it falls with the size. The tries calibrate it.

    Return WHOLE, which was tried and is above the limit, if no size is below it.
    """
    passed = [size for size, loss in tries.items() if loss <= limit]
    failed = [size for size, loss in tries.items() if loss > limit]
    high = min(passed, default=WHOLE)
    low = max((size for size in failed if size < high), default=least - 1)
    if high == least or WHOLE in failed:
        return high
    if high - low <= CLOSE and low in tries:
        return high
    if high - low <= 1:
        return high
    if len(tries) >= TRUSTED:
        return (low + high) // 2
    expected = CalibratedLoss((predicted(size), loss) for size, loss in tries.items())
    size = _smallest(lambda size: expected(predicted(size)) <= limit, low + 1, high)
    nearest_untried = high - 1 if size >= high else size
    return max(low + 1, nearest_untried)


def _smallest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Bisect for the smallest size from `low` at which a monotone condition holds; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def least_size(possible: Callable[[int], bool]) -> int:
    """Return the smallest possible size; WHOLE always is."""
    return _smallest(possible, 1, WHOLE)
