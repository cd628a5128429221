"""A unit that is done while others are waited for, on a pool that does one after another."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from manifests.errors import CorruptError
from pipeline.job.aside import Aside
from pipeline.score_units import Compare
from pipeline.units import Forward, Unit

COMPARE = Compare((), ())
WORK: list[Unit] = [Forward("dense", 0, shard) for shard in range(2)]


class Pool:
    """See `pipeline.ports.Pool`: a result is its unit's key; `broken` ones raise, once."""

    size, nodes = 1, (("one",),)
    seconds: dict[str, list[float]] = {}  # noqa: RUF012 - nobody writes to it
    peak_bytes: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, *broken: str) -> None:
        self.waiting: deque[Unit] = deque()
        self.broken = set(broken)

    def submit(self, unit: Unit) -> None:
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        unit = self.waiting.popleft()
        if unit.key in self.broken:
            self.broken.discard(unit.key)
            raise CorruptError(f"{unit.key}: damaged", "somewhere")
        return unit, unit.key

    def cancel_pending(self) -> None:
        self.waiting.clear()

    def forget(self) -> None:
        pass


@pytest.mark.parametrize("work", [WORK, []])
def test_its_result_is_nobody_else_s(work: list[Unit]) -> None:
    aside = Aside(Pool(), COMPARE)
    for unit in work:
        aside.submit(unit)
    assert [aside.wait() for _ in work] == [(unit, unit.key) for unit in work]
    assert aside.result() == aside.result() == "compare"


def test_what_is_cancelled_with_others_is_begun_again() -> None:
    pool = Pool("compare")
    aside = Aside(pool, COMPARE)
    aside.submit(WORK[0])
    with pytest.raises(CorruptError, match="compare: damaged"):
        aside.wait()
    aside.cancel_pending()
    aside.submit(WORK[1])
    assert aside.wait() == (WORK[1], WORK[1].key)
    aside.cancel_pending()
    assert not pool.waiting
    assert aside.result() == "compare"
