"""Writes that survive a crash: temp name, fsync, rename or link, fsync of the directory. docs/formats.md#commits.

A file appears whole or not at all. Temporary files end in `.partial`; no reader opens them, and `sweep_partials`
removes those that killed writers left.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from manifests.errors import InputError, LaminaError, StorageError

PARTIAL_SUFFIX = ".partial"
PARTIAL_NAME = re.compile(r".+\.[0-9a-f]{32}\.partial", re.DOTALL)
NO_HARD_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
NO_PATHS = (errno.ENAMETOOLONG, errno.ELOOP)  # the argument cannot be a path
ADVICE = {
    errno.ENOSPC: "the disk is full; free some room there, then run the same command again",
    errno.EDQUOT: "the quota is used up; free some room or raise it, then run the same command again",
    errno.EROFS: "the filesystem is mounted read-only; remount it, or choose another path",
    errno.EACCES: "this user may not do that there; change the permissions, or choose another path",
    errno.EPERM: "this user may not do that there; change the permissions, or choose another path",
    errno.ESTALE: "the network mount has gone stale; mount it again, then run the same command again",
    errno.EIO: "the device or the network mount fails; check both, then run the same command again",
    errno.EFBIG: "a limit on the size of files is reached (`ulimit -f`, or the filesystem's); raise it, then run again",
    errno.ELOOP: "symbolic links there lead in a circle; remove them, or choose another path",
    errno.ENAMETOOLONG: "choose another path",
    errno.EISDIR: "a directory is in the way; remove it, or choose another path",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
    errno.EEXIST: "a file is in the way; remove it, or choose another path",
    errno.ENOTDIR: "a file is in the way; remove it, or choose another path",
    errno.ENOENT: "it was removed or never written; check the path, and that no other program cleans up there",
}


def storage_error(action: str, path: str | Path, error: OSError) -> StorageError | InputError:
    """Return the error to raise for `error`: the action, the path, the likely cause and what to change.

    An InputError if only the path is wrong.
    """
    code = error.errno or (
        errno.ENOENT if isinstance(error, FileNotFoundError) else 0
    )  # Zarr raises it without a number
    reason = error.strerror or (os.strerror(code) if code else str(error) or type(error).__name__)
    advice = ADVICE.get(code, "check the disk or mount, then run the same command again")
    place = f" ({_room_at(Path(path))})" if code in (errno.ENOSPC, errno.EDQUOT) else ""
    kind = InputError if code in NO_PATHS else StorageError
    return kind(f"{action} {path}: {reason}{place}; {advice}")


def _room_at(path: Path) -> str:
    """Describe the filesystem of a path and its free space."""
    try:
        place = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()).resolve()
        mount = next(parent for parent in (place, *place.parents) if parent.is_mount())
        status = os.statvfs(place)
    except OSError as error:
        return f"the free space is unknown: {error.strerror}"
    files = f", {status.f_favail:,} of {status.f_files:,} files" if status.f_files else ""
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    return f"the filesystem at {mount} has {free / 1e9:,.2f} of {total / 1e9:,.2f} GB{files} free"


@contextmanager
def storage_errors(action: str, path: str | Path) -> Iterator[None]:
    """Convert an OSError of the block by `storage_error`; Lamina's own errors pass."""
    try:
        yield
    except LaminaError:
        raise
    except OSError as error:
        raise storage_error(action, path, error) from error


def fsync_directory(directory: str | Path) -> None:
    """Make the entries of a directory durable. Raises StorageError."""
    with storage_errors("syncing directory", directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # POSIX: EINVAL means that this filesystem has no fsync for directories
                raise
        finally:
            os.close(descriptor)


def make_directory(directory: str | Path) -> Path:
    """Create a directory and its missing parents, durably. Raises StorageError."""
    directory = Path(directory)
    with storage_errors("creating directory", directory):
        missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    for created in reversed(missing):
        fsync_directory(created.parent)
    return directory


def partial_path(path: Path) -> Path:
    """Return a new temporary name beside `path`."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")


@contextmanager
def durable_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name, replacing an older file, when the block ends; never on an exception.

    Raises StorageError (no room, no permission, or a failing device).
    """
    path = Path(path)
    temporary = partial_path(path)
    try:
        with storage_errors("writing", path):
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)  # only after its bytes are durable: a name never points to a torn file
        fsync_directory(path.parent)
    except BaseException:
        _remove_quietly(temporary)
        raise


def write_durably(path: str | Path, data: bytes) -> None:
    """Write a whole file, replacing an older one atomically. Raises StorageError."""
    with durable_file(path) as file:
        file.write(data)


def create_only(path: str | Path, data: bytes) -> None:
    """Write a whole file under an unused name: one of several racing creators wins.

    Where the filesystem has no hard links, the winner first creates an empty file of that name, then renames the whole
    one over it: a reader, or a crash in between, may see it empty.

    Raises:
        FileExistsError: the name is in use; its content is untouched.
        StorageError: the write failed.
    """
    path = Path(path)
    temporary = partial_path(path)
    try:
        with storage_errors("writing", path):
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            exists = not _link(temporary, path)
    except BaseException:
        _remove_quietly(temporary)
        raise
    _remove_quietly(temporary)
    if exists:
        raise FileExistsError(errno.EEXIST, "already there", str(path))
    fsync_directory(path.parent)


def _link(temporary: Path, path: Path) -> bool:
    """Link the file to its name; return False if the name is in use."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS may repeat a link that had succeeded and report the repetition: the same inode means that we won.
        return os.path.samefile(temporary, path)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        return _rename_to_unused(temporary, path)
    return True


def _rename_to_unused(temporary: Path, path: Path) -> bool:
    """Replace `_link` where there are no hard links: the process that creates the empty file may rename over it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    try:
        os.replace(temporary, path)
    except OSError:
        _remove_quietly(path)
        raise
    return True


def _remove_quietly(temporary: Path) -> None:
    try:
        os.unlink(temporary)
    except OSError:
        return  # it is gone, or the next sweep_partials removes it; only the write's own outcome counts


def is_hidden(name: str) -> bool:
    """True for files that jobs ignore: `.git`, `.DS_Store`, `lost+found`, our own temporary files."""
    return name.startswith(".") or name == "lost+found" or PARTIAL_NAME.fullmatch(name) is not None


def sweep_partials(directory: str | Path, below: bool = True) -> int:
    """Remove our temporary files in a directory, and in those `below` it; return their number.

    Call it only while no process writes. Raises StorageError.
    """
    removed = 0
    with storage_errors("sweeping", directory):
        for parent, children, names in os.walk(directory):
            for name in names:
                if PARTIAL_NAME.fullmatch(name):  # with our digits: other programs use the suffix, too
                    Path(parent, name).unlink(missing_ok=True)
                    removed += 1
            if not below:
                children.clear()
    return removed


def read_into(file: BinaryIO, view: memoryview) -> int:
    """Fill `view` from an unbuffered file. Return the number of bytes read, which is smaller only at its end."""
    size = 0
    while size < len(view) and (count := file.readinto(view[size:])):  # type: ignore[attr-defined]
        size += count
    return size
