"""Durable writes: whole or nothing, no leftovers, errors that say what to change."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from manifests.errors import CorruptError, InputError, StorageError
from stores.disk import Disk
from stores.durable import (
    create_only,
    durable_file,
    make_directory,
    partial_path,
    storage_errors,
    sweep_partials,
    write_durably,
)
from tests.failing_disk import no_hard_links


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_write_replaces_in_one_step(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"one")
    write_durably(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert names(tmp_path) == ["a"]


def test_create_only_lets_the_first_win(tmp_path: Path) -> None:
    create_only(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        create_only(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["a"]


def test_create_only_accepts_a_link_that_was_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def repeated(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", repeated)
    create_only(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_create_only_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_hard_links)
    create_only(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        create_only(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    monkeypatch.setattr(os, "replace", lambda *_: no_hard_links())
    with pytest.raises(StorageError, match=r"writing .*/b: Operation not permitted"):
        create_only(tmp_path / "b", b"three")
    assert names(tmp_path) == ["a"]


def test_killed_anywhere_without_hard_links(killed_anywhere: Callable[..., int]) -> None:
    """Nothing, an empty file, or all of it: never a part, and never two winners."""

    def act(directory: Path) -> None:
        os.link = no_hard_links
        create_only(directory / "a", b"data")

    seen = []

    def check(directory: Path) -> None:
        path = directory / "a"
        seen.append(path.read_bytes() if path.exists() else None)
        if seen[-1] is not None:
            with pytest.raises(FileExistsError):
                create_only(path, b"other")

    assert killed_anywhere(act, check) >= 4
    assert list(dict.fromkeys(seen)) == [None, b"", b"data"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_the_filesystem_that_is_full_is_named(code: int, tmp_path: Path) -> None:
    """Not only the file: a node has several disks, and each may be out of bytes or of files."""
    left = os.statvfs(tmp_path)
    total = f"{left.f_blocks * left.f_frsize / 1e9:,.2f} GB"
    mount = next(parent for parent in (tmp_path, *tmp_path.parents) if parent.is_mount())
    with pytest.raises(StorageError) as caught, storage_errors("writing", tmp_path / "missing" / "file"):
        raise OSError(code, os.strerror(code))
    assert f"{os.strerror(code)} (the filesystem at {mount} has " in str(caught.value)
    assert f" of {total}, " in str(caught.value) or f" of {total} free" in str(caught.value)


def test_nothing_is_published_on_an_exception(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"old")
    with suppress(ZeroDivisionError), durable_file(tmp_path / "a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("operation", ["fsync", "replace", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE])
def test_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, code: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, operation, fail)
    write = create_only if operation == "link" else write_durably
    with pytest.raises(StorageError, match=os.strerror(code)) as caught:
        write(tmp_path / "a", b"data")
    assert str(tmp_path / "a") in str(caught.value)
    assert names(tmp_path) == []


def write_to_full_disk(path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with closing(os.fdopen(full, "wb")), durable_file(path) as file:
        os.dup2(full, file.fileno())
        file.write(b"x" * 100_000)


def test_full_disk_while_writing(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(StorageError, match="free some room"):
        write_to_full_disk(tmp_path / "a")
    assert names(tmp_path) == []


def noted(calls: list[str], name: str, real: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        calls.append(name)
        real(*arguments)

    return call


@pytest.mark.parametrize(("write", "name"), [(write_durably, "replace"), (create_only, "link")])
def test_bytes_are_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None], name: str
) -> None:
    calls: list[str] = []
    for operation in ("fsync", name):
        monkeypatch.setattr(os, operation, noted(calls, operation, getattr(os, operation)))
    write(tmp_path / "a", b"data")
    assert calls == ["fsync", name, "fsync"]


def test_make_directory_syncs_every_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]


def test_a_missing_file_without_a_number(tmp_path: Path) -> None:
    """As Zarr raises it."""
    named = pytest.raises(StorageError, match="a: No such file or directory; it was removed")
    with named, storage_errors("reading", tmp_path / "a"):
        raise FileNotFoundError("a")


def test_read_whole_ends(tmp_path: Path) -> None:
    """Whatever lies there: a pipe that nobody writes to, a device, a folder, more than was asked for."""
    (tmp_path / "a").write_bytes(b"12345")
    disk = Disk(tmp_path)
    assert disk.read_whole("a", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4"):
        disk.read_whole("a", 4)
    os.mkfifo(tmp_path / "pipe")
    for storage, name in ((disk, "pipe"), (disk, ""), (Disk("/dev"), "zero")):
        with pytest.raises(ValueError, match=r"not a regular file|a directory"):
            storage.read_whole(name, 5)
    with pytest.raises(FileNotFoundError):
        disk.read_whole("nothing", 5)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="lead in a circle"):
        disk.read_whole("loop", 5)


def test_sweep_takes_partial_files_only(tmp_path: Path) -> None:
    make_directory(tmp_path / "deep")
    partial_path(tmp_path / "deep" / "a").write_bytes(b"torn")
    theirs = tmp_path / "download.partial"  # what another program left there is not ours to remove
    theirs.write_bytes(b"half")
    (tmp_path / "kept").write_bytes(b"data")
    assert sweep_partials(tmp_path) == 1
    assert theirs.exists()
    theirs.unlink()
    assert names(tmp_path / "deep") == []
    assert names(tmp_path) == ["deep", "kept"]


def test_errors_survive_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(CorruptError("what, where")))) == "what, where"


KilledAnywhere = Callable[..., int]


def test_killed_anywhere_a_write_is_whole(killed_anywhere: KilledAnywhere) -> None:
    def act(directory: Path) -> None:
        write_durably(directory / "a", b"old")
        write_durably(directory / "a", b"new")

    def check(directory: Path) -> None:
        assert not (directory / "a").exists() or (directory / "a").read_bytes() in (b"old", b"new")
        sweep_partials(directory)
        assert names(directory) in ([], ["a"])

    assert killed_anywhere(act, check) >= 6


def test_killed_anywhere_a_creation_is_whole(killed_anywhere: KilledAnywhere) -> None:
    def check(directory: Path) -> None:
        assert not (directory / "a").exists() or (directory / "a").read_bytes() == b"data"
        sweep_partials(directory)
        assert names(directory) in ([], ["a"])

    assert killed_anywhere(lambda directory: create_only(directory / "a", b"data"), check) >= 4
