"""How often the same place is mended before the job ends."""

from __future__ import annotations

import pytest

from manifests.entries import DenseEntry, GradientEntry, StatisticsEntry
from manifests.errors import CorruptError, LostInputError
from manifests.records import ArrayRecord, GradientRecord
from pipeline.driver.recovery import REPAIRS, Repairs, computed_keys
from tests.driver.simulation import MemoryJournal, Recorder, World

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


def record(number: int) -> ArrayRecord:
    size, digest = (1,), "0" * 64
    return ArrayRecord(
        version=1,
        path=path(number),
        shape=size,
        dtype="uint8",
        chunks=size,
        symmetric=False,
        metadata_sha256=digest,
        checksums=(),
    )


def path(number: int) -> str:
    return f"array/{number:032}"


@pytest.fixture
def walked(repairs: Repairs) -> Repairs:
    """A job in its backward pass: inputs of the layers are stored, gradients are committed at the last two."""
    for layer in range(3):
        dense = DenseEntry(cosine=(), statistics={"a": record(layer)}, inputs=(None, record(10 + layer)))
        repairs.journal.commit(f"dense/{layer:05d}", dense)
    for layer in (1, 2):
        moment = GradientRecord(**dict(record(20 + layer)), square_norms=(1.0,), sequences=1, tokens=1)
        gradient = GradientEntry(statistics={"b": moment}, activations=(record(30 + layer),))
        repairs.journal.commit(f"gradient/{layer:05d}", gradient)
    return repairs


def fields(repairs: Repairs, kind: str) -> list[set[str] | None]:
    entries = [repairs.journal.get(f"{kind}/{layer:05d}") for layer in range(3)]
    return [None if entry is None else set(entry.as_json()) for entry in entries]


def test_a_stored_input_takes_no_moment_along(walked: Repairs) -> None:
    walked.invalidate(CorruptError("damaged", path(11)))
    whole = {"cosine", "statistics", "inputs"}
    assert fields(walked, "dense") == [whole, whole - {"inputs"}, whole]
    assert fields(walked, "gradient") == [None, *[{"statistics", "activations"}] * 2]


def test_committed_gradients_take_no_moment_along(walked: Repairs) -> None:
    """But what they are made from, of which parts were dropped as they passed."""
    walked.invalidate(CorruptError("damaged", path(31)))
    assert fields(walked, "dense") == [{"cosine", "statistics"}] * 3
    assert fields(walked, "gradient") == [None, {"statistics"}, {"statistics"}]


def test_a_moment_of_gradients_takes_only_its_own_entry_along(walked: Repairs) -> None:
    walked.invalidate(CorruptError("damaged", path(22)))
    assert fields(walked, "dense") == [{"cosine", "statistics"}] * 3
    assert fields(walked, "gradient") == [None, {"statistics"}, None]
