"""Resolves and checks the paths and addresses of a job's files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.errors import InputError, StorageError
from manifests.schema import Manifest
from stores.storage import Storage, is_address, open_file, open_storage

PACKAGE_FOLDERS = ("working_dir_files", "py_modules_files")  # of Ray's runtime environments
FIELDS = ("output", "run_dir", "model.source")


def resolve_paths(manifest: Manifest, base: Path | None) -> Manifest:
    """Return the manifest with relative paths resolved against `base`, if it is given.

    Raises:
        InputError: an address of an unknown kind; or a relative path in Ray's copy of `--working-dir`, where written
            files are lost.
    """
    faults = [fault for field in FIELDS if (fault := _fault(field, _value(manifest, field), base))]
    if faults:
        raise InputError("\n".join(faults))
    return manifest if base is None else Manifest.model_validate(_resolved(manifest.model_dump(), base.resolve()))


def prepare_folder(option: str, folder: str) -> Storage:
    """Create the folder that an option names, and try a write there, before anything is computed.

    Raises:
        InputError: nothing can be written there.
    """
    storage = open_storage(folder)
    try:
        storage.prepare()
    except StorageError as error:
        raise InputError(f"{option} {folder}: cannot be used: {error}") from error
    return storage


def prepare_file(option: str, file: str) -> tuple[Storage, str]:
    """Return the storage of the file that an option names, and its name there. Check it like `prepare_folder`, but
    do not create it.

    Raises:
        InputError: its folder does not exist or cannot be written to, or a folder has its name.
    """
    storage, name = open_file(file)
    if storage.folder is not None and not storage.exists():
        raise InputError(f"{option} {file}: no such folder {storage.at()}; create it, or give a file in another")
    if not name or name in storage.folders():
        raise InputError(f"{option} {file}: is a folder; give the name of a file in it, such as {file}/report.html")
    prepare_folder(option, storage.at())
    return storage, name


def _fault(field: str, path: str, base: Path | None) -> str | None:
    if is_address(path):
        try:
            open_storage(path)
        except InputError as error:
            return f"{field}: {error}"
        return None
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        return (
            f"{field}: {path!r} has letters that file names cannot have in this locale ({error.encoding}); "
            "set LC_ALL=C.UTF-8"
        )
    if path.startswith("~") and field != "model.source":
        return f"{field}: {path}: `~` is not expanded in a manifest; write the whole path, such as {Path.home()}/…"
    if base is not None or Path(path).is_absolute() or not _in_package_folder():
        return None
    if field == "model.source" and not Path(path).exists():
        return None  # a hub id
    return (
        f"{field}: {path} is relative, and this job runs in {Path.cwd()}, Ray's copy of --working-dir: files written "
        "there are lost, and the next submission would not find them. Write an absolute path that every node sees, or "
        'submit with `--base "$PWD"` if the nodes see the folder that you submit from'
    )


def _in_package_folder() -> bool:
    return any(name in Path.cwd().parts for name in PACKAGE_FOLDERS)


def _value(manifest: Manifest, field: str) -> str:
    value: Any = manifest
    for name in field.split("."):
        value = getattr(value, name)
    return str(value)


def _resolved(document: Mapping[str, Any], base: Path) -> dict[str, Any]:
    if not base.is_dir():
        raise InputError(f"--base {base}: no such directory on this machine")
    resolved = {**document, "output": _below(base, document["output"]), "run_dir": _below(base, document["run_dir"])}
    source = base / document["model"]["source"]
    if source.is_dir():
        resolved["model"] = {**document["model"], "source": str(source)}
    for block in ("calibration", "heal", "evaluation"):
        resolved[block] = _with_files(document[block], base)
    return resolved


def _with_files(block: Any, base: Path) -> Any:
    """Return a block of the manifest with the `files` of all its texts resolved."""
    if not isinstance(block, Mapping):
        return block
    resolved = {name: _with_files(value, base) for name, value in block.items()}
    return resolved | ({"files": tuple(_below(base, file) for file in block["files"])} if block.get("files") else {})


def _below(base: Path, path: str) -> str:
    return path if is_address(path) else str(base / path)
