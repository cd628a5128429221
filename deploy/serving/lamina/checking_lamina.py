"""Whether the files of a checkpoint are those that its `compression.json` names, as far as that can be seen quickly."""

import json
from pathlib import Path
from typing import Any

RECORD_FILE, INDEX_FILE = "compression.json", "model.safetensors.index.json"
RECORD_VERSION = 1
SHOWN = 5


def check_checkpoint(folder: Path) -> None:
    """Holds shards and index of a folder against its `compression.json`; a folder without one is not looked at.

    Sizes and names are compared; digests of the whole files are what `python -m pipeline.verify` reads. Raises
    ValueError for a record of another version, and with every file that is missing or another.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, shards = record["version"], record["shards"]
        tensors = {name: tensor["shard"] for name, tensor in record["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}") from error
    if version != RECORD_VERSION:
        raise ValueError(f"{path}: version {version!r}, this lamina knows {RECORD_VERSION}; install a newer one")
    faults = [fault for name, shard in sorted(shards.items()) if (fault := _fault(folder / name, shard["size"]))]
    if (index := folder / INDEX_FILE).is_file():
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(name for name in {*found, *tensors} if found.get(name) != tensors.get(name))
        faults += [f"{index}: {name} in {found.get(name)}, {RECORD_FILE} says {tensors.get(name)}" for name in names]
    if faults:
        raise ValueError(
            f"the weights in {folder} are not those that {RECORD_FILE} describes: {shown(faults, '; ')}. "
            f"Copy the checkpoint again; if the weights were changed on purpose, remove {RECORD_FILE}."
        )


def shown(lines: list[str], separator: str = ", ") -> str:
    """The first few, and how many more there are."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return separator.join([*lines[:SHOWN], *more])


def _fault(path: Path, size: int) -> str | None:
    if not path.is_file():
        return f"{path.name}: missing"
    found = path.stat().st_size
    return None if found == size else f"{path.name}: {found} bytes, not {size}"
