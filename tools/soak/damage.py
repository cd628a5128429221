"""Ways to damage a file, and copies of a job to damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.jobs import Job

Damage = Callable[[bytes], bytes | None]  # None: the file goes


def flip(share: float) -> Damage:
    """One bit, at a share of the length; the last byte at 1."""

    def flipped(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[min(int(share * len(changed)), len(changed) - 1)] ^= 1
        return bytes(changed)

    return flipped


DAMAGES: dict[str, Damage] = {
    "first byte": flip(0.0),
    "a byte in front": flip(0.1),
    "middle byte": flip(0.5),
    "last byte": flip(1.0),
    "cut by one": lambda content: content[:-1],
    "cut to half": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "deleted": lambda content: None,
    "appended to": lambda content: content + b"\n",
    "zeros": lambda content: bytes(len(content)),
}


SAME_SIZE = ("first byte", "a byte in front", "middle byte", "last byte", "zeros")  # seen by `verify`, not by `run`


def damage(path: Path, change: Damage) -> bool:
    """Puts changed bytes in a file's place, so that its other names stay whole. False: it is the same as before."""
    before = path.read_bytes()
    after = change(before) if before else (None if change(b"x") is None else b"x")
    if after == before:
        return False
    path.unlink()
    if after is not None:
        path.write_bytes(after)
    return True


def copy_job(job: Job, root: Path) -> Job:
    """The job with all its files, elsewhere; hard links, as `damage` never writes to a file in place."""
    copied = Job(root, job.source, job.text, job.changes)
    shutil.copytree(job.root, root, copy_function=os.link)
    copied.manifest.unlink()  # or writing the manifest would write to the other's
    return copied.write()
