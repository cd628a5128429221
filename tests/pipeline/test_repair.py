"""How often the same place is mended before the job ends."""

from __future__ import annotations

import pytest

from manifests.errors import CorruptError, LostInputError
from manifests.records import StatisticsEntry
from pipeline.repair import REPAIRS, Repairs, computed_keys
from tests.pipeline.simulation import MemoryJournal, Recorder, World

KEY = "statistics/00001"


@pytest.fixture
def repairs() -> Repairs:
    world = World()
    return Repairs(MemoryJournal(world), computed_keys(3), Recorder(world))


def test_a_place_is_mended_exactly_so_many_times(repairs: Repairs) -> None:
    for time in range(REPAIRS + 1):
        record = repairs.journal.world.store("statistic", str(time))
        repairs.journal.commit(KEY, StatisticsEntry(statistics={"a": record}))
        error = CorruptError("damaged", record.path)
        if time == REPAIRS:
            with pytest.raises(CorruptError, match="damaged"):
                repairs.invalidate(error)
            assert repairs.journal.get(KEY) is not None  # for whoever looks at it
        else:
            repairs.invalidate(error)
            assert repairs.journal.get(KEY) is None


def test_another_place_has_its_own_count(repairs: Repairs) -> None:
    for layer in range(3):
        for time in range(REPAIRS):
            record = repairs.journal.world.store("statistic", f"{layer} {time}")
            repairs.journal.commit(f"statistics/{layer:05d}", StatisticsEntry(statistics={"a": record}))
            repairs.invalidate(CorruptError("damaged", record.path))


def test_losses_count_since_the_last_commit(repairs: Repairs) -> None:
    for _ in range(2):
        for _ in range(REPAIRS):
            repairs.invalidate(LostInputError("gone"))
        repairs.progress()
    for _ in range(REPAIRS):
        repairs.invalidate(LostInputError("gone"))
    with pytest.raises(LostInputError, match="gone"):
        repairs.invalidate(LostInputError("gone"))
