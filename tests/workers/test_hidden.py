from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from manifests.errors import CorruptError
from stores.activations import ActivationStore
from tests.failing_disk import flip
from workers.copies import Copies
from workers.hidden import HiddenStates, InMemory, ShardKey

SHAPE = (3, 4, 8)
BYTES = 3 * 4 * 8 * 4


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    return ActivationStore(tmp_path / "activations.zarr")


def states(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def put(hidden: HiddenStates, place: ShardKey, values: torch.Tensor, store: bool = False) -> object:
    hidden_writer = hidden.hidden_writer(place, SHAPE, values.dtype, store, 2)
    hidden_writer.append(values[:2])
    hidden_writer.append(values[2:])
    return hidden.keep(place, hidden_writer)


def generations(store: ActivationStore, tmp_path: Path) -> list[str]:
    found = (tmp_path / "activations.zarr").glob("*/layer-*/shard-*/*/zarr.json")
    return sorted(str(path.parent.parent.relative_to(tmp_path / "activations.zarr")) for path in found)


def held(hidden: HiddenStates, place: ShardKey) -> torch.Tensor:
    slices = hidden.get(place)
    assert slices is not None
    return torch.cat((slices.read(0, 1), slices.read(1, 3)))


@pytest.mark.parametrize("store_it", [True, False])
@pytest.mark.parametrize("limit", [0, 10 * BYTES])
def test_what_is_kept_is_what_was_collected(store: ActivationStore, tmp_path: Path, limit: int, store_it: bool) -> None:
    hidden, place = HiddenStates(store, limit), ("dense", 1, 0)
    record = put(hidden, place, states(1), store_it)
    assert torch.equal(held(hidden, place), states(1))
    assert len(generations(store, tmp_path)) == int(store_it or limit == 0)
    assert (record is not None) == (store_it or limit == 0)


def test_a_commit_is_written_while_the_next_micro_batch_is_computed(store: ActivationStore) -> None:
    hidden, going_on, written = HiddenStates(store, 10 * BYTES), threading.Event(), []
    hidden_writer = hidden.hidden_writer(("dense", 1, 0), SHAPE, torch.float32, True, 2)
    append = hidden_writer.writer.append

    def slow(values: torch.Tensor) -> None:
        assert going_on.wait(timeout=30), "who computes waits for the store"
        written.append(len(values))
        append(values)

    hidden_writer.writer.append = slow
    hidden_writer.append(states(1)[:2])
    hidden_writer.append(states(1)[2:])
    assert not written
    going_on.set()
    record = hidden.keep(("dense", 1, 0), hidden_writer)
    assert written == [2, 1]
    assert record is not None
    assert torch.equal(store.open(record).read(0, 3), states(1))


def test_a_shard_is_held_at_one_layer_at_a_time(store: ActivationStore) -> None:
    hidden = HiddenStates(store, 10 * BYTES)
    put(hidden, ("dense", 1, 0), states(1))
    put(hidden, ("dense", 1, 1), states(2))
    put(hidden, ("dense", 2, 0), states(3))
    assert hidden.get(("dense", 1, 0)) is None
    assert torch.equal(held(hidden, ("dense", 1, 1)), states(2))
    assert torch.equal(held(hidden, ("dense", 2, 0)), states(3))


def test_another_lineage_takes_the_place_of_the_first(store: ActivationStore) -> None:
    hidden = HiddenStates(store, 10 * BYTES)
    put(hidden, ("dense", 3, 1), states(1))
    put(hidden, ("compressed", 1, 0), states(2))
    assert set(hidden.held) == {("compressed", 1, 0)}


def test_windows_of_two_models_go_on_beside_samples(store: ActivationStore) -> None:
    """While a layer is solved, or nothing else is left, a worker takes them in turns: neither is made again."""
    hidden = HiddenStates(store, 10 * BYTES)
    places: list[ShardKey] = [("compressed", 1, 0), ("windows-dense", 1, 0), ("windows-made", 1, 0)]
    for number, place in enumerate(places):
        put(hidden, place, states(number))
    assert [torch.equal(held(hidden, place), states(number)) for number, place in enumerate(places)] == [True] * 3
    put(hidden, ("windows-dense", 2, 0), states(3))
    put(hidden, ("dense", 1, 1), states(4))
    assert set(hidden.held) == {("dense", 1, 1), ("windows-dense", 2, 0), ("windows-made", 1, 0)}
    hidden.release_shard("windows-made", 0)
    assert set(hidden.held) == {("dense", 1, 1), ("windows-dense", 2, 0)}


def test_the_limit_counts_what_is_in_memory(store: ActivationStore, tmp_path: Path) -> None:
    hidden = HiddenStates(store, 2 * BYTES)
    for shard in range(4):
        put(hidden, ("dense", 1, shard), states(shard))
    assert generations(store, tmp_path) == ["dense/layer-00001/shard-00002", "dense/layer-00001/shard-00003"]
    for shard in range(4):
        assert torch.equal(held(hidden, ("dense", 1, shard)), states(shard))


def test_what_spilled_goes_with_its_layer(store: ActivationStore, tmp_path: Path) -> None:
    """Spilled data is removed with its layer, so that an evaluation of a deep model does not fill the disk."""
    hidden = HiddenStates(store, 0)
    for layer in range(6):
        for shard in range(2):
            put(hidden, ("dense", layer, shard), states(layer))
    assert generations(store, tmp_path) == ["dense/layer-00005/shard-00000", "dense/layer-00005/shard-00001"]


def test_what_was_stored_for_the_journal_is_not_the_worker_s_to_drop(store: ActivationStore, tmp_path: Path) -> None:
    hidden = HiddenStates(store, 0)
    for layer in range(3):
        put(hidden, ("dense", layer, 0), states(layer), store=True)
    assert len(generations(store, tmp_path)) == 3


def test_committed_states_are_read_from_the_store(store: ActivationStore) -> None:
    record = store.write("compressed", 4, 1, states(9), 2)
    hidden = HiddenStates(store, 10 * BYTES)
    slices = hidden.load(("compressed", 4, 1), record)
    assert torch.equal(slices.read(1, 3), states(9)[1:3])
    assert hidden.get(("compressed", 4, 1)) is slices


def test_what_is_older_than_the_base_is_let_go(store: ActivationStore, tmp_path: Path) -> None:
    """A shard that another worker has taken over must not take room for ever."""
    hidden = HiddenStates(store, BYTES)
    for shard in range(2):
        put(hidden, ("dense", 3, shard), states(shard))
    put(hidden, ("dense", 4, 2), states(2))
    assert len(generations(store, tmp_path)) == 2
    hidden.release_before("dense", 3)
    assert len(hidden.held) == 3
    hidden.release_before("dense", 4)
    assert set(hidden.held) == {("dense", 4, 2)}
    assert generations(store, tmp_path) == ["dense/layer-00004/shard-00002"]


def test_bfloat16(store: ActivationStore) -> None:
    hidden = HiddenStates(store, 0)
    values = states(1).bfloat16()
    put(hidden, ("dense", 1, 0), values)
    assert torch.equal(held(hidden, ("dense", 1, 0)), values)


def test_forgetting_says_whose_it_was(store: ActivationStore, tmp_path: Path) -> None:
    hidden = HiddenStates(store, 0)
    put(hidden, ("dense", 1, 0), states(1))
    record = put(hidden, ("dense", 1, 1), states(2), store=True)
    assert record is not None
    for chunk in (tmp_path / "activations.zarr").rglob("c.0.*"):
        flip(chunk)
    slices = hidden.get(("dense", 1, 0))
    assert slices is not None
    with pytest.raises(CorruptError) as raised:
        slices.read(0, 1)
    assert hidden.forget(raised.value.path)
    assert hidden.held == {}
    assert generations(store, tmp_path) == [record.path.rpartition("/")[0]], "what spilled is nobody's any more"
    hidden.load(("dense", 1, 1), record)
    assert not hidden.forget(record.path)


def test_the_device_comes_first_then_the_host_then_the_store(store: ActivationStore, tmp_path: Path) -> None:
    """There is room for one shard on the device and two on the host. Released shards make room again."""
    hidden = HiddenStates(store, 2 * BYTES, Copies(torch.device("cpu")), BYTES)
    for layer in (1, 2):
        for shard in range(4):
            put(hidden, ("dense", layer, shard), states(10 * layer + shard))
            assert torch.equal(held(hidden, ("dense", layer, shard)), states(10 * layer + shard))
    where = [slices.at if isinstance(slices, InMemory) else "store" for slices in hidden.held.values()]
    assert sorted(where) == ["device", "host", "host", "store"]
    assert len(generations(store, tmp_path)) == 1


def test_a_micro_batch_is_on_its_way_while_the_one_before_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream, a copy starts ahead, the device waits for it, and its memory is not reused meanwhile."""
    done: list[str] = []
    copies = Copies(torch.device("cpu"))
    computing = SimpleNamespace(wait_stream=lambda stream: done.append(f"compute waits for {stream.name}"))
    copies.stream = SimpleNamespace(  # type: ignore[assignment]
        name="copies",
        wait_stream=lambda stream: done.append("copies wait for compute"),
        synchronize=lambda: done.append("host waits"),
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda values, stream: None)
    values = states(3)

    class Read:
        def read(self, start: int, stop: int) -> torch.Tensor:
            done.append(f"read {start}")
            return values[start:stop]

    found = []
    for batch in copies.batches(Read(), [(0, 1), (1, 2), (2, 3)]):
        done.append("computed")
        found.append(batch)
    assert torch.equal(torch.cat(found), values)
    waits = "compute waits for copies"
    assert done == ["read 0", "read 1", waits, "computed", "read 2", waits, "computed", waits, "computed"]
    done.clear()
    place, there = torch.zeros(SHAPE), states(4)
    monkeypatch.setattr(copies, "device", torch.device("meta"))  # which is not where the host's memory is
    copies.keep(place, there.as_subclass(_Elsewhere))
    assert done == ["copies wait for compute"]
    copies.finish()
    assert done == ["copies wait for compute", "host waits"]
    assert torch.equal(place, there)


class _Elsewhere(torch.Tensor):
    """Says that it is on another device."""

    device = torch.device("meta")
