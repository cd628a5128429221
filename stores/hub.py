"""A model on the hub: which of its files are fetched, and the headers of its weights alone.

Weights are the safetensors files of the index, or the single one; pickles, other formats' copies of the weights and
folders stay where they are. Everything comes from the one commit that the revision meant at first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from manifests.errors import InputError, LaminaError
from stores.headers import FIRST_BYTES, TensorRecord, parse_header

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
COMPANIONS = (  # what travels with the weights, from the hub and to OUTPUT
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
CODE = ("*.py",)  # travels where the manifest says trust_remote_code
TIMEOUT_S = 30.0
CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


def fetch_description(source: str, revision: str | None, code: bool) -> Path:
    """A folder with config, index and companions of a model, no weights; its name is the commit. Raises InputError."""
    patterns = [CONFIG_FILE, INDEX_FILE, *COMPANIONS, *(CODE if code else ())]
    return _snapshot(source, revision, patterns)


def fetch_weights(source: str, directory: Path, files: Sequence[str]) -> None:
    """The weights of the commit that `directory` holds the description of, into it. Raises InputError."""
    _snapshot(source, directory.name, list(files))


def repository_files(source: str, directory: Path) -> frozenset[str]:
    """The names of all files of that commit, folders left out; those fetched before, where the hub is out of reach."""
    import huggingface_hub

    try:
        names = huggingface_hub.HfApi().list_repo_files(source, revision=directory.name)
    except Exception:  # as in `_asking`; without network a snapshot that was fetched whole serves as a directory does
        names = [path.name for path in directory.iterdir()]
    return frozenset(name for name in names if "/" not in name)


def remote_header(source: str, directory: Path, file: str) -> dict[str, TensorRecord]:
    """The tensors of a safetensors file on the hub, by range requests for its header. Raises InputError."""
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(source, file, revision=directory.name)
    with _asking(source, directory.name):
        begin, file_bytes = _range(url, 0, FIRST_BYTES)

    def read(start: int, end: int) -> bytes:
        if end <= len(begin):
            return begin[start:end]
        with _asking(source, directory.name):
            return _range(url, start, end - start)[0]

    return parse_header(file, file, read, file_bytes)


def _range(url: str, offset: int, count: int) -> tuple[bytes, int]:
    """At most `count` bytes of a file from `offset` on, and the size of all of it."""
    import huggingface_hub

    utils: Any = huggingface_hub.utils
    headers = {
        **utils.build_hf_headers(),
        "Range": f"bytes={offset}-{offset + count - 1}",
        "Accept-Encoding": "identity",
    }
    with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        utils.hf_raise_for_status(response)
        found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code != 206 or found is None:
            raise InputError(f"{url}: the server answers no range requests; fetch the model and give its directory")
        return response.read(), int(found[1])


def _snapshot(source: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub

    fetch: Callable[..., str] = huggingface_hub.snapshot_download
    with _asking(source, revision):
        return Path(fetch(source, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))


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
