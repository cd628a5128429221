"""A worker's next unit follows from the shards that it and the others hold."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from pipeline.methods.method import Moment, Task
from pipeline.units.reads import ReadLayer
from pipeline.units.scores import WindowForward, Windows
from pipeline.units.sums import Add, Collect
from pipeline.units.units import Backward, Forward, Solve, Unit, Write
from workers.placement import choose_unit

WRITE, COLLECT = Write(0, (), (), {}), Collect("compressed", 0, "worker", "pass-0", ())


def worker(shards: Iterable[int] = (), name: str = "", idle: bool = True) -> Any:
    return SimpleNamespace(shards={("", shard) for shard in shards}, name=name, idle=idle)


def forward(shard: int) -> Unit:
    return Forward("dense", 0, shard)


def solve(*paths: str) -> Unit:
    records: Any = {Moment(f"{path}.in"): SimpleNamespace(path=path) for path in paths}
    return Solve(Task(0, "-".join(paths), (), method=0), {}, records)


def test_its_own_shard_then_nobody_s_then_who_has_two_more() -> None:
    rich, poor = worker(shards=(0, 1, 2)), worker(shards=(3,))
    live = [rich, poor]
    assert choose_unit([COLLECT, forward(0), forward(9), forward(3)], poor, live) == 3
    assert choose_unit([COLLECT, forward(0), forward(9)], poor, live) == 2
    assert choose_unit([COLLECT, forward(0)], poor, live) == 1
    assert choose_unit([forward(3)], rich, live) is None
    assert choose_unit([COLLECT], rich, live) is None
    assert choose_unit([forward(0), solve("a")], poor, live) == 1


def windows(model: str, layer: int = 1, base: int = 1, models: int = 2) -> list[Unit]:
    cut = Windows.even(3, 3, "float32", 1, models=models)
    return [WindowForward(cut, model, layer, shard, base=base) for shard in range(3)]


def test_windows_are_held_apart_from_samples() -> None:
    """A worker with many samples may have no window; who has two windows more gives one away."""
    first, second = worker(range(9)), worker(range(9, 12))
    units = windows("made")
    assert choose_unit(units, first, [first, second]) == 0
    second.shards |= {("made", shard) for shard in range(3)}
    assert choose_unit(units[1:], first, [first, second]) == 0
    second.shards.discard(("made", 0))
    first.shards.add(("made", 0))
    assert choose_unit(units[1:], first, [first, second]) is None
    assert choose_unit([forward(1)], second, [first, second]) == 0


def test_the_few_shards_of_a_backward_pass_are_spread_whoever_holds_their_samples() -> None:
    """Evenly spread numbers may all be of one worker, as shards 1, 3 and 5 of two workers are."""
    first, second = live = [worker(range(0, 6, 2)), worker(range(1, 6, 2))]
    back: list[Unit] = [Backward(2, shard, ()) for shard in (1, 3, 5)]
    assert choose_unit(back, first, live) == 0
    first.shards.add(("gradients", 1))
    assert choose_unit(back[1:], second, live) == 0
    second.shards.add(("gradients", 3))
    assert choose_unit(back[:2], second, live) == 1
    assert choose_unit([forward(3), *back], first, live) == 1


def test_two_models_go_through_different_workers() -> None:
    """So that each builds the layers of one; none stays idle for that."""
    first, second, third = live = [worker(idle=False) for _ in range(3)]
    dense, made = windows("dense"), windows("made")
    first.shards.add(("dense", 0))
    assert choose_unit([dense[1], *made], second, live) == 1
    second.shards.add(("made", 0))
    assert choose_unit([made[1], dense[1]], first, live) == 1
    assert choose_unit([made[1]], first, live) is None
    assert choose_unit([made[1], dense[1]], third, live) == 0
    second.shards.add(("made", 1))
    assert choose_unit([made[2], dense[1]], second, live) is None, "half of three would do with two each"
    first.idle = True
    assert choose_unit([made[2]], first, live) == 0


def test_windows_of_one_model_are_spread_over_all_workers() -> None:
    first, second = live = [worker(), worker()]
    alone = windows("made", models=1)
    first.shards = {("made", 0), ("made", 1)}
    assert choose_unit(alone[2:], first, live) is None
    assert choose_unit(alone[2:], second, live) == 0
    assert choose_unit(windows("made")[2:], first, [first]) == 0


def test_who_has_more_windows_leaves_the_other_model_s_to_who_has_fewer() -> None:
    """Of two models on two workers each takes three of six windows, also if one of them was idle first."""
    first, second = live = [worker(), worker()]
    first.shards = {("made", shard) for shard in range(2)}
    second.shards = {("made", 2)}
    dense = windows("dense")
    assert choose_unit(dense, first, live) == 0
    first.shards.add(("dense", 0))
    assert choose_unit(dense[1:], first, live) is None
    second.idle = False
    assert choose_unit(dense[1:], first, live) is None, "the other one is idle when its unit ends"
    second.idle = True
    for shard in (1, 2):
        assert choose_unit(dense[shard:], second, live) == 0
        second.shards.add(("dense", shard))
    assert choose_unit(windows("third"), first, live) == 0, "where all have as many, nobody waits"


def test_windows_are_taken_over_by_who_is_idle_where_they_are_stored() -> None:
    rich, poor = live = [worker(), worker()]
    rich.shards = {("made", shard) for shard in range(3)}
    assert choose_unit(windows("made"), poor, live) == 0
    assert choose_unit(windows("made", layer=2), poor, live) is None
    poor.idle = False
    assert choose_unit(windows("made"), poor, live) is None


def test_a_solve_waits_for_an_idle_worker() -> None:
    """Behind another unit it would wait, while a worker that becomes idle first could run it."""
    busy, idle = worker(shards=(0,), idle=False), worker()
    assert choose_unit([solve("a")], busy, [busy, idle]) is None
    assert choose_unit([solve("a"), forward(0)], busy, [busy, idle]) == 1
    assert choose_unit([solve("a"), forward(0)], idle, [busy, idle]) == 0


def test_what_goes_beside_others_is_anybody_s() -> None:
    rich, poor = worker(shards=(0, 1, 2)), worker(shards=(3,))
    assert choose_unit([COLLECT, forward(3), WRITE], poor, [rich, poor], beside=True) == 2
    assert choose_unit([COLLECT, forward(3)], poor, [rich, poor], beside=True) is None
    assert choose_unit([WRITE, solve("a")], rich, [rich, poor]) == 1


def test_sums_are_added_on_their_node_while_somebody_lives_there() -> None:
    here, there, elsewhere = worker(name="a"), worker(name="b"), worker(name="c")
    add = Add("dense", 0, Moment("a.in"), 0, (), "node", ("a", "b"))
    waiting = [add, WRITE]
    assert choose_unit(waiting, elsewhere, [here, there, elsewhere], beside=True) == 1
    assert choose_unit(waiting, there, [here, there, elsewhere], beside=True) == 0
    assert choose_unit(waiting, elsewhere, [elsewhere], beside=True) == 0
    read = ReadLayer(3, 1, 2, ("a", "b"))
    assert choose_unit([read, WRITE], elsewhere, [here, there, elsewhere], beside=True) == 1
    assert choose_unit([read, WRITE], here, [here, there, elsewhere], beside=True) == 0
