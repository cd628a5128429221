"""Which unit a worker is given, by what it and the others hold."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from pipeline.methods.method import Moment, Task
from pipeline.sum_units import Collect
from pipeline.units import Forward, Solve, Unit, Write
from workers.placing import choose

WRITE, COLLECT = Write(0, (), (), {}), Collect("compressed", 0, "worker", "pass-0", ())


def worker(shards: Iterable[int] = (), kept: Iterable[str] = (), running: int = 0) -> Any:
    return SimpleNamespace(shards=set(shards), kept=set(kept), running=[WRITE] * running)


def forward(shard: int) -> Unit:
    return Forward("dense", 0, shard)


def solve(*paths: str) -> Unit:
    records: Any = {Moment(f"{path}.in"): SimpleNamespace(path=path) for path in paths}
    return Solve(Task(0, "-".join(paths), (), method=0), {}, records)


def test_its_own_shard_then_nobody_s_then_who_has_two_more() -> None:
    rich, poor = worker(shards=(0, 1, 2)), worker(shards=(3,))
    live = [rich, poor]
    assert choose([COLLECT, forward(0), forward(9), forward(3)], poor, live) == 3
    assert choose([COLLECT, forward(0), forward(9)], poor, live) == 2
    assert choose([COLLECT, forward(0)], poor, live) == 1
    assert choose([forward(3)], rich, live) is None
    assert choose([COLLECT], rich, live) is None
    assert choose([forward(0), WRITE], poor, live) == 1


def test_what_it_keeps_a_moment_for_comes_first() -> None:
    keeper, other = worker(shards=(0,), kept=("b",)), worker()
    assert choose([forward(0), solve("a"), solve("a", "b")], keeper, [keeper, other]) == 2


def test_a_keeper_without_work_is_waited_for_and_one_with_work_is_helped() -> None:
    idle, other = worker(kept=("a", "b")), worker()
    waiting = [solve("a"), solve("b")]
    assert choose(waiting, other, [idle, other]) is None
    assert choose([*waiting, WRITE], other, [idle, other]) == 2
    assert choose(waiting, idle, [idle, other]) == 0
    busy = worker(kept=("a", "b"), running=1)
    assert choose(waiting, other, [busy, other]) == 0
    assert choose([solve("c")], other, [idle, other]) == 0  # nobody keeps it
    assert choose(waiting, other, [other]) == 0  # who kept it is gone
