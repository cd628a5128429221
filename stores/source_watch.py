"""Detects changes of the source's files while a job reads them: a checkpoint must come from one source."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from manifests.errors import StorageError, reason
from manifests.records import SourceFile
from stores.storage import Storage

Stamp = Mapping[str, int | str]


class SourceWatch:
    """Stamps and digests of a source's files at the start of the job.

    `check` compares stamps and reads a file again only if its stamp differs: a hard link or a backup changes times, not
    bytes. It skips files in buckets, where each stamp costs a request and each read compares entity tags
    (`SourceCheckpoint.tags`); `check_all` includes them.
    """

    def __init__(self, storage: Storage, files: Mapping[str, SourceFile], companions: Iterable[str]) -> None:
        """`files`: from `file_digests`; `companions`: names of the small files to copy. Raises StorageError."""
        self.storage = storage
        self._lock = threading.Lock()
        self._original: dict[str, tuple[Stamp, str]] = {}
        for name, file in files.items():
            self._original[name] = (
                {key: value for key, value in file.as_json().items() if key != "sha256"},
                file.sha256,
            )
        for name in companions:
            if name not in self._original:
                self._original[name] = (self._stamp(name), self._sha256(name))

    def check(self) -> None:
        """Raise StorageError, naming the file, if a file on a disk has changed."""
        if self.storage.folder is not None:
            self.check_all()

    def check_all(self) -> None:
        """Raise StorageError, naming the file, if a file on a disk or in a bucket has changed."""
        with self._lock:
            for name, (stamp, sha256) in self._original.items():
                now = self._stamp(name)
                if now == stamp:
                    continue
                if now["size"] != stamp["size"] or self._sha256(name) != sha256:
                    raise StorageError(
                        f"{self.storage.at(name)}: changed while the job ran; nothing read since is committed. Restore "
                        "the file, then run the same command again; or keep other programs from writing there, and "
                        "start over with --fresh"
                    )
                self._original[name] = (now, sha256)

    def _stamp(self, name: str) -> Stamp:
        with self._readable(name):
            return dict(self.storage.stamp(name))

    def _sha256(self, name: str) -> str:
        with self._readable(name):
            return self.storage.sha256(name)

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, ValueError) as error:
            raise StorageError(
                f"{self.storage.at(name)}: cannot be read any more ({reason(error)}); restore the file, then run the "
                "same command again"
            ) from error
