"""Simulates power cuts: writes without an fsync may be lost, wholly or partly, in any combination.

`Disk` watches fsync below a directory. `cut` then undoes, at random by a seed, each change of a directory
since its last fsync (a name that was created, removed or replaced), and damages each file whose bytes are not
durable.
Its record survives a process that is only killed, because the kernel keeps that process's unsynced writes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Names = dict[str, str]  # name -> inode, or "directory"


class Disk:
    """The durable state of the folder `root`. `shadow`: a folder on the same filesystem that keeps old files alive."""

    def __init__(self, root: Path, shadow: Path) -> None:
        self.root, self.shadow = root, shadow
        self.state = shadow / "state.json"
        self.files: dict[str, list[int]] = {}  # inode -> [size, mtime] when last synced
        self.folders: dict[str, Names] = {}  # path -> its names when last synced
        shadow.mkdir(exist_ok=True)
        self.started = time.time_ns()
        if self.state.exists():
            self.started, self.files, self.folders = json.loads(self.state.read_text())
        else:
            for folder in self._walk():
                self.synced_folder(folder)
                for path in filter(Path.is_file, folder.iterdir()):
                    self.synced_file(os.stat(path))

    def watch(self) -> None:
        """Start to record every fsync of this process."""
        original = os.fsync

        def fsync(descriptor: Any) -> None:
            original(descriptor)
            found = os.fstat(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path != self.root and self.root not in path.parents:
                return
            if stat.S_ISDIR(found.st_mode):
                self.synced_folder(path)
            else:
                self.synced_file(found)

        os.fsync = fsync

    def synced_file(self, found: os.stat_result) -> None:
        self.files[str(found.st_ino)] = [found.st_size, found.st_mtime_ns]

    def synced_folder(self, folder: Path) -> None:
        self.folders[str(folder)] = self._names(folder)

    def remember(self) -> None:
        """Save the record for the next process, as the machine survives the kill of this one."""
        self.state.write_text(json.dumps([self.started, self.files, self.folders]))

    def cut(self, seed: int) -> None:
        """Cut the power. All remaining data is then durable."""
        coin = random.Random(seed)
        for folder in list(self._walk()):
            if folder.exists():  # not lost with its parent
                self._undo_names(folder, coin)
        for folder in list(self._walk()):
            for path in filter(Path.is_file, sorted(folder.iterdir())):
                self._spoil(path, coin)
        shutil.rmtree(self.shadow)

    def _undo_names(self, folder: Path, coin: random.Random) -> None:
        before, now = self.folders.get(str(folder), {}), self._names(folder)
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) == now.get(name) or coin.random() < 0.5:
                continue
            path = folder / name
            if now.get(name) == "directory":
                while path.exists():  # another thread may still be writing there
                    shutil.rmtree(path, ignore_errors=True)
            elif name in now:
                path.unlink()
            kept = self.shadow / before.get(name, "none")
            if kept.is_file():
                os.link(kept, path)

    def _spoil(self, path: Path, coin: random.Random) -> None:
        found = path.stat()
        if self.files.get(str(found.st_ino)) == [found.st_size, found.st_mtime_ns]:
            return
        if found.st_mtime_ns < self.started:
            return  # written long ago, and linked here
        kind = coin.choice(["whole", "empty", "half", "zeros"])
        if kind in ("empty", "half"):
            os.truncate(path, found.st_size // 2 if kind == "half" else 0)
        elif kind == "zeros":
            path.write_bytes(bytes(found.st_size))

    def _names(self, folder: Path) -> Names:
        """Return name -> inode. Links each file to the shadow, which keeps its inode and its content."""
        names: Names = {}
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                names[path.name] = "directory"
                continue
            names[path.name] = str(path.stat().st_ino)
            kept = self.shadow / names[path.name]
            if not kept.exists():
                os.link(path, kept)
        return names

    def _walk(self) -> Iterator[Path]:
        for folder, children, _ in os.walk(self.root):
            children.sort()
            yield Path(folder)
