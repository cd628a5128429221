"""The output's files: equal input gives equal bytes, readable by the library, whole or not there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from manifests.errors import CorruptError, InputError, NumericsError, StorageError
from manifests.records import ShardRecord, StagedRecord
from stores import checkpoint
from stores.checkpoint import copy_shard, verify_shard, write_index, write_shard
from stores.disk import Disk
from stores.durable import sweep_partials
from stores.source import INDEX_FILE, SourceCheckpoint, open_source

KilledAnywhere = Callable[..., int]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 5, generator=generator)
    return {
        "b.bf16": weight.bfloat16(),
        "a.f64": weight.double(),
        "view": weight.T,
        "f16": weight.half()[::2],
        "f8": weight.to(torch.float8_e4m3fn),
        "index": torch.arange(7, dtype=torch.int16),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def source(tmp_path: Path) -> SourceCheckpoint:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    # NaN in the source is not the copier's business: bit for bit means that, too.
    made = {name: tensor.contiguous() for name, tensor in tensors().items()} | {"nan": torch.tensor([float("nan")])}
    save_file(made, directory / "model.safetensors")
    return open_source(str(directory))


def test_the_library_reads_it(tmp_path: Path) -> None:
    record = write_shard(tmp_path, "a.safetensors", tensors(), {"layer": "3"})
    found = load_file(tmp_path / "a.safetensors")
    assert set(found) == set(tensors()) == set(record.tensors)
    for name, tensor in tensors().items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].double(), tensor.double())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "layer": "3"}
    assert record.size == (tmp_path / "a.safetensors").stat().st_size
    assert record.file == "a.safetensors"
    assert ShardRecord.model_validate(json.loads(json.dumps(record.as_json()))) == record
    verify_shard(tmp_path, "a.safetensors", record)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    first = write_shard(tmp_path, "a", tensors(), {"x": "1", "y": "2"})
    second = write_shard(tmp_path, "b", dict(reversed(tensors().items())), {"y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert first.sha256 == second.sha256
    assert first.sha256 != write_shard(tmp_path, "c", tensors(1)).sha256


@pytest.mark.parametrize("threads", [2, 20])
def test_several_threads_write_the_same(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {**tensors(), "apart": torch.arange(60.0).reshape(6, 10).T[::2], "none": torch.ones(0, 3)}
    alone = write_shard(tmp_path, "a", made)
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 7)
    many = write_shard(tmp_path, "b", made, threads=threads)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert many.tensors == alone.tensors
    verify_shard(tmp_path, "b", many)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_what_is_not_finite_is_not_written(tmp_path: Path, value: float, dtype: torch.dtype, threads: int) -> None:
    bad = torch.ones(3, 4)
    bad[2, 1] = value
    with pytest.raises(NumericsError, match=r"tensor layers.3.weight: 1 of 12 numbers"):
        write_shard(tmp_path, "a", {"fine": torch.ones(2), "layers.3.weight": bad.to(dtype)}, threads=threads)
    assert list(tmp_path.iterdir()) == []


def test_finite_check_goes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHECKED_NUMBERS", 5)
    bad = torch.ones(23)
    write_shard(tmp_path, "a", {"x": bad})
    bad[22] = float("nan")
    with pytest.raises(NumericsError, match="1 of 3 numbers from 20 on"):
        write_shard(tmp_path, "a", {"x": bad})


def test_copy_is_bit_for_bit(tmp_path: Path, source: SourceCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 11)
    names = ["nan", *tensors()]
    record = copy_shard(tmp_path, "copy.safetensors", source, names)
    verify_shard(tmp_path, "copy.safetensors", record)
    found = load_file(tmp_path / "copy.safetensors")
    for name in names:
        before, after = source.read([name])[name], found[name]
        assert before.contiguous().flatten().view(torch.uint8).equal(after.flatten().view(torch.uint8))
    del found["nan"]
    assert write_shard(tmp_path, "again", found).tensors.items() <= record.tensors.items()
    with pytest.raises(InputError, match="no such tensor"):
        copy_shard(tmp_path, "x", source, ["ghost"])


def test_a_source_cut_meanwhile_publishes_nothing(tmp_path: Path, source: SourceCheckpoint) -> None:
    os.truncate(Path(source.place) / "model.safetensors", 600)
    with pytest.raises(StorageError, match="truncated after the job opened it"):
        copy_shard(tmp_path, "copy", source, list(source.tensors))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    record = write_shard(tmp_path, "a", tensors())
    damage(tmp_path / "a")
    with pytest.raises(CorruptError) as caught:
        verify_shard(tmp_path, "a", record)
    assert str(tmp_path / "a") in str(caught.value)
    staged = StagedRecord(**dict(record), path=f"staged/layer-00000.{0:032x}.safetensors")
    with pytest.raises(CorruptError) as caught:
        verify_shard(tmp_path, "a", staged)
    assert caught.value.path == staged.path  # by which its entry is found


def test_the_damaged_tensor_is_named(tmp_path: Path) -> None:
    record = write_shard(tmp_path, "a", tensors())
    other = tensors()
    other["f16"] = other["f16"] + 1
    other_record = write_shard(tmp_path, "b", other)
    with pytest.raises(CorruptError, match=r"tensors that differ: f16$"):
        verify_shard(tmp_path, "b", record)
    with pytest.raises(CorruptError, match=r"tensors that differ: f16$"):
        verify_shard(tmp_path, "a", other_record)
    data = bytearray((tmp_path / "a").read_bytes())
    data[9] ^= 0xFF
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CorruptError, match="header is damaged"):
        verify_shard(tmp_path, "a", record)


def test_link_and_link_again(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"data")
    (tmp_path / "symlink").symlink_to(tmp_path / "real")  # a hub's snapshot
    (tmp_path / "target").write_bytes(b"old")
    Disk(tmp_path).link_or_copy("target", Disk(tmp_path), "symlink")
    Disk(tmp_path).link_or_copy("target", Disk(tmp_path), "symlink")
    assert (tmp_path / "target").samefile(tmp_path / "real")
    assert not (tmp_path / "target").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["real", "symlink", "target"]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_copy_where_links_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"data")
    Disk(tmp_path).link_or_copy("b", Disk(tmp_path), "a")
    assert (tmp_path / "b").read_bytes() == b"data"
    assert not (tmp_path / "a").samefile(tmp_path / "b")


def test_link_to_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        Disk(tmp_path).link_or_copy("b", Disk(tmp_path), "a")


def test_full_disk_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="free some room"):
        write_shard(tmp_path, "a", tensors())
    with pytest.raises(StorageError, match="free some room"):
        write_index(tmp_path, {"a": "a.safetensors"}, 1, 1)
    assert list(tmp_path.iterdir()) == []


def test_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    record = write_shard(tmp_path, "a.safetensors", tensors())
    weight_map = dict.fromkeys(tensors(), "a.safetensors")
    write_index(tmp_path, weight_map, record.size, 123)
    assert json.loads((tmp_path / INDEX_FILE).read_text()) == {
        "metadata": {"total_parameters": 123, "total_size": record.size},
        "weight_map": weight_map,
    }
    assert set(open_source(str(tmp_path)).tensors) == set(tensors())


def test_killed_anywhere_files_are_whole(killed_anywhere: KilledAnywhere, source: SourceCheckpoint) -> None:
    expected = {"a": tensors(0), "b": source.read(["view"]), "c": source.read(source.tensors)}

    def act(directory: Path) -> None:
        write_shard(directory, "a", tensors(0))
        copy_shard(directory, "b", source, ["view"])
        Disk(directory).link_or_copy("c", source.storage, "model.safetensors")
        write_index(directory, {"view": "b"}, 1, 1)

    def check(directory: Path) -> None:
        sweep_partials(directory)
        found = sorted(path.name for path in directory.iterdir())
        assert found == ["a", "b", "c", "model.safetensors.index.json"][: len(found)]
        for name in found[:3]:
            assert set(load_file(directory / name)) == set(expected[name])

    assert killed_anywhere(act, check) >= 12
