"""What is done while others leave workers idle: on a pool that is asked by hand, and beside a whole driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from manifests.errors import CorruptError, LaminaError, StorageError
from manifests.records import ArrayRecord
from pipeline.driver.background_pool import BackgroundPool
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import LayersEntered
from pipeline.driver.scheduler import NOTHING_DUE, TaskStream
from pipeline.driver.scoring import Scorer
from pipeline.methods.method import Task
from pipeline.methods.registry import layers_of
from pipeline.units.scores import Compare, Scored, WindowForward, Windows
from pipeline.units.units import Forward, Solve, Unit, Write
from tests.pipeline.simulation import (
    JOBS,
    Killed,
    MemoryJournal,
    Recorder,
    SimulatedPool,
    World,
    WorldCleaner,
)

COMPARE, WRITE = Compare((), ()), Write(0, (), (), {})
SOLVE, FORWARD = Solve(Task(0, "mlp", ("down",), method=0), {}, {}), Forward("dense", 0, 0)


def windows(layer: int, count: int) -> list[Unit]:
    return [WindowForward(Windows((), "float32", 1), "m", layer, shard) for shard in range(count)]


class Pool:
    """See `pipeline.driver.interfaces.Pool`: a result is its unit's key; `errors` are raised, once, for their units."""

    nodes = (("one",),)
    seconds: dict[str, list[float]] = {}  # noqa: RUF012 - nobody writes to it
    peak_bytes: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, size: int, **errors: LaminaError) -> None:
        self.size = size
        self.waiting: deque[Unit] = deque()
        self.errors = errors

    def submit(self, unit: Unit) -> None:
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        unit = self.waiting.popleft()
        if error := self.errors.pop(unit.key, None):
            error.unit = unit.key
            raise error
        return unit, unit.key

    def cancel_pending(self) -> None:
        self.waiting.clear()

    def forget(self) -> None:
        assert not self.waiting


def layers(count: int, shards: int, there: Callable[[], bool] = lambda: True) -> TaskStream[list[str]]:
    found = []
    for layer in range(count):
        while not there():
            yield NOTHING_DUE
        found += yield windows(layer, shards)
    return found


def keys(units: Any) -> list[str]:
    return [unit.key.partition("/")[0] for unit in units]


def test_idle_workers_alone_are_given_something() -> None:
    """Of three, one solves; who writes has a hand free; whoever goes through a layer is not kept from the next."""
    pool = Pool(3)
    aside = BackgroundPool(pool)
    course = aside.add(layers(2, 3))
    aside.submit(FORWARD)
    assert aside.wait() == (FORWARD, FORWARD.key)
    assert not aside.begun
    for unit in (SOLVE, WRITE):
        aside.submit(unit)
    aside._fill()
    assert keys(pool.waiting) == ["solve", "write", "windowforward", "windowforward"]
    assert [aside.wait()[0], aside.wait()[0]] == [SOLVE, WRITE]
    aside.submit(FORWARD)
    assert aside.wait() == (FORWARD, FORWARD.key)
    assert (course.outcome, len(pool.waiting)) == (None, 0)
    aside.finish()
    assert course.outcome == [unit.key for layer in range(2) for unit in windows(layer, 3)]


def test_a_course_may_wait_for_others() -> None:
    ready: list[int] = []
    aside = BackgroundPool(Pool(2))
    course, other = aside.add(layers(1, 1, lambda: bool(ready))), aside.add(layers(1, 2))
    for _ in range(3):
        aside.submit(WRITE)
        aside.wait()
    assert (course.outcome, len(other.outcome or ())) == (None, 2)
    ready.append(1)
    aside.finish()
    assert course.outcome == ["windowforward/m/0/0"]


def test_courses_take_turns() -> None:
    """None is kept waiting by another's many units; who waits for what one makes is asked again when that has ended."""

    def shards(model: str) -> TaskStream[str]:
        yield [WindowForward(Windows((), "float32", 1), model, 0, shard) for shard in range(4)]
        return model

    def behind() -> TaskStream[str]:
        while found.outcome is None:
            yield NOTHING_DUE
        return (yield from shards("behind"))

    pool = Pool(2)
    aside = BackgroundPool(pool)
    last = aside.add(behind())
    found, other = aside.add(shards("a")), aside.add(shards("b"))
    aside.alone = True
    aside._fill()
    assert [unit.key for unit in pool.waiting] == [f"windowforward/{of}/0/{n}" for n in range(2) for of in ("a", "b")]
    aside.finish()
    assert (found.outcome, other.outcome, last.outcome) == ("a", "b", "behind")


def test_damage_ends_a_course_and_nothing_else() -> None:
    """What is under way of it then is waited for, or its results would be taken for another's."""
    pool = Pool(4, **{"windowforward/m/0/0": CorruptError("damaged"), SOLVE.key: CorruptError("of the driver's own")})
    aside = BackgroundPool(pool)
    course = aside.add(layers(2, 3))
    aside.submit(WRITE)
    assert aside.wait() == (WRITE, WRITE.key)
    aside.submit(SOLVE)
    with pytest.raises(CorruptError, match="driver's own"):
        aside.wait()
    aside.finish()
    assert (course.outcome, course.live, len(pool.waiting)) == (None, False, 0)
    full = BackgroundPool(Pool(2, **{"windowforward/m/0/0": StorageError("no room")}))
    full.add(layers(1, 1))
    with pytest.raises(StorageError, match="no room"):
        full.finish()


def test_what_is_cancelled_with_others_is_begun_again() -> None:
    pool = Pool(2)
    aside = BackgroundPool(pool)
    course = aside.add(layers(2, 2))
    aside.submit(WRITE)
    aside._fill()
    assert len(pool.waiting) == 3
    aside.cancel_pending()
    assert not pool.waiting
    aside.submit(FORWARD)
    assert aside.wait() == (FORWARD, FORWARD.key)
    aside._fill()
    aside.forget()  # what others hold: when nothing is under way
    aside.finish()
    assert course.outcome == [unit.key for layer in range(2) for unit in windows(layer, 2)]


# Beside a driver ------------------------------------------------------------------------------------------------------


class Measured(SimulatedPool):
    """As a job's."""

    seconds = Pool.seconds
    peak_bytes = Pool.peak_bytes


class Careful(WorldCleaner):
    """As a job's: unless it is alone, it drops what it retained before and no more."""

    def __init__(self, world: World, always: list[ArrayRecord], alone: Callable[[], bool]) -> None:
        super().__init__(world)
        self.always, self.alone, self.before = always, alone, set[str]()

    def retain_activations(self, records: tuple[ArrayRecord, ...]) -> None:
        live = {record.path for record in (*records, *self.always)}
        if self.alone():
            super().retain_activations((*records, *self.always))
        for path in self.before - live:
            self.world.stores["activation"].pop(path, None)
        self.before = live


def compressed_and_scored(name: str, world: World, aside: bool, order: str | int = "first") -> Scored:
    """A job's layers, and what they lose beside the dense model; one after the other or side by side."""
    job, journal, recorder = JOBS[name](), MemoryJournal(world), Recorder(world)
    tokens = world.store("activation", "tokens")
    held, always = Windows.even(2, 2, "float32", 1, tokens), [tokens]
    pool = BackgroundPool(Measured(world, order, size=3))
    entered = LayersEntered(journal, job.num_layers, layers_of(job.tasks))  # type: ignore[arg-type]

    def scorer(first: Callable[[], bool]) -> Scorer:
        mine, layers = Careful(world, always, lambda: False), job.num_layers
        return Scorer(pool, journal, mine, recorder, layers, job.every, lambda: pool.alone and first())  # type: ignore[arg-type]

    def scoring_dense() -> TaskStream[Any]:
        mine = scorer(lambda: True)
        outputs = yield from mine.outputs_stream(held, "dense", [None] * job.num_layers)
        always.extend(outputs)
        mine.forget("dense")
        return outputs

    def scoring() -> TaskStream[Scored]:
        dense = pool.add(scoring_dense())
        mine = scorer(lambda: not dense.live)
        found = yield from mine.score_stream(held, "made", entered, lambda: dense.outcome)
        mine.forget("made")
        return found

    course = pool.add(scoring()) if aside else None
    Driver(job, pool, journal, Careful(world, always, lambda: not pool.begun), recorder).run()  # type: ignore[arg-type]
    course = course or pool.add(scoring())
    pool.finish()
    assert course.outcome is not None
    Careful(world, always, lambda: True).retain_activations(())
    return course.outcome


@pytest.mark.parametrize("order", ["first", "last", 3])
@pytest.mark.parametrize("name", ["dense", "compressed-every-2", "compressed-some", "gradient", "corrected-two"])
def test_a_model_is_scored_while_it_is_compressed(name: str, order: str | int) -> None:
    """With the same figures and entries as afterwards, and in part before the last layer is written."""
    after, beside = World(), World()
    expected = compressed_and_scored(name, after, aside=False)
    assert compressed_and_scored(name, beside, aside=True, order=order) == expected
    assert beside.journal() == after.journal()
    assert sorted(beside.stores["activation"].values()) == sorted(after.stores["activation"].values())
    kinds = keys(beside.done)
    last = len(kinds) - 1 - kinds[::-1].index("write")
    assert "windowforward" in kinds[:last]
    passes = kinds.index("windowforward"), len(kinds) - 1 - kinds[::-1].index("forward") if "forward" in kinds else 0
    assert not name.startswith("dense") or passes[0] > passes[1], "nobody is kept from a pass"


def test_killed_anywhere_it_is_scored_as_ever() -> None:
    expected = compressed_and_scored("compressed-every-2", World(), aside=True)
    fuel, step = 0, 7
    while True:
        world = World(fuel=fuel)
        try:
            compressed_and_scored("compressed-every-2", world, aside=True)
            break
        except Killed:
            world.fuel = None
            assert compressed_and_scored("compressed-every-2", world, aside=True) == expected
            assert not world.repairs, fuel
            fuel += step
    assert fuel > 20 * step
