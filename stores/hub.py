"""A model on the hub as a storage.

Weights are the safetensors files of the index, or the single one; `model_files` lists the files that travel with them.
Pickles and copies of the weights in other formats are not fetched. All files come from the commit that the revision
resolved to first.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from manifests.errors import InputError, LaminaError, StorageError
from stores.backend import Readable, Storage
from stores.disk import Disk
from stores.model_files import CONFIG_FILE, companions, download_patterns

HUB = "hub://"
ADDRESS = re.compile(rf"{HUB}(?P<repository>[\w.-]+(/[\w.-]+)?)@(?P<commit>[0-9a-f]{{40}})")
SHA256 = re.compile(r"[0-9a-f]{64}")
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Hub(Storage):
    """The files of a model at a commit, by the address `hub://ORGANISATION/NAME@COMMIT`. Read-only.

    `reader` downloads the whole file, once for each machine, into the cache of huggingface_hub (`HF_HOME`). `read`
    requests only its range while the file is not cached.
    """

    repository: str
    commit: str

    @cached_property
    def listing(self) -> Mapping[str, tuple[int, str]]:
        """Name -> size and entity tag (the sha256 of large files), also in folders.

        Where the hub is out of reach, it lists the cached files: a fully cached model serves as a directory.
        """
        import huggingface_hub

        try:
            tree = huggingface_hub.HfApi().list_repo_tree(self.repository, revision=self.commit, recursive=True)
            files: list[Any] = [entry for entry in tree if isinstance(entry, huggingface_hub.RepoFile)]
            return {file.path: (file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in files}
        except Exception:  # as in `hub_errors`
            if (config := self._cached_path(CONFIG_FILE)) is None:
                return {}
            folder = config.parent
            named = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            return {name: (path.stat().st_size, path.resolve().name) for name, path in named.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        size = self.size(name)
        end = size if end is None else min(end, size)
        begin = max(0, size + begin) if begin < 0 else begin
        if (path := self._cached_path(name)) is not None:
            return Disk(path.parent).read(path.name, begin, end)
        if begin >= end:
            return b""
        with _asking(self.repository, self.commit):
            return self._range(name, begin, end)

    @contextmanager
    def reader(self, name: str) -> Iterator[Readable]:
        path = self.fetch(name)
        with Disk(path.parent).reader(path.name) as file:
            yield file

    def stamp(self, name: str) -> dict[str, int | str]:
        if name not in self.listing:
            raise FileNotFoundError(errno.ENOENT, "no such file", self.at(name))
        size, tag = self.listing[name]
        return {"size": size, "e_tag": tag}

    def sha256(self, name: str) -> str:
        tag = str(self.stamp(name)["e_tag"])
        return tag if SHA256.fullmatch(tag) else super().sha256(name)

    def modified_times(self, folder: str = "") -> dict[str, float]:
        start = f"{folder}/" if folder else ""
        return dict.fromkeys(sorted(name for name in self.listing if name.startswith(start)), 0.0)

    def below(self, folder: str) -> Storage:
        raise StorageError(f"{self.at(folder)}: folders of a model on the hub cannot be opened")

    def at(self, name: str = "") -> str:
        return f"{HUB}{self.repository}@{self.commit}{'/' if name else ''}{name}"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StorageError(f"{self.at()}: a model on the hub is read-only")

    put_if_absent = writer = delete = hold = is_held = _refuse

    def _range(self, name: str, begin: int, end: int) -> bytes:
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.commit)
        utils: Any = huggingface_hub.utils
        headers = {**utils.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            utils.hf_raise_for_status(response)
            if response.status_code != 206:
                raise InputError(f"{url}: the server answers no range requests; fetch the model and give its directory")
            content: bytes = response.read()
            return content

    def _cached_path(self, name: str) -> Path | None:
        """The file in this machine's cache; None if it is not there."""
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=self.commit)
        return Path(cached) if isinstance(cached, str) else None

    def fetch(self, name: str) -> Path:
        """Return the file on this machine. One process downloads it while the others wait. Raises StorageError."""
        import huggingface_hub

        if (path := self._cached_path(name)) is not None:
            return path
        tag = str(self.stamp(name)["e_tag"])
        try:
            path = Path(huggingface_hub.hf_hub_download(self.repository, name, revision=self.commit))
        except Exception as error:  # as in `hub_errors`
            raise StorageError(
                f"fetching {self.at(name)}: {type(error).__name__}: {error}; check the network, the access token and "
                "the disk of the cache (HF_HOME) on this node, then run the same command again"
            ) from error
        if SHA256.fullmatch(tag) and Disk(path.parent).sha256(path.name) != tag:
            path.resolve().unlink()
            path.unlink()
            raise StorageError(
                f"fetching {self.at(name)}: the download was damaged and removed; run the same command again"
            )
        return path


def open_hub(source: str, revision: str | None, code: bool) -> Hub:
    """Return a model at the current commit of `revision`, with its config, index and companions fetched.

    `code`: also fetch its Python files. Raises InputError.
    """
    import huggingface_hub

    allowed, ignored = download_patterns(code)
    fetch: Callable[..., str] = huggingface_hub.snapshot_download
    with _asking(source, revision):
        folder = fetch(source, revision=revision, allow_patterns=allowed, ignore_patterns=ignored)
    hub = Hub(source, Path(folder).name)
    for name in companions(hub, code):
        hub.fetch(name)  # now: a later job may have no network
    return hub


def hub_at(address: str) -> Hub:
    """Return the model at an address from `Hub.at`. Raises InputError."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise InputError(f"{address}: not the address of a model on the hub; give its id, and `revision` beside it")
    return Hub(match["repository"], match["commit"])


def _asking(source: str, revision: str | None) -> AbstractContextManager[None]:
    at = f" at revision {revision}" if revision else ""
    return hub_errors(
        f"model source {source}: no such directory, and the hub does not have it{at}",
        "check the path or id, the network and the access token, or fetch it beforehand and give the directory",
    )


@contextmanager
def hub_errors(what: str, remedy: str) -> Iterator[None]:
    """Convert the errors of the hub and its HTTP client, which have no common base, to InputError."""
    try:
        yield
    except LaminaError:
        raise
    except Exception as error:
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        raise InputError(f"{what}: {type(cause).__name__}: {cause}; {remedy}") from error
