"""Searches the smallest size whose measured loss stays below a limit, to within CLOSE, guided by predictions.

Sizes are thousandths of `keep`, so that a try has a name. Each try compresses the model and scores it, which is why the
search stops CLOSE thousandths above a size that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.ranks.calibration import CalibratedLoss

WHOLE = 1000
CLOSE = 5  # thousandths: no further try between a size that is too small and one that is not
TRUSTED = 3  # tries that follow predictions; after these the bracket is halved


def next_size(limit: float, tries: Mapping[int, float], least: int, predicted: Callable[[int], float]) -> int:
    """The size to try next; one that was tried already is the answer.

    Args:
        limit: the largest loss, in nats per token.
        tries: size -> measured loss.
        least: the smallest size that is possible.
        predicted: size -> predicted loss; it falls with the size. The tries calibrate it.

    Returns WHOLE, tried and above the limit, when nothing stays below it.
    """
    passed = [size for size, loss in tries.items() if loss <= limit]
    failed = [size for size, loss in tries.items() if loss > limit]
    enough = min(passed, default=WHOLE)
    short = max((size for size in failed if size < enough), default=least - 1)
    if enough == least or WHOLE in failed:
        return enough
    if enough - short <= CLOSE and short in tries:
        return enough
    if enough - short <= 1:
        return enough
    if len(tries) >= TRUSTED:
        return (short + enough) // 2
    expected = CalibratedLoss((predicted(size), loss) for size, loss in tries.items())
    size = _smallest(lambda size: expected(predicted(size)) <= limit, short + 1, enough)
    nearest_untried = enough - 1 if size >= enough else size
    return max(short + 1, nearest_untried)


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
