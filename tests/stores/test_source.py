"""The source checkpoint: all faults are reported at once, and tensors are read as they are stored."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from manifests.errors import InputError, StorageError
from manifests.parts import Fused, stacked
from manifests.records import SourceFile
from stores.disk import Disk, DiskFile
from stores.source import SourceCheckpoint, open_source


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        f"layers.{i}.{dtype}": torch.randn(3 + i, 5, generator=generator).to(getattr(torch, dtype))
        for i in range(3)
        for dtype in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "int8")
    }
    return {**made, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "flag": torch.tensor([True, False, True])}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    every = tensors()
    shards = {f"model-0000{n + 1}-of-00002.safetensors": dict(list(every.items())[n::2]) for n in range(2)}
    for file, part in shards.items():
        save_file(part, path / file)
    write_index(path, {name: file for file, part in shards.items() for name in part})
    return path


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map(path: Path) -> dict[str, str]:
    content: dict[str, dict[str, str]] = json.loads((path / "model.safetensors.index.json").read_text())
    return content["weight_map"]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize(("transposed", "interleaved"), LAYOUTS)
def test_parts_of_a_tensor_are_read_and_copied_apart(directory: Path, transposed: bool, interleaved: bool) -> None:
    name, whole = "layers.2.bfloat16", tensors()["layers.2.bfloat16"]
    sizes = {"one": 2, "two": 2} if interleaved else {"one": 1, "two": 3}
    shapes = {part: (rows, 5) for part, rows in sizes.items()}
    parts = stacked(shapes, 5, interleaved, transposed)  # all but the first row, or numbers of it
    apart = open_source(str(directory)).with_parts({name: Fused((5, 5), parts), "missing": Fused((1,), ())})
    rows = whole.flatten()[5:].view(5, 4).T if transposed else whole[1:]
    places = {"one": [0, 2], "two": [1, 3]} if interleaved else {"one": [0], "two": [1, 2, 3]}
    read = apart.read(["two", "one"])
    for part, chosen in places.items():
        assert torch.equal(read[part], rows[chosen])
        assert read[part].untyped_storage().nbytes() == read[part].nbytes, "each has memory of its own"
        assert b"".join(apart.copy_bytes(part)) == bits(rows[chosen])
        assert apart.tensors[part].num_bytes == read[part].nbytes
    assert name not in apart.tensors
    with pytest.raises(InputError, match=r"layers.2.bfloat16: shape \[5, 5\], expected \[4, 5\]"):
        open_source(str(directory)).with_parts({name: Fused((4, 5), parts)})


@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_a_vector_are_numbers_of_it(interleaved: bool) -> None:
    numbers = torch.arange(6)
    first, second = stacked({"one": (3,), "two": (3,)}, interleaved=interleaved)
    found = [part.within(numbers[part.begin : part.end].view(part.block)).tolist() for part in (first, second)]
    assert found == ([[0, 2, 4], [1, 3, 5]] if interleaved else [[0, 1, 2], [3, 4, 5]])


def test_reads_every_tensor_bit_for_bit(directory: Path) -> None:
    source: SourceCheckpoint = pickle.loads(pickle.dumps(open_source(str(directory))))
    expected = tensors()
    wanted = list(expected)[::-1]
    found = source.read(wanted)
    assert list(found) == wanted
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)
        assert b"".join(source.copy_bytes(name, piece_bytes=7)) == bits(tensor)
    assert source.config == {"model_type": "llama"}
    assert source.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_each_tensor_has_memory_of_its_own(directory: Path) -> None:
    source = open_source(str(directory))
    names = ["layers.0.float32", "layers.1.float32"]
    first = source.read(names)
    first[names[0]].zero_()
    assert bits(source.read(names)[names[0]]) == bits(tensors()[names[0]])
    assert len({tensor.untyped_storage().data_ptr() for tensor in first.values()}) == 2
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in first.values())


def test_each_file_is_opened_once_and_read_forwards(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(directory))
    opened: list[str] = []
    read: list[tuple[str, int]] = []
    open_, real = Disk.reader, DiskFile.read_into

    def reader(self: Disk, name: str) -> Any:
        opened.append(name)
        return open_(self, name)

    def read_into(self: DiskFile, begin: int, view: memoryview) -> int:
        read.append((opened[-1], begin))
        return real(self, begin, view)

    monkeypatch.setattr(Disk, "reader", reader)
    monkeypatch.setattr(DiskFile, "read_into", read_into)
    source.read(reversed(source.tensors))
    assert opened == sorted(source.files)
    assert read == sorted(read)
    assert len(read) == len(source.tensors)


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors(), tmp_path / "model.safetensors")
    source = open_source(str(tmp_path))
    assert set(source.tensors) == set(tensors())
    assert source.files == ("model.safetensors",)
    assert list(source.file_digests({})) == ["config.json", "model.safetensors"]


def test_trained_models_beside_the_checkout() -> None:
    models = Path(__file__).resolve().parents[2].parent / "shared" / "models"
    if not models.is_dir():
        pytest.skip(f"no trained models: {models} is missing")
    for directory in sorted(path for path in models.iterdir() if path.is_dir()):
        source = open_source(str(directory))
        name, record = next(iter(source.tensors.items()))
        assert source.read([name])[name].shape == record.shape


def test_require(directory: Path) -> None:
    source = open_source(str(directory))
    source.require({"layers.0.float32": (3, 5), "scalar": ()})
    with pytest.raises(InputError) as caught:
        source.require({"layers.0.float32": (3, 6), "layers.9.float32": (3, 5), "scalar": ()})
    assert "layers.0.float32: shape [3, 5], expected [3, 6]" in str(caught.value)
    assert "layers.9.float32: missing" in str(caught.value)
    assert "scalar" not in str(caught.value)


def refused(directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_source(str(directory))
    return str(caught.value)


def test_every_fault_at_once(directory: Path) -> None:
    (directory / "config.json").write_text("[1]")
    named = weight_map(directory)
    os.truncate(directory / "model-00001-of-00002.safetensors", 1000)
    write_index(directory, {**named, "ghost": "model-00002-of-00002.safetensors", "lost": "model-00003.safetensors"})
    message = refused(directory)
    assert "config.json: a JSON list, expected an object" in message
    assert "model-00001-of-00002.safetensors: truncated: expected" in message
    assert "the file has 1000" in message
    assert "tensor 'ghost' is in the index, not in the file" in message
    assert "model-00003.safetensors: missing" in message


def test_faults_are_capped(directory: Path) -> None:
    with pytest.raises(InputError, match=r"and 80 more") as caught:
        open_source(str(directory)).require({f"t{n}": (1,) for n in range(100)})
    assert str(caught.value).count("missing") == 20


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "b/a.safetensors", "..", "", "model.bin", "a\\b.safetensors", 7, None, {}],
)
def test_an_index_whose_entries_leave_the_directory(directory: Path, file: Any) -> None:
    write_index(directory, {**weight_map(directory), "x": file})
    assert "not a safetensors file name in this directory" in refused(directory)


@pytest.mark.slow
def test_an_index_of_as_many_files_as_tensors(directory: Path) -> None:
    """A second, not the hour of a search through all tensors for each file."""
    write_index(directory, {f"tensor.{n}": f"file-{n}.safetensors" for n in range(40_000)})
    assert "and 39980 more" in refused(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"a":1, "a":2}'])
def test_a_damaged_index(directory: Path, content: str) -> None:
    (directory / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: " in refused(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_a_damaged_config(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    assert "config.json: " in refused(directory)


def test_a_hostile_shard(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert f"{path}: not a safetensors file" in refused(directory)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refused(tmp_path)
    assert "pytorch_model.bin" in message
    assert "runs code" in message
    assert "convert them to safetensors" in message


def test_nothing_there(tmp_path: Path) -> None:
    assert "config.json: missing" in refused(tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)
    assert "no such directory" in refused(tmp_path / "nowhere")
    assert "ftp://host/model" in refused_name("ftp://host/model")
    (tmp_path / "file").write_bytes(b"")
    assert "a file; give the directory" in refused(tmp_path / "file")


def refused_name(name: str) -> str:
    with pytest.raises(InputError) as caught:
        open_source(name)
    return str(caught.value)


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match="the hub does not have it at revision v1: LocalEntryNotFoundError: offline"):
        open_source("meta/llama-7b", "v1")


def test_a_file_cut_while_the_job_runs(directory: Path) -> None:
    source = open_source(str(directory))
    path = directory / "model-00001-of-00002.safetensors"
    name = next(name for name, record in source.tensors.items() if record.file == path.name and record.num_bytes)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StorageError, match="truncated after the job opened it"):
        source.read([name])
    with pytest.raises(StorageError, match="truncated after the job opened it"):
        b"".join(source.copy_bytes(name))
    path.unlink()
    with pytest.raises(StorageError, match="No such file"):
        source.read([name])
    with pytest.raises(InputError, match="no tensor 'ghost'"):
        source.read(["ghost"])


def test_a_short_read_is_no_tensor(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(directory))
    monkeypatch.setattr(SourceCheckpoint, "_check_same", lambda *_: None)
    last = max((r for r in source.tensors.values() if r.file == source.files[0]), key=lambda record: record.end)
    os.truncate(directory / last.file, last.end - 3)
    with pytest.raises(StorageError, match=f"ends after {last.num_bytes - 3} of {last.num_bytes} bytes"):
        source.read([last.name])
    with pytest.raises(StorageError, match="ends after"):
        list(source.copy_bytes(last.name))


def test_digests_are_of_the_content_and_cached_by_stat(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(directory))
    digests = source.file_digests({})
    assert set(digests) == {"config.json", "model.safetensors.index.json", *source.files}
    for file, record in digests.items():
        assert record.sha256 == hashlib.sha256((directory / file).read_bytes()).hexdigest()
        assert {key: value for key, value in record.as_json().items() if key != "sha256"} == source.file_stamp(file)
    hashed: list[str] = []
    opened = Disk.reader
    monkeypatch.setattr(Disk, "reader", lambda self, name: hashed.append(name) or opened(self, name))
    assert source.file_digests({name: SourceFile(**record.as_json()) for name, record in digests.items()}) == digests
    assert hashed == []
    path = directory / source.files[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(digests[path.name].as_json()["mtime_ns"],) * 2)  # ctime tells all the same
    again = source.file_digests(digests)
    assert hashed == [path.name]
    assert again[path.name].sha256 == hashlib.sha256(data).hexdigest()


def test_a_file_that_changes_while_it_is_hashed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(directory))

    hashed = DiskFile.sha256

    def changing(self: DiskFile) -> str:
        digest = hashed(self)
        with open(directory / source.files[0], "ab") as file:
            file.write(b"x")
        return digest

    monkeypatch.setattr(DiskFile, "sha256", changing)
    with pytest.raises(StorageError, match="changed while it was read"):
        source.file_digests({})


def test_a_change_between_opening_and_digesting_is_noticed(directory: Path) -> None:
    """Offsets of the old header would be read from the new file."""
    source = open_source(str(directory))
    path = directory / source.files[1]
    os.link(path, directory / "another-name")  # which changes the ctime alone
    assert source.file_digests({}).keys() >= {path.name}
    path.write_bytes(path.read_bytes())
    with pytest.raises(StorageError, match="changed while it was read"):
        source.file_digests({})


def test_another_object_in_a_bucket_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(directory))
    monkeypatch.setattr(DiskFile, "tag", "new")
    same, other = (replace(source, tags=dict.fromkeys(source.files, tag)) for tag in ("new", "old"))
    assert same.read(["scalar"])["scalar"] == 2.5
    with pytest.raises(StorageError, match=r"changed after the job opened it .entity tag new, was old"):
        other.read(["scalar"])
