"""Statistics and activations: one conformance class for what they share, then what each does besides."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from pydantic import ValidationError

from manifests.errors import CorruptError, InputError, StorageError
from manifests.records import ArrayRecord
from stores.activations import ActivationStore
from stores.arrays import chunk_shape
from stores.ledger import Ledger
from stores.statistics import StatisticsStore

KilledAnywhere = Callable[..., int]


def array_of(entry: Mapping[str, Any]) -> ArrayRecord:
    """The array that an entry without a class names."""
    return ArrayRecord.model_validate(entry["array"])


def seeded(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def symmetric(seed: int, groups: int, features: int) -> torch.Tensor:
    values = seeded(seed, groups, features, features)
    return values + values.transpose(1, 2)


class Conformance:
    """Conformance of every store of arrays; subclasses define `make`, `write` and `read`."""

    def make(self, directory: Path) -> Any:
        raise NotImplementedError

    def value(self, seed: int) -> torch.Tensor:
        raise NotImplementedError

    def write(self, store: Any, value: torch.Tensor) -> ArrayRecord:
        raise NotImplementedError

    def read(self, store: Any, record: ArrayRecord) -> torch.Tensor:
        raise NotImplementedError

    def files(self, directory: Path, record: ArrayRecord) -> list[Path]:
        return sorted((directory / record.path).iterdir())

    def test_reads_back_bit_for_bit_in_another_process(self, tmp_path: Path) -> None:
        value = self.value(0)
        kept = value.clone()
        record = self.write(self.make(tmp_path), value)
        assert torch.equal(self.read(self.make(tmp_path), record), kept)
        assert torch.equal(value, kept)

    def test_generations_live_side_by_side(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        records = [self.write(store, self.value(seed)) for seed in range(3)]
        for seed, record in enumerate(records):
            assert torch.equal(self.read(store, record), self.value(seed))
        assert store.sweep([records[1]]) == 2
        assert torch.equal(self.read(store, records[1]), self.value(1))
        with pytest.raises(CorruptError, match=records[0].path):
            self.read(store, records[0])
        store.drop(records[1])
        store.drop(records[1])
        with pytest.raises(CorruptError):
            self.read(store, records[1])

    def test_any_damage_to_any_file_is_seen(self, tmp_path: Path, damage: Callable[[Path], object]) -> None:
        store = self.make(tmp_path)
        record = self.write(store, self.value(0))
        for path in self.files(tmp_path, record):
            whole = path.read_bytes()
            damage(path)
            with pytest.raises(CorruptError) as caught:
                self.read(store, record)
            assert record.path in str(caught.value)
            assert pickle.loads(pickle.dumps(caught.value)).path == record.path  # by it the driver finds the entry
            path.write_bytes(whole)
        assert torch.equal(self.read(store, record), self.value(0))

    def test_a_chunk_of_another_place_or_time_is_seen(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        record, other = self.write(store, self.value(0)), self.write(store, self.value(1))
        first, second, *_ = self.files(tmp_path, record)
        assert first.name.startswith("c.")
        whole = first.read_bytes()
        for impostor in (second, tmp_path / other.path / first.name):
            first.write_bytes(impostor.read_bytes())
            with pytest.raises(CorruptError, match="not the chunk that was committed"):
                self.read(store, record)
        first.write_bytes(whole)
        assert torch.equal(self.read(store, record), self.value(0))

    def test_every_file_is_durable_before_there_is_a_record(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        record = self.write(self.make(tmp_path), self.value(0))
        generation = tmp_path / record.path
        below = [path for path in (generation, *generation.parents) if path.is_relative_to(tmp_path)]
        assert {str(path) for path in (*self.files(tmp_path, record), *below)} <= set(synced)

    def test_sweep_takes_partial_files(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        record = self.write(store, self.value(0))
        torn = tmp_path / record.path / f"c.0.{'0' * 32}.partial"
        torn.write_bytes(b"torn")
        assert store.sweep([record]) == 0
        assert not torn.exists()
        assert torch.equal(self.read(store, record), self.value(0))

    def test_another_version_is_refused(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        record = self.write(store, self.value(0))
        with pytest.raises(InputError, match="version 2"):
            self.read(store, record.model_copy(update={"version": 2}))

    @pytest.mark.parametrize("path", ["../x", "/etc", "a", "tokens/../../x", "a/" + "0" * 31])
    def test_a_record_cannot_leave_the_store(self, tmp_path: Path, path: str) -> None:
        record = self.write(self.make(tmp_path / "store"), self.value(0))
        with pytest.raises(ValidationError, match="path"):
            ArrayRecord(**{**dict(record), "path": path})

    def test_a_full_disk_leaves_nothing_that_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = self.make(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space")))
            with pytest.raises(StorageError, match="full"):
                self.write(store, self.value(0))
        assert store.sweep([]) <= 1
        assert torch.equal(self.read(store, self.write(store, self.value(0))), self.value(0))

    def test_killed_anywhere_a_replacement_is_old_or_new(self, killed_anywhere: KilledAnywhere) -> None:
        values = {"old": self.value(0)[:1], "new": self.value(1)[:1]}

        def act(directory: Path) -> None:
            store, ledger = self.make(directory / "arrays"), Ledger(directory / "ledger")
            old = self.write(store, values["old"])
            ledger.commit("unit", {"name": "old", "array": old})
            ledger.commit("unit", {"name": "new", "array": self.write(store, values["new"])})
            store.drop(old)

        seen = []

        def check(directory: Path) -> None:
            store, ledger = self.make(directory / "arrays"), Ledger(directory / "ledger")
            record = ledger.get("unit")
            seen.append(record["name"] if record else "")
            live = [array_of(record)] if record else []
            store.sweep(live)
            if record:
                assert torch.equal(self.read(store, live[0]), values[record["name"]])
            generations = [path for path in directory.rglob("*") if len(path.name) == 32]
            assert len(generations) == len(live)

        assert killed_anywhere(act, check) > 20
        assert list(dict.fromkeys(seen)) == ["", "old", "new"]

    @pytest.mark.slow
    def test_sigkill_at_any_time(self, tmp_path: Path) -> None:
        values = [self.value(seed) for seed in range(3)]
        for trial in range(4):
            pid = os.fork()
            if pid == 0:
                store, ledger = self.make(tmp_path / "arrays"), Ledger(tmp_path / "ledger")
                for step in range(10_000):
                    old = ledger.get("unit")
                    seed = step % len(values)
                    ledger.commit("unit", {"seed": seed, "array": self.write(store, values[seed])})
                    if old:
                        store.drop(array_of(old))
                os._exit(1)
            time.sleep(0.08 + 0.05 * trial)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            store, record = self.make(tmp_path / "arrays"), Ledger(tmp_path / "ledger").get("unit")
            store.sweep([array_of(record)] if record else [])
            if record:
                assert torch.equal(self.read(store, array_of(record)), values[record["seed"]])


class TestStatistics(Conformance):
    def make(self, directory: Path) -> StatisticsStore:
        return StatisticsStore(directory, tile=32)

    def value(self, seed: int) -> torch.Tensor:
        return symmetric(seed, 2, 40)

    def write(self, store: StatisticsStore, value: torch.Tensor) -> ArrayRecord:
        return store.write(3, "mlp", value)

    def read(self, store: StatisticsStore, record: ArrayRecord) -> torch.Tensor:
        return store.read(record)

    def test_only_upper_tiles_are_stored(self, tmp_path: Path) -> None:
        record = self.write(self.make(tmp_path), self.value(0))
        assert record.symmetric
        assert [path.name for path in self.files(tmp_path, record)] == sorted(
            ["zarr.json"] + [f"c.{g}.{i}.{j}" for g in range(2) for i in range(2) for j in range(i, 2)]
        )

    def test_a_tile_of_zeros_is_stored_too(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        record = self.write(store, torch.zeros(1, 40, 40, dtype=torch.float64))
        assert len(record.checksums) == 3
        (tmp_path / record.path / "c.0.0.1").unlink()
        with pytest.raises(CorruptError, match=r"c\.0\.0\.1: .*missing"):
            store.read(record)

    @pytest.mark.parametrize("features", [1, 31, 32, 33, 64, 65])
    def test_symmetric_sizes(self, tmp_path: Path, features: int) -> None:
        store = self.make(tmp_path)
        value = symmetric(1, 3, features)
        assert torch.equal(store.read(store.write(0, "m", value)), value)

    @pytest.mark.slow
    @pytest.mark.parametrize("features", [33, 65, 200, 300])
    def test_several_threads_write_and_read_the_same(self, tmp_path: Path, features: int) -> None:
        alone, many = self.make(tmp_path / "1"), StatisticsStore(tmp_path / "3", tile=32, threads=3)
        value = symmetric(1, 2, features)

        def rows(start: int, stop: int) -> torch.Tensor:
            return value[:, start:stop, start:]

        records = [store.write_rows(0, "m", 2, features, rows) for store in (alone, many)]
        assert records[0].checksums == records[1].checksums == alone.write(0, "m", value).checksums
        brought: list[torch.Size] = []
        for store, record in zip((alone, many), records, strict=True):
            found = store.read(record, lambda row: (brought.append(row.shape), row.clone())[1])
            assert torch.equal(found, value)
        assert brought[: len(brought) // 2] == brought[len(brought) // 2 :]
        assert all(len(shape) == 2 and shape[0] <= 32 for shape in brought)

    def test_what_a_thread_meets_is_raised(self, tmp_path: Path) -> None:
        store = StatisticsStore(tmp_path, tile=32, threads=3)
        record = store.write(0, "m", symmetric(1, 1, 300))
        chunk = tmp_path / record.path / "c.0.3.4"
        chunk.write_bytes(b"\0" + chunk.read_bytes()[1:])
        with pytest.raises(CorruptError, match=r"c\.0\.3\.4|checksum"):
            store.read(record)

        def rows(start: int, stop: int) -> torch.Tensor:
            if start == 64:
                raise ValueError("no such rows")
            return torch.zeros(1, stop - start, 300 - start, dtype=torch.float64)

        with pytest.raises(ValueError, match="no such rows"):
            store.write_rows(0, "lost", 1, 300, rows)
        assert not list((tmp_path / "layer-00000" / "lost").glob("*/*"))

    def test_not_quite_symmetric_comes_back_as_it_was(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        for value, twin in ((1.0, 1.0 + 2**-52), (0.0, -0.0), (float("nan"), 0.0)):
            moment = symmetric(0, 1, 40)
            moment[0, 2, 35] = value
            moment[0, 35, 2] = twin
            record = store.write(0, "m", moment)
            assert torch.equal(store.read(record).view(torch.int64), moment.view(torch.int64))

    @pytest.mark.parametrize("shape", [(), (1,), (7,), (300,), (40, 50), (2, 17, 33), (3, 2, 5, 7)])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
    def test_any_shape_is_stored_plainly(self, tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        store = self.make(tmp_path)
        value = (seeded(0, *shape) * 100).to(dtype)
        back = store.read(store.write(0, "m", value))
        assert back.dtype == dtype
        assert torch.equal(back, value)

    def test_a_view_is_stored_by_its_values(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        value = seeded(0, 60, 50).T[::2]
        assert torch.equal(store.read(store.write(0, "m", value)), value)

    def test_any_zarr_reader_can_walk_the_store(self, tmp_path: Path) -> None:
        record = self.write(self.make(tmp_path), self.value(0))
        array = zarr.open_group(tmp_path, mode="r")[record.path]
        assert isinstance(array, zarr.Array)
        assert np.array_equal(np.asarray(array[0, :32]), self.value(0)[0, :32].numpy())

    def test_chunks_are_about_a_tile(self) -> None:
        assert chunk_shape((32, 128, 128)) == (32, 128, 128)
        assert chunk_shape((1, 28672, 28672)) == (1, 1024, 1024)
        assert chunk_shape((80,)) == (80,)
        assert chunk_shape((3, 5_000_000)) == (3, 1024)

    @pytest.mark.parametrize("value", [torch.empty(0, 3), torch.zeros(2, dtype=torch.complex64)])
    def test_what_cannot_be_stored(self, tmp_path: Path, value: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"empty axis|cannot be stored"):
            self.make(tmp_path).write(0, "m", value)

    @pytest.mark.parametrize("name", ["", "..", "a//b", "0" * 32, "a b"])
    def test_bad_names(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match="prefix"):
            self.make(tmp_path).write(0, name, torch.zeros(2))


class TestActivations(Conformance):
    def make(self, directory: Path) -> ActivationStore:
        return ActivationStore(directory)

    def value(self, seed: int) -> torch.Tensor:
        return seeded(seed, 5, 6, 4, dtype=torch.bfloat16)

    def write(self, store: ActivationStore, value: torch.Tensor) -> ArrayRecord:
        return store.write("dense", 2, 1, value, micro_batch=2)

    def read(self, store: ActivationStore, record: ArrayRecord) -> torch.Tensor:
        reader = store.open(record)
        return reader.read(0, reader.shape[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("micro_batch", [1, 2, 5, 8])
    def test_slices(self, tmp_path: Path, dtype: torch.dtype, micro_batch: int) -> None:
        store = self.make(tmp_path)
        hidden = seeded(0, 5, 6, 4, dtype=dtype)
        reader = store.open(store.write("dense", 0, 0, hidden, micro_batch))
        assert (reader.shape, reader.dtype) == ((5, 6, 4), dtype)
        for start in range(5):
            for stop in range(start + 1, 6):
                assert torch.equal(reader.read(start, stop), hidden[start:stop])
        for start, stop in ((-1, 2), (2, 2), (4, 6)):
            with pytest.raises(ValueError, match="rows"):
                reader.read(start, stop)

    def test_a_slice_does_not_touch_other_chunks(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        record = self.write(store, self.value(0))
        (tmp_path / record.path / "c.2.0.0").unlink()
        assert torch.equal(store.open(record).read(0, 4), self.value(0)[:4])
        with pytest.raises(CorruptError):
            store.open(record).read(3, 5)

    def test_piece_by_piece_equals_at_once(self, tmp_path: Path) -> None:
        store, hidden = self.make(tmp_path), self.value(0)
        with store.writer("dense", 2, 1, (5, 6, 4), torch.bfloat16, micro_batch=2) as writer:
            for start in (0, 2, 4):
                writer.append(hidden[start : start + 2])
            record = writer.commit()
        assert record.checksums == self.write(store, hidden).checksums

    def test_pieces_that_do_not_fit(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        with store.writer("dense", 0, 0, (5, 6, 4), torch.bfloat16, micro_batch=2) as writer:
            with pytest.raises(ValueError, match="piece"):
                writer.append(self.value(0)[:, :5])
            with pytest.raises(ValueError, match="float32 values"):
                writer.append(self.value(0).float())
            with pytest.raises(ValueError, match="3 of 3 chunks"):
                writer.commit()
            writer.append(self.value(0)[:3])
            with pytest.raises(ValueError, match="inside a chunk"):
                writer.append(self.value(0)[3:])

    def test_an_uncommitted_shard_is_removed(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        with store.writer("dense", 0, 0, (5, 6, 4), torch.bfloat16) as writer:
            writer.append(self.value(0)[:3])
        assert store.sweep([]) == 0

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_tokens(self, tmp_path: Path, dtype: torch.dtype) -> None:
        store = self.make(tmp_path)
        ids = torch.arange(60, dtype=dtype).view(5, 12)
        reader = store.open(store.write_tokens(ids))
        assert torch.equal(reader.read(1, 4), ids[1:4])
        assert reader.dtype == dtype
        with pytest.raises(ValueError, match="token ids"):
            store.write_tokens(ids.float())


def test_a_lost_directory_is_corrupt_not_zeros(tmp_path: Path) -> None:
    store = StatisticsStore(tmp_path)
    record = store.write(0, "m", torch.ones(3, 3))
    shutil.rmtree(tmp_path)
    with pytest.raises(CorruptError, match="missing"):
        store.read(record)
