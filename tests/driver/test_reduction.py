"""Reductions of sums: which units they yield, and how lost sums are replaced."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import LostInputError
from pipeline.driver.reduction import _Group, _missing, _Reduction, _workers, _WorkerSums
from pipeline.methods.method import Moment
from pipeline.units.sums import Add, AddDone, CheckGrids, CheckGridsDone, Collect, CollectDone, Sums

FIRST, SECOND = MOMENTS = (Moment("mlp.in"), Moment("down.in"))
GRIDS = {FIRST: "grid 1", SECOND: "grid 2"}
SUMS = Sums("pass", GRIDS)


@dataclass(frozen=True)
class Shard:
    """A unit whose sums are reduced."""

    shard: int
    sums: Sums | None = SUMS
    lineage: str = "dense"
    layer: int = 3
    part: int | None = None

    def for_sums_only(self, moments: tuple[Moment, ...], sums: Sums) -> Shard:
        assert moments == tuple(sums.grids)
        return replace(self, sums=sums)


UNITS = [Shard(shard) for shard in range(4)]


def sums_of(worker: str, shards: Sequence[int], node: str = "n", pieces: int = 2) -> _WorkerSums:
    """Return the collected sums of a worker; a sum is named after the worker and the moment's point."""
    partials = {m: tuple(f"{worker} {m.point} {number}" for number in range(pieces)) for m in MOMENTS}
    tokens = {FIRST: 10 * len(shards), SECOND: len(shards)}
    return _WorkerSums(
        f"collect/dense/3/{worker}", CollectDone(partials, dict.fromkeys(MOMENTS, worker), (*shards,), node, tokens)
    )


def reductions(size: int = 2) -> Any:
    lost: list[LostInputError] = []
    session: Any = SimpleNamespace(pool=SimpleNamespace(size=size), repairs=SimpleNamespace(invalidate=lost.append))
    return SimpleNamespace(run=_Reduction(session, store=True), session=session, lost=lost)


def finish(coroutine: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """Run a coroutine with the answers to its batches of units. Return its result and all units."""
    seen: list[Any] = []
    try:
        awaited = next(coroutine)
        while True:
            seen += awaited if isinstance(awaited, list) else []
            awaited = coroutine.send([answer(unit) for unit in awaited] if isinstance(awaited, list) else None)
    except StopIteration as ended:
        return ended.value, seen


def added(unit: Add) -> AddDone:
    return AddDone("(" + " + ".join(unit.partials) + ")")


def test_sums_of_one_worker_are_the_moment_without_an_addition() -> None:
    group = _Group(UNITS, GRIDS, [sums_of("a", range(4))])
    _, units = finish(reductions().run._add(group), added)
    assert units == []
    assert group.summed[FIRST].partials == ("a mlp.in 0", "a mlp.in 1")
    assert (group.summed[FIRST].grid, group.summed[FIRST].tokens) == ("grid 1", 40)
    assert group.summed[SECOND].tokens == 4
    assert group.collected == []  # freed


def test_workers_of_one_node_are_added_at_once_anywhere() -> None:
    group = _Group(UNITS, GRIDS, [sums_of("a", [0]), sums_of("b", [2, 3]), sums_of("c", [1])])
    _, units = finish(reductions().run._add(group), added)
    assert [(unit.moment, unit.part, unit.node, unit.near) for unit in units] == [
        (moment, number, "", ()) for moment in MOMENTS for number in range(2)
    ]
    assert group.summed[SECOND].partials == tuple(
        f"(a down.in {number} + b down.in {number} + c down.in {number})" for number in range(2)
    )
    assert group.summed[FIRST].tokens == 40
    assert group.added == {unit.key for unit in units}


def test_workers_of_several_nodes_are_added_within_each_node_first() -> None:
    collected = [sums_of("a", [0], "x", 1), sums_of("b", [1], "y", 1), sums_of("c", [2], "x", 1)]
    group = _Group(UNITS, GRIDS, collected)
    _, units = finish(reductions().run._add(group), added)
    assert [(unit.node, unit.near) for unit in units] == [("x", ("a", "c"))] * 2 + [("", ())] * 2
    assert group.summed[FIRST].partials == ("((a mlp.in 0 + c mlp.in 0) + b mlp.in 0)",)
    assert len({unit.key for unit in units}) == len(units) == len(group.added)


def test_missing_shards_and_workers() -> None:
    assert _missing(UNITS, []) == UNITS
    assert _missing(UNITS, [sums_of("a", [1, 3])]) == [UNITS[0], UNITS[2]]
    assert _missing(UNITS, [sums_of("a", [1, 3]), sums_of("b", [0, 2])]) == []
    with pytest.raises(AssertionError, match="added once"):
        _missing(UNITS, [sums_of("a", [1]), sums_of("b", [1])])
    done: Any = [SimpleNamespace(worker=name) for name in ("b", "a", "b")]
    assert _workers(done) == ("b", "a")


def rerunning(shards: dict[str, tuple[int, ...]]) -> Callable[[Any], Any]:
    """Answer units that run again on worker `z`, and what workers have of them: shards, or None if they are lost."""

    def answer(unit: Any) -> Any:
        if isinstance(unit, Shard):
            return SimpleNamespace(worker="z")
        assert isinstance(unit, Collect)
        found = shards.get(unit.worker)
        return None if found is None else sums_of(unit.worker, found).done

    return answer


def test_lost_sums_are_replaced_and_cut_as_the_others() -> None:
    collected, scripted = [sums_of("a", [0, 1]), sums_of("b", [2, 3])], reductions()
    scripted.session.pool.size = 8  # workers have joined since
    error = LostInputError("gone", (collected[1].key,))
    replaced, units = finish(scripted.run._replaced(UNITS, GRIDS, collected, error), rerunning({"z": (2, 3)}))
    assert [(each.worker, each.done.shards) for each in replaced] == [("a", (0, 1)), ("z", (2, 3))]
    assert [unit.shard for unit in units[:2]] == [2, 3]
    assert units[0].sums.name == units[1].sums.name != "pass"  # workers may still hold the sums of the pass
    assert [unit.parts for unit in units[2:]] == [2]
    assert scripted.lost == [error]


@pytest.mark.parametrize("known", [False, True])
def test_an_error_that_names_no_sums_is_not_swallowed(known: bool) -> None:
    collected, scripted = [sums_of("a", range(4))], reductions()
    error = LostInputError("gone", ("solve/7",))
    coroutine = scripted.run._replaced(UNITS, GRIDS, collected, error, known)
    if known:  # an addition was lost, which is done again
        assert finish(coroutine, rerunning({})) == (collected, [])
        return
    with pytest.raises(LostInputError, match="gone"):
        finish(coroutine, rerunning({}))
    assert scripted.lost == []


def test_all_sums_of_a_pass_are_collected_though_workers_die() -> None:
    answers = iter([sums_of("z", [0, 1]).done, None, sums_of("z", [2, 3]).done])

    def answer(unit: Any) -> Any:
        return SimpleNamespace(worker="z") if isinstance(unit, Shard) else next(answers)

    collected, units = finish(reductions(size=3).run._sum_again(UNITS, GRIDS), answer)
    assert sorted(shard for each in collected for shard in each.done.shards) == [0, 1, 2, 3]
    shards = [[unit.shard] for unit in units if isinstance(unit, Shard)]
    assert shards == [[0], [1], [2], [3], [2], [3], [2], [3]]  # again, while they are in no sum
    collects = [unit for unit in units if isinstance(unit, Collect)]
    assert [unit.worker for unit in collects] == ["z", "z", "z"]
    assert {unit.parts for unit in collects} == {3}
    assert len({unit.sums for unit in collects}) == 3


def test_moments_beyond_their_grids_are_summed_again_on_their_own() -> None:
    def answer(unit: Any) -> Any:
        if isinstance(unit, CheckGrids):
            return CheckGridsDone({SECOND: "wider"} if unit.grids == GRIDS else {})
        return rerunning({"z": (0, 1, 2, 3)})(unit)

    groups, units = finish(
        reductions().run._within_grids(UNITS, GRIDS, [sums_of("a", [0, 1]), sums_of("b", [2, 3])]), answer
    )
    assert [group.grids for group in groups] == [{FIRST: "grid 1"}, {SECOND: "wider"}]
    assert [[each.worker for each in group.collected] for group in groups] == [["a", "b"], ["z"]]
    assert [unit.shard for unit in units if isinstance(unit, Shard)] == [0, 1, 2, 3]
    checks = [unit for unit in units if isinstance(unit, CheckGrids)]
    assert checks[0].diagonals == {FIRST: ("a", "b"), SECOND: ("a", "b")}
    assert [{*check.grids} for check in checks] == [{FIRST, SECOND}, {SECOND}]
    assert not any(each.done.diagonals for group in groups for each in group.collected)
