"""The smallest size whose measured loss stays below a limit, to within CLOSE: predictions propose, measurements decide.

Sizes are thousandths of `keep`, so that a try has a name. Each try compresses the model and scores it, which is why the
search stops CLOSE thousandths above a size that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

WHOLE = 1000
CLOSE = 5  # thousandths: no further try between a size that is too small and one that is not
TRUSTED = 3  # tries that follow predictions; after these the bracket is halved


def next_size(limit: float, tries: Mapping[int, float], least: int, predicted: Callable[[int], float]) -> int:
    """The size to try next; one that was tried already is the answer.

    Args:
        limit: of the loss, nats per token.
        tries: size -> measured loss.
        least: the smallest size that can be made.
        predicted: size -> predicted loss; falls with the size. Scaled by what the nearest try was off.

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
    wanted = limit / _off_by(tries, limit, predicted)
    size = _smallest(lambda size: predicted(size) <= wanted, short + 1, enough)
    nearest_untried = enough - 1 if size >= enough else size
    return max(short + 1, nearest_untried)


def _off_by(tries: Mapping[int, float], limit: float, predicted: Callable[[int], float]) -> float:
    """Measured over predicted loss, of the try nearest to the limit; 1 before there is any."""
    useful = {size: loss for size, loss in tries.items() if loss > 0 and predicted(size) > 0}
    if not useful:
        return 1.0
    nearest = min(useful, key=lambda size: abs(useful[size] - limit))
    return useful[nearest] / predicted(nearest)


def _smallest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest size from `low` to `high` from which on it holds; `high` if it holds nowhere before."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def least_size(possible: Callable[[int], bool]) -> int:
    """The smallest size that can be made; WHOLE always can."""
    return _smallest(possible, 1, WHOLE)
