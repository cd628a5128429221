"""Hulls, sums of curves, and choices: against every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeline.ranks.curves import (
    Point,
    cache_numbers,
    choose,
    from_columns,
    frontier,
    lower_hull,
    merged,
    predicted_loss,
    steps,
    to_columns,
    up_to_whole,
)


def line(name: str, *pairs: tuple[int, float]) -> list[Point]:
    return [Point({name: place}, numbers, loss, numbers // 2) for place, (numbers, loss) in enumerate(pairs, start=1)]


def random_line(dice: random.Random, name: str, count: int = 8) -> list[Point]:
    return line(name, *[(dice.randint(1, 60), round(dice.uniform(0.01, 1.0), 3)) for _ in range(count)], (60, 0.0))


@pytest.mark.parametrize("seed", range(10))
def test_hull_is_below_all_points_and_convex(seed: int) -> None:
    points = random_line(random.Random(seed), "a", 20)
    hull = lower_hull(points)
    slopes = [(a.loss - b.loss) / (b.numbers - a.numbers) for a, b in itertools.pairwise(hull)]
    assert slopes == sorted(slopes, reverse=True)
    assert all(slope > 0 for slope in slopes)
    for point in points:
        for a, b in itertools.pairwise(hull):
            if a.numbers <= point.numbers <= b.numbers:
                share = (point.numbers - a.numbers) / (b.numbers - a.numbers)
                assert point.loss >= a.loss + share * (b.loss - a.loss) - 1e-12
    assert set(map(id, hull)) <= set(map(id, frontier(points)))


@pytest.mark.parametrize("seed", range(10))
def test_merged_curves_are_the_hull_of_all_sums(seed: int) -> None:
    dice = random.Random(seed)
    first, second = random_line(dice, "a"), random_line(dice, "b")
    sums = [Point({**a.ranks, **b.ranks}, a.numbers + b.numbers, a.loss + b.loss) for a in first for b in second]
    expected = [(point.numbers, pytest.approx(point.loss)) for point in lower_hull(sums)]
    found = [(point.numbers, point.loss) for point in lower_hull(merged(first, second))]
    assert found == expected
    assert all(set(point.ranks) == {"a", "b"} for point in merged(first, second))


@pytest.mark.parametrize("seed", range(20))
def test_choice_meets_the_target_and_is_near_the_best_there_is(seed: int) -> None:
    dice = random.Random(seed)
    curves = {name: random_line(dice, name) for name in "abc"}
    least = sum(lower_hull(points)[0].numbers for points in curves.values())
    for limit in range(least, 181, 7):
        found = choose(curves, limit)
        spent, lost = sum(p.numbers for p in found.values()), sum(p.loss for p in found.values())
        assert spent <= limit
        for name, points in curves.items():  # nothing more fits
            rest = limit - spent + found[name].numbers
            assert not any(p.loss < found[name].loss and p.numbers <= rest for p in points)
        choices = [c for c in itertools.product(*curves.values()) if sum(p.numbers for p in c) <= limit]
        best = min(sum(p.loss for p in c) for c in choices)
        assert lost <= best + max(
            a.loss - b.loss for h in curves.values() for a, b in itertools.pairwise(lower_hull(h))
        )


def test_fine_curves_are_cut_at_one_slope() -> None:
    curves = {str(size): [Point({"r": r}, r, size / r) for r in range(1, 1001)] for size in (1, 4, 9)}
    found = choose(curves, 600)
    assert sum(point.numbers for point in found.values()) == 600
    assert [found[name].numbers for name in ("1", "4", "9")] == pytest.approx([100, 200, 300], abs=3)


def test_by_the_cache() -> None:
    curves = {"a": line("a", (10, 0.5), (20, 0.1), (40, 0.0))}
    assert choose(curves, 11, cache_numbers)["a"].ranks == {"a": 2}
    assert choose(curves, 11)["a"].ranks == {"a": 1}


def test_out_of_reach_names_least_and_most() -> None:
    curves = {"a": line("a", (10, 0.5), (20, 0.0)), "b": line("b", (7, 0.5))}
    with pytest.raises(ValueError, match="limit 16 is out of reach: least 17, most 27"):
        choose(curves, 16)


def test_the_same_whatever_the_order_of_keys() -> None:
    dice = random.Random(5)
    curves = {str(key): random_line(dice, "r") for key in range(6)}
    shuffled = dict(sorted(curves.items(), key=lambda item: -int(item[0])))
    assert choose(curves, 200) == choose(shuffled, 200)


def test_columns_hold_the_points() -> None:
    points = line("a", (10, 0.5), (20, 0.0))
    assert from_columns(to_columns(points)) == points
    curves = {"0/0/x": to_columns(points), "1/0/x": to_columns(points)}
    assert predicted_loss(curves, {"0/0/x": {"a": 1}, "1/0/x": {"a": 2}}) == 0.5
    with pytest.raises(ValueError, match=r"0/0/x: its curve has no point at \{'a': 3\}"):
        predicted_loss(curves, {"0/0/x": {"a": 3}, "1/0/x": {"a": 2}})
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="predicted loss at"):
            to_columns([Point({"a": 1}, 10, wrong)])
    with pytest.raises(ValueError, match="needs a point"):
        to_columns([])


@pytest.mark.parametrize(("limit", "multiple"), [(1, 1), (7, 1), (7, 4), (1000, 1), (8192, 16), (5, 8)])
def test_steps(limit: int, multiple: int) -> None:
    found = steps(limit, multiple)
    assert found[-1] == limit
    assert found == sorted(set(found))
    assert all(step % multiple == 0 for step in found[:-1])
    assert len(found) <= 258


def tied(key: str) -> list[Point]:
    """Return a curve that predicts no loss for a cut, as few tokens do."""
    return up_to_whole([Point({key: size}, 10 * size, loss) for size, loss in ((1, 0.5), (2, 0.0), (3, 0.0), (4, 0.0))])


def test_a_budget_that_holds_the_whole_model_cuts_nothing() -> None:
    """Even where a smaller size loses as little."""
    curves = {"a": tied("a"), "b": [Point({"b": 1}, 10, 1.0), Point({"b": 2}, 20, 0.0)]}
    assert [point.numbers for point in curves["a"]] == [10, 20, 40]
    assert {key: point.numbers for key, point in choose(curves, 60).items()} == {"a": 40, "b": 20}
    assert {key: point.numbers for key, point in choose(curves, 59).items()} == {"a": 20, "b": 20}


def test_guarded_curves_lose_little_at_nearly_the_full_size() -> None:
    """If all lose a share c, at most c (1 + GUARD c), or one step more where that does not fit."""
    fine = {
        "a": [Point({"a": size}, size, 1e-9 * (100 - size) ** 2) for size in range(1, 101)],
        "b": [Point({"b": size}, size, 1e-3 * (100 - size) ** 2) for size in range(1, 101)],
    }
    assert choose(fine, 198)["a"].numbers == 98
    assert choose(fine, 198, guarded={"a"})["a"].numbers == 99  # 1 - 0.01 · 1.2 = 0.988
    assert choose(fine, 180)["a"].numbers == 80
    assert choose(fine, 180, guarded={"a"})["a"].numbers == 80  # 1 - 0.1 · 3 = 0.7
    assert choose(fine, 110, guarded={"a"})["a"].numbers == 10
    coarse = {"a": [Point({"a": 1}, 50, 0.1), Point({"a": 2}, 100, 0.0)]}
    assert choose(coarse, 99, guarded={"a"})["a"].numbers == 50
