"""The search for the smallest size within a limit of the loss."""

from __future__ import annotations

import pytest

from manifests import schema
from pipeline.job import sizing
from pipeline.ranks.search import CLOSE, WHOLE, least_size, next_size


def search(limit: float, loss: dict[str, float], least: int = 200) -> tuple[int, dict[int, float]]:
    """Tries until a size comes again; measured loss is `scale` × (1 − size)^`power`, predicted (1 − size)²."""
    tries: dict[int, float] = {}

    def measured(size: int) -> float:
        return loss["scale"] * (1 - size / WHOLE) ** loss["power"] + loss.get("floor", 0.0)

    for _ in range(20):
        size = next_size(limit, tries, least, lambda size: (1 - size / WHOLE) ** 2)
        assert least <= size <= WHOLE
        if size in tries:
            return size, tries
        tries[size] = measured(size)
    pytest.fail(f"no end: {tries}")


@pytest.mark.parametrize("limit", [0.001, 0.02, 0.1, 0.3])
@pytest.mark.parametrize(("scale", "power"), [(1.0, 2.0), (2.5, 2.0), (0.4, 2.0), (3.0, 3.0), (1.0, 1.2)])
def test_the_smallest_size_within_the_limit_in_a_few_tries(limit: float, scale: float, power: float) -> None:
    size, tries = search(limit, {"scale": scale, "power": power})
    assert tries[size] <= limit
    exact = WHOLE * (1 - (limit / scale) ** (1 / power))
    assert size - max(exact, 200) <= CLOSE + 1
    assert len(tries) <= 12


def test_the_least_that_can_be_made_may_be_enough() -> None:
    assert search(5.0, {"scale": 1.0, "power": 2.0})[0] == 200


def test_out_of_reach_ends_at_the_whole() -> None:
    size, tries = search(0.001, {"scale": 1.0, "power": 2.0, "floor": 0.01})
    assert size == WHOLE
    assert tries[WHOLE] > 0.001


def test_the_least_size_is_where_it_becomes_possible() -> None:
    assert least_size(lambda size: size >= 317) == 317
    assert least_size(lambda size: False) == WHOLE


def test_documents_say_how_near_the_smallest_size_it_comes() -> None:
    for said in (schema.Budget.__doc__, sizing.__doc__):
        assert said is not None
        assert f"to within {CLOSE / WHOLE:g}" in said
