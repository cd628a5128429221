"""Curves: which pieces of work go to which units, and that all pieces come back in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.driver.curves import _dealt, compute_curves
from pipeline.methods.method import Task
from pipeline.units.curves import BeginCurve, CurvePieces, Predict


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_each_piece_is_dealt_once_to_as_many_as_there_are(pieces: int, parts: int) -> None:
    dealt = _dealt(pieces, parts)
    assert sorted(number for numbers in dealt for number in numbers) == [*range(pieces)]
    assert len(dealt) == min(pieces, parts)
    assert all(dealt)


def task(name: str, pieces: int) -> Any:
    return Task(layer=0, method=0, name=name, roles=("up",), moments=(), pieces=pieces)


def curves_of(size: int, *pieces: int) -> tuple[dict[Any, Any], list[list[Any]]]:
    """Return the curves of tasks with so many pieces, and the batches of units that computed them."""
    tasks = {task(f"group {number}", count): {} for number, count in enumerate(pieces)}
    coroutine, batches = compute_curves(SimpleNamespace(pool=SimpleNamespace(size=size)), tasks), []  # type: ignore[arg-type]
    answer = None
    while True:
        try:
            batches.append([*coroutine.send(answer)])
        except StopIteration as ended:
            return ended.value, batches
        answer = [
            f"begun {unit.task.name}" if isinstance(unit, BeginCurve)
            else tuple(f"piece {number}" for number in unit.numbers) if isinstance(unit, CurvePieces)
            else (unit.task.name, unit.shared, unit.pieces)
            for unit in batches[-1]
        ]  # fmt: skip


def test_no_group() -> None:
    assert curves_of(4)[0] == {}


def test_without_idle_workers_each_group_is_one_unit_and_long_ones_come_first() -> None:
    curves, batches = curves_of(2, 1, 5, 5)
    assert [type(unit) for unit in batches[0]] == [Predict] * 3
    assert [unit.task.name for unit in batches[0]] == ["group 1", "group 2", "group 0"]
    assert [each.name for each in curves] == ["group 0", "group 1", "group 2"]  # as they were given


def test_pieces_are_shared_by_idle_workers_and_joined_in_order() -> None:
    curves, (first, parts, joined) = curves_of(5, 1, 3, 2)
    assert [type(unit) for unit in first] == [BeginCurve, BeginCurve, Predict]
    assert [(unit.task.name, unit.numbers) for unit in parts] == [
        ("group 1", (0, 2)), ("group 1", (1,)), ("group 2", (0,)), ("group 2", (1,)),
    ]  # fmt: skip
    assert len(joined) == 2
    by_name = {each.name: curve for each, curve in curves.items()}
    assert by_name["group 1"] == ("group 1", "begun group 1", ("piece 0", "piece 1", "piece 2"))
    assert by_name["group 2"] == ("group 2", "begun group 2", ("piece 0", "piece 1"))
    assert by_name["group 0"][1:] == (None, ())
