"""A folder of files to a model repository on the hub: weights one file at a time, then everything in one commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from manifests.errors import CorruptError, InputError
from stores.hub import hub_errors
from stores.model_files import PICKLE_SUFFIXES
from stores.storage import Storage, on_this_machine

WEIGHTS = (".safetensors", *PICKLE_SUFFIXES)


def upload_model(
    storage: Storage,
    weights: Mapping[str, str],
    small: Mapping[str, bytes],
    record_file: str,
    repository: str,
    revision: str | None,
    private: bool,
    say: Callable[[str], None],
) -> str:
    """Makes the repository hold these files, and returns the address of the commit.

    Nobody sees half a model: the files of weights go up by themselves, and one commit at the end names all. After an
    interruption the same call goes on: the hub keeps what has come whole, and asks for the rest.

    Args:
        storage: where the weights are.
        weights: file of weights -> its sha256.
        small: name -> content of all other files.
        record_file: which of these lists the files of a model, under `shards` and `files`; files that an earlier one
            lists there, and that do not come now, are deleted.
        repository: ORGANISATION/NAME; made, `private` or not, where it is not there.
        revision: a branch, made where it is not there; None: the main one.
        say: takes a line of progress.

    Raises:
        InputError: the hub refuses, or the repository holds weights that no Lamina checkpoint lists.
        CorruptError: a file of weights is not as its digest says; nothing is committed then.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _sending(repository):
        api.create_repo(repository, private=private, exist_ok=True)
        if revision:
            api.create_branch(repository, branch=revision, exist_ok=True)
        stale = _stale_files(api, repository, revision, record_file, {*weights, *small})
    additions: list[CommitOperationAdd] = []
    for number, (name, sha256) in enumerate(weights.items(), 1):
        say(f"{name} ({number} of {len(weights)})")
        with on_this_machine(storage, partial(_only, name)) as folder, _sending(repository):
            addition = CommitOperationAdd(name, Path(folder) / name)
            api.preupload_lfs_files(repository, [addition], revision=revision)
        if addition.upload_info.sha256.hex() != sha256:
            raise CorruptError(
                f"{storage.at(name)}: damaged: its sha256 is not the recorded one; nothing was committed"
            )
        additions.append(addition)
    additions += [CommitOperationAdd(name, content) for name, content in small.items()]
    deletions = [CommitOperationDelete(name) for name in stale]
    with _sending(repository):
        done: Any = api.create_commit(
            repository, [*additions, *deletions], commit_message="Upload by Lamina", revision=revision
        )
    return str(done.commit_url)


def _only(name: str, _: Storage) -> list[str]:
    return [name]


def _stale_files(api: Any, repository: str, revision: str | None, record_file: str, coming: set[str]) -> list[str]:
    """Files of an earlier checkpoint of ours there that the new one has not: weights, templates that would be used.

    Raises InputError.
    """
    present = set(api.list_repo_files(repository, revision=revision))
    listed: set[str] = set()
    if record_file in present:
        record = Path(api.hf_hub_download(repository, record_file, revision=revision))
        try:
            content = json.loads(record.read_bytes())
            listed = {*content["shards"], *content.get("files", ())}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{repository}: {record_file} there is not legible; give another repository") from error
    foreign = sorted(name for name in present - listed - coming if "/" not in name and name.endswith(WEIGHTS))
    if foreign:
        raise InputError(
            f"{repository} holds weights that Lamina did not write: {', '.join(foreign[:5])}; give another repository"
        )
    return sorted(listed & present - coming)


def _sending(repository: str) -> AbstractContextManager[None]:
    return hub_errors(
        f"{repository}: the hub does not take it",
        "check the name, the network and that the access token may write (HF_TOKEN, or `hf auth login`). "
        "The same command goes on",
    )
