"""A changed source is noticed by its bytes, not by its times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manifests.errors import StorageError
from manifests.records import SourceFile
from stores.disk import Disk
from stores.source_watch import SourceWatch


@pytest.fixture
def watch(tmp_path: Path) -> SourceWatch:
    storage = Disk(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"content of " + name.encode())
    digest = storage.sha256("model.safetensors")
    file = SourceFile.model_validate({**storage.stamp("model.safetensors"), "sha256": digest})
    return SourceWatch(storage, {"model.safetensors": file}, ["tokenizer.json"])


def test_other_times_are_no_change(watch: SourceWatch, tmp_path: Path) -> None:
    os.utime(tmp_path / "model.safetensors", (1, 1))
    watch.check()
    watch.check()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_other_bytes_of_the_same_size_are_a_change(name: str, watch: SourceWatch, tmp_path: Path) -> None:
    watch.check()
    changed = bytearray((tmp_path / name).read_bytes())
    changed[3] ^= 1
    (tmp_path / name).write_bytes(changed)
    os.utime(tmp_path / name, (2, 2))
    with pytest.raises(StorageError, match=f"{name}: changed while the job ran"):
        watch.check()


def test_a_removed_file_is_named(watch: SourceWatch, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match=r"tokenizer.json: cannot be read any more"):
        watch.check()
