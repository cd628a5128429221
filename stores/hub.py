"""A model on the hub as a storage: which of its files travel, and how they come to the nodes that read them.

Weights are the safetensors files of the index, or the single one; `model_files` says what travels beside them. Pickles
and other formats' copies of the weights stay where they are. Everything comes from the one commit that the revision
meant at first.
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
from stores.durable import sha256_file
from stores.model_files import CONFIG_FILE, companions, download_patterns

HUB = "hub://"
ADDRESS = re.compile(rf"{HUB}(?P<repository>[\w.-]+(/[\w.-]+)?)@(?P<commit>[0-9a-f]{{40}})")
SHA256 = re.compile(r"[0-9a-f]{64}")
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Hub(Storage):
    """The files of a model at a commit, by the address `hub://ORGANISATION/NAME@COMMIT`. Read, never written.

    A `reader` is of the whole file: fetched once for each machine, into the cache that huggingface_hub keeps there
    (`HF_HOME`). `read` asks for what is read alone, while the file is not there.
    """

    repository: str
    commit: str

    @cached_property
    def listing(self) -> Mapping[str, tuple[int, str]]:
        """Name -> size and entity tag, which of large files is their sha256; in folders, too.

        Where the hub is out of reach, of the files that are here: a model that was fetched whole serves as a directory.
        """
        import huggingface_hub

        try:
            tree = huggingface_hub.HfApi().list_repo_tree(self.repository, revision=self.commit, recursive=True)
            files: list[Any] = [entry for entry in tree if isinstance(entry, huggingface_hub.RepoFile)]
            return {file.path: (file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in files}
        except Exception:  # as in `hub_errors`
            if (config := self._here(CONFIG_FILE)) is None:
                return {}
            folder = config.parent
            named = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            return {name: (path.stat().st_size, path.resolve().name) for name, path in named.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        size = self.size(name)
        end = size if end is None else min(end, size)
        begin = max(0, size + begin) if begin < 0 else begin
        if (path := self._here(name)) is not None:
            return Disk(path.parent).read(path.name, begin, end)
        with _asking(self.repository, self.commit):
            return _range(_url(self.repository, self.commit, name), begin, end - begin) if begin < end else b""

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
        raise StorageError(f"{self.at(folder)}: folders of a model on the hub are not read")

    def at(self, name: str = "") -> str:
        return f"{HUB}{self.repository}@{self.commit}{'/' if name else ''}{name}"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StorageError(f"{self.at()}: a model on the hub is read, not written to")

    put_if_absent = writer = delete = hold = is_held = _refuse

    def _here(self, name: str) -> Path | None:
        """The file, if this machine has it."""
        import huggingface_hub

        found = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, name: str) -> Path:
        """The file on this machine. Raises StorageError."""
        return self._here(name) or self._fetched(name)

    def _fetched(self, name: str) -> Path:
        """One process of a machine fetches it, while the others wait. Raises StorageError."""
        import huggingface_hub

        tag = str(self.stamp(name)["e_tag"])
        try:
            path = Path(huggingface_hub.hf_hub_download(self.repository, name, revision=self.commit))
        except Exception as error:  # as in `hub_errors`
            raise StorageError(
                f"fetching {self.at(name)}: {type(error).__name__}: {error}; check the network, the access token and "
                "the disk of the cache (HF_HOME) on this node, then run the same command again"
            ) from error
        if SHA256.fullmatch(tag) and sha256_file(path) != tag:
            path.resolve().unlink()
            path.unlink()
            raise StorageError(f"fetching {self.at(name)}: it came damaged and was removed; run the same command again")
        return path


def open_hub(source: str, revision: str | None, code: bool) -> Hub:
    """A model at the commit that `revision` means now; its config, index and companions are fetched, and Python beside
    them where `code` is wanted. Raises InputError."""
    import huggingface_hub

    wanted, unwanted = download_patterns(code)
    fetch: Callable[..., str] = huggingface_hub.snapshot_download
    with _asking(source, revision):
        folder = fetch(source, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted)
    hub = Hub(source, Path(folder).name)
    for name in companions(hub, code):
        hub.fetch(name)  # now: a later job may be without network
    return hub


def hub_at(address: str) -> Hub:
    """The model at an address that `Hub.at` gave. Raises InputError."""
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise InputError(f"{address}: no address of a model on the hub; give its id, and `revision` beside it")
    return Hub(found["repository"], found["commit"])


def _url(source: str, commit: str, name: str) -> str:
    import huggingface_hub

    return huggingface_hub.hf_hub_url(source, name, revision=commit)


def _range(url: str, offset: int, count: int) -> bytes:
    """`count` bytes of a file from `offset` on."""
    import huggingface_hub

    utils: Any = huggingface_hub.utils
    headers = {
        **utils.build_hf_headers(),
        "Range": f"bytes={offset}-{offset + count - 1}",
        "Accept-Encoding": "identity",
    }
    with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        utils.hf_raise_for_status(response)
        if response.status_code != 206:
            raise InputError(f"{url}: the server answers no range requests; fetch the model and give its directory")
        content: bytes = response.read()
        return content


def _asking(source: str, revision: str | None) -> AbstractContextManager[None]:
    at = f" at revision {revision}" if revision else ""
    return hub_errors(
        f"model source {source}: no such directory, and the hub does not give it{at}",
        "check the path or id, the network and the access token, or fetch it beforehand and give the directory",
    )


@contextmanager
def hub_errors(what: str, remedy: str) -> Iterator[None]:
    """In here the hub's own errors and those of its HTTP client, which have nothing in common, are InputErrors."""
    try:
        yield
    except LaminaError:
        raise
    except Exception as error:
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        raise InputError(f"{what}: {type(cause).__name__}: {cause}; {remedy}") from error
