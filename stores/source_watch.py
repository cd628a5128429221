"""Notices that a file of the source changed while a job reads it: a checkpoint is made of one source."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from manifests.errors import StorageError, reason
from manifests.records import SourceFile
from stores.storage import Storage

Stamp = Mapping[str, int | str]


class SourceWatch:
    """The files of a source as they were when the job began.

    `check` compares stamps, and reads a file again only where its stamp differs: a hard link or a backup changes
    times, not bytes. Files that are on no disk are left to `check_all`: asking a bucket costs a request a file, and
    what reads there compares entity tags (`SourceCheckpoint.tags`).
    """

    def __init__(self, storage: Storage, files: Mapping[str, SourceFile], companions: Iterable[str]) -> None:
        """`files`: as `file_digests` describes them; `companions`: names of small files that are copied as they are.

        Raises StorageError where a companion cannot be read.
        """
        self.storage = storage
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Stamp, str]] = {}
        for name, found in files.items():
            content = found.as_json()
            self._known[name] = ({key: value for key, value in content.items() if key != "sha256"}, found.sha256)
        for name in companions:
            if name not in self._known:
                self._known[name] = (self._stamp(name), self._sha256(name))

    def check(self) -> None:
        """Raises StorageError, naming the file, where one on a disk is no longer as it was."""
        if self.storage.folder is not None:
            self.check_all()

    def check_all(self) -> None:
        """The same of files in buckets, too."""
        with self._lock:
            for name, (stamp, sha256) in self._known.items():
                now = self._stamp(name)
                if now == stamp:
                    continue
                if now["size"] != stamp["size"] or self._sha256(name) != sha256:
                    raise StorageError(
                        f"{self.storage.at(name)}: changed while the job ran; nothing read since is committed. Restore "
                        "the file, then run the same command again; or let nothing write there, and begin anew with "
                        "--fresh"
                    )
                self._known[name] = (now, sha256)

    def _stamp(self, name: str) -> Stamp:
        try:
            return dict(self.storage.stamp(name))
        except (FileNotFoundError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def _sha256(self, name: str) -> str:
        try:
            return self.storage.sha256(name)
        except (FileNotFoundError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> StorageError:
        return StorageError(
            f"{self.storage.at(name)}: cannot be read any more ({reason(error)}); restore the file, then run the same "
            "command again"
        )
