"""Uploads a checkpoint to a repository on the hub: weights file by file, then everything in one commit."""

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
    """Upload the files and return the address of the commit.

    No reader sees half a model: weights are uploaded first, and one final commit names all files. After an
    interruption the same call resumes: the hub keeps complete uploads.

    Args:
        storage: holds the weights.
        weights: file name -> sha256.
        small: name -> content of all other files.
        record_file: the one of these that lists a model's files under `shards` and `files`; files of an earlier upload
            that its record lists, and that are not uploaded now, are deleted.
        repository: ORGANISATION/NAME; created, `private` or not, if it does not exist.
        revision: a branch, created if it does not exist; None: the main one.
        say: is called with each line of progress.

    Raises:
        InputError: the hub refuses, or the repository holds weights that no Lamina checkpoint lists.
        CorruptError: a file of weights does not match its digest; nothing is committed.
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
        commit: Any = api.create_commit(
            repository, [*additions, *deletions], commit_message="Upload by Lamina", revision=revision
        )
    return str(commit.commit_url)


def _only(name: str, _: Storage) -> list[str]:
    return [name]


def _stale_files(api: Any, repository: str, revision: str | None, record_file: str, uploads: set[str]) -> list[str]:
    """Return the files of the repository's earlier checkpoint that are not uploaded now. Raises InputError."""
    present = set(api.list_repo_files(repository, revision=revision))
    listed: set[str] = set()
    if record_file in present:
        record = Path(api.hf_hub_download(repository, record_file, revision=revision))
        try:
            content = json.loads(record.read_bytes())
            listed = {*content["shards"], *content.get("files", ())}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{repository}: {record_file} there is not readable; give another repository") from error
    foreign = sorted(name for name in present - listed - uploads if "/" not in name and name.endswith(WEIGHTS))
    if foreign:
        raise InputError(
            f"{repository} holds weights that Lamina did not write: {', '.join(foreign[:5])}; give another repository"
        )
    return sorted(listed & present - uploads)


def _sending(repository: str) -> AbstractContextManager[None]:
    return hub_errors(
        f"{repository}: the hub refuses it",
        "check the name, the network and that the access token may write (HF_TOKEN, or `hf auth login`). "
        "The same command resumes",
    )
