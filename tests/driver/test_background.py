"""Background fibers: on a scripted pool, and beside a whole driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from manifests.errors import CorruptError, LaminaError, LostInputError, StorageError
from manifests.records import ArrayRecord
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import LayersEntered
from pipeline.driver.scheduler import NOTHING_DUE, Coroutine, Scheduler, batch
from pipeline.driver.scoring import Scorer, score_beside_dense
from pipeline.methods.method import Task
from pipeline.methods.registry import layers_of
from pipeline.units.scores import Scored, WindowForward, Windows
from pipeline.units.units import Forward, Solve, Unit, Write
from tests.driver.simulation import (
    JOBS,
    Killed,
    MemoryJournal,
    Recorder,
    SimulatedPool,
    World,
    WorldCleaner,
)

WRITE = Write(0, (), (), {})
SOLVE, FORWARD = Solve(Task(0, "mlp", ("down",), method=0), {}, {}), Forward("dense", 0, 0)


def windows(layer: int, count: int) -> list[Unit]:
    return [WindowForward(Windows((), "float32", 1), "m", layer, shard) for shard in range(count)]


class Pool:
    """See `pipeline.driver.interfaces.Pool`: a result is its unit's key; `errors` are raised, once, for their units."""

    nodes = (("one",),)

    def __init__(self, size: int, **errors: LaminaError) -> None:
        self.size = size
        self.waiting: deque[Unit] = deque()
        self.submitted: list[str] = []
        self.errors = errors

    def submit(self, unit: Unit) -> None:
        self.waiting.append(unit)
        self.submitted.append(unit.key)

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


def scheduler(size: int, **errors: LaminaError) -> tuple[Scheduler, Pool, list[str]]:
    """A scheduler, its pool, and the units that its observer is told of."""
    pool, recorder = Pool(size, **errors), Recorder(World())
    return Scheduler(pool, recorder), pool, recorder.units


def layers(count: int, shards: int, ready: Callable[[], bool] = lambda: True) -> Coroutine[list[str]]:
    results = []
    for layer in range(count):
        while not ready():
            yield NOTHING_DUE
        results += yield windows(layer, shards)
    return results


def keys(units: Any) -> list[str]:
    return [unit.key.partition("/")[0] for unit in units]


def test_background_units_go_to_idle_workers_alone() -> None:
    """Of three workers one solves. A write leaves its worker idle; a forward pass leaves none, as the next layer waits
    for it."""
    runs, pool, observed = scheduler(3)
    fiber = runs.spawn_background(layers(2, 3))
    assert runs.run(batch([FORWARD])) == [FORWARD.key]
    assert not runs.background_begun
    assert runs.run(batch([SOLVE, WRITE])) == [SOLVE.key, WRITE.key]
    assert [key.partition("/")[0] for key in pool.submitted[:5]] == [
        "forward", "solve", "write", "windowforward", "windowforward",
    ]  # fmt: skip
    submitted = len(pool.submitted)
    assert runs.run(batch([FORWARD])) == [FORWARD.key]
    assert pool.submitted[submitted:] == [FORWARD.key]
    assert not fiber.done
    runs.run_background()
    assert fiber.outcome == [unit.key for layer in range(2) for unit in windows(layer, 3)]
    assert observed == [FORWARD.key, SOLVE.key, WRITE.key, FORWARD.key], "phases count their own units"


def test_a_background_stream_may_wait_for_work_to_be_due() -> None:
    ready: list[int] = []
    runs, _, _ = scheduler(2)
    fiber, other = runs.spawn_background(layers(1, 1, lambda: bool(ready))), runs.spawn_background(layers(1, 2))
    for _ in range(3):
        runs.run(batch([WRITE]))
    assert (fiber.done, len(other.outcome or ())) == (False, 2)
    ready.append(1)
    runs.run_background()
    assert fiber.outcome == ["windowforward/m/0/0"]


def test_background_streams_take_turns() -> None:
    """None waits for another's many units; a fiber that waits for another's outcome goes on when that has ended."""

    def shards(model: str) -> Coroutine[str]:
        yield [WindowForward(Windows((), "float32", 1), model, 0, shard) for shard in range(4)]
        return model

    def behind() -> Coroutine[str]:
        assert (yield first) == "a"
        return (yield from shards("behind"))

    def polling() -> Coroutine[str]:
        while not first.done:
            yield NOTHING_DUE
        return "polled"

    runs, pool, _ = scheduler(2)
    last, polled = runs.spawn_background(behind()), runs.spawn_background(polling())
    first, other = runs.spawn_background(shards("a")), runs.spawn_background(shards("b"))
    runs.run_background()
    assert pool.submitted[:4] == [f"windowforward/{of}/0/{number}" for number in range(2) for of in ("a", "b")]
    assert [fiber.outcome for fiber in (first, other, last, polled)] == ["a", "b", "behind", "polled"]


def test_damage_ends_a_background_stream_and_nothing_else() -> None:
    """Its units in flight are waited for, or their results would be taken for another fiber's."""
    damaged = CorruptError("damaged")
    runs, pool, _ = scheduler(4, **{"windowforward/m/0/0": damaged, SOLVE.key: CorruptError("of the driver's own")})
    fiber = runs.spawn_background(layers(2, 3))
    assert runs.run(batch([WRITE])) == [WRITE.key]
    with pytest.raises(CorruptError, match="driver's own"):
        runs.run(batch([SOLVE]))
    runs.run_background()
    assert (fiber.done, fiber.outcome, fiber.error, len(pool.waiting)) == (True, None, damaged, 0)
    assert not any(key.startswith("windowforward/m/1") for key in pool.submitted)
    full, _, _ = scheduler(2, **{"windowforward/m/0/0": StorageError("no room")})
    full.spawn_background(layers(1, 1))
    with pytest.raises(StorageError, match="no room"):
        full.run_background()


def test_damage_ends_a_stream_that_waits_for_the_damaged_one() -> None:
    runs, _, _ = scheduler(2, **{"windowforward/m/0/0": CorruptError("damaged")})
    first = runs.spawn_background(layers(1, 2))

    def behind() -> Coroutine[Any]:
        return (yield first)

    second = runs.spawn_background(behind())
    runs.run_background()
    assert (second.done, second.outcome, second.error) == (True, None, first.error)


def test_cancelled_background_units_are_submitted_again() -> None:
    runs, pool, _ = scheduler(2, **{SOLVE.key: LostInputError("gone")})
    fiber = runs.spawn_background(layers(2, 2))
    with pytest.raises(LostInputError):
        runs.run(batch([SOLVE]))
    assert len(pool.waiting) == 1
    runs.cancel()
    assert not pool.waiting
    assert runs.run(batch([FORWARD])) == [FORWARD.key]
    runs.run_background()
    assert fiber.outcome == [unit.key for layer in range(2) for unit in windows(layer, 2)]


# Beside a driver ------------------------------------------------------------------------------------------------------


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
    runs = Scheduler(SimulatedPool(world, order, size=3), recorder)
    entered = LayersEntered(journal, job.num_layers, layers_of(job.tasks))  # type: ignore[arg-type]

    def scorer() -> Scorer:
        mine, layers = Careful(world, always, lambda: False), job.num_layers
        return Scorer(runs, journal, mine, layers, job.every, lambda: runs.alone)

    def scoring_dense() -> Coroutine[Any]:
        mine = scorer()
        outputs = (yield from mine.states_coroutine(held, "dense", [None] * job.num_layers)).outputs
        always.extend(outputs)
        mine.forget("dense")
        return outputs

    def scoring() -> Coroutine[Scored]:
        dense = runs.spawn_background(scoring_dense())
        mine = scorer()
        scored = yield from score_beside_dense(mine, held, "made", entered, dense)
        mine.forget("made")
        return scored

    fiber = runs.spawn_background(scoring()) if aside else None
    Driver(job, runs, journal, Careful(world, always, lambda: not runs.background_begun)).run()
    fiber = fiber or runs.spawn_background(scoring())
    runs.run_background()
    assert fiber.outcome is not None
    Careful(world, always, lambda: True).retain_activations(())
    return fiber.outcome


@pytest.mark.parametrize("order", ["first", "last", 4])
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


@pytest.mark.slow
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
