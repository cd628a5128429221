"""Check that the files of a checkpoint are complete and belong together, without reading weights."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

RECORD_FILE, INDEX_FILE = "compression.json", "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
RECORD_VERSION = 1
SHOWN = 5
READER, READER_VERSION = "compressed-tensors", "0.20"  # the first version that reads codes across words
WORD_BITS = 32
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
DESCRIBED = ("dtype", "shape")  # fields of a tensor in a shard's header and in the record


def check_checkpoint(folder: Path) -> None:
    """Compare the shards of a folder with their headers, and with the index and `compression.json` if these exist.

    Names, shapes and sizes are compared; `python -m pipeline.verify` compares digests of the files. Raises ValueError
    for a record of another version, and with every file that is missing, damaged or of another checkpoint.
    """
    record, index = _read(folder / RECORD_FILE, _record), _read(folder / INDEX_FILE, _weight_map)
    sizes, tensors = record or ({}, {})
    single = [SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []
    faults, headers = [], {}
    for name in sorted({*sizes, *(index or {}).values()} or single):
        try:
            _check_plain(name)
            headers[name] = _header(folder / name, sizes.get(name))
        except ValueError as error:
            faults.append(f"{name}: {error}")
    if record:
        if index is None and len(sizes) > 1:
            faults.append(f"{INDEX_FILE}: missing")
        faults += _unlike_record(headers, tensors)
    if index is not None:
        faults += _misplaced(headers, index, tensors if record else None)
        if single and SINGLE_FILE not in headers:
            faults.append(f"{SINGLE_FILE}: not in {INDEX_FILE}, but loaded in place of the shards; remove one of them")
    if not faults:
        return
    if record is None:
        raise ValueError(f"the weights in {folder} are not whole: {shown(faults, '; ')}. Copy the checkpoint again.")
    raise ValueError(
        f"the weights in {folder} are not those that {RECORD_FILE} describes: {shown(faults, '; ')}. "
        f"Copy the checkpoint again; if the weights were changed on purpose, remove {RECORD_FILE}."
    )


def check_reader(quantization: dict[str, Any]) -> None:
    """Check that the package that unpacks rounded weights, at the first token, reads codes of their bits.

    `quantization` is the field of config.json. Raises ImportError if the package is too old for them.
    """
    groups = (quantization.get("config_groups") or {}).values()
    odd = [bits for group in groups if WORD_BITS % (bits := group["weights"]["num_bits"])]
    if odd and Version(installed := version(READER)) < Version(READER_VERSION):
        raise ImportError(
            f"weights of {odd[0]} bits need {READER} {READER_VERSION} or newer, and {installed} is installed: "
            f"pip install '{READER}>={READER_VERSION}', or serve them with vLLM and Lamina's serving package "
            "(pip install CHECKOUT/deploy/serving)"
        )


def _check_plain(name: str) -> None:
    """Raise ValueError unless a name in an index is that of a file in the folder itself."""
    if Path(name).name != name or "\\" in name or "\0" in name:
        raise ValueError("leads out of the checkpoint's folder")


def shown(lines: list[str], separator: str = ", ") -> str:
    """Join the first few lines, and add the number of further ones."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return separator.join([*lines[:SHOWN], *more])


def _read(path: Path, parse: Any) -> Any:
    """Parse a JSON file; None if it does not exist. Raises ValueError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), path)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def _record(content: Any, path: Path) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Return the size of each shard, and the entry of each tensor."""
    if (version := content["version"]) != RECORD_VERSION:
        raise ValueError(f"{path}: version {version!r}, this lamina knows {RECORD_VERSION}; install a newer one")
    sizes = {name: shard["size"] for name, shard in content["shards"].items()}
    return sizes, {name: {**tensor, "shard": tensor["shard"]} for name, tensor in content["tensors"].items()}


def _weight_map(content: Any, path: Path) -> dict[str, str]:
    if odd := {*map(type, content["weight_map"].values())} - {str}:
        raise TypeError(f"weight_map names files, not {odd.pop().__name__}")
    return dict(content["weight_map"].items())


def _header(path: Path, size: int | None) -> dict[str, Any]:
    """Read dtype, shape and offsets of a shard's tensors. Raises ValueError if the file is missing or damaged."""
    if not path.is_file():
        raise ValueError("missing")
    file_size = path.stat().st_size
    if size not in (None, file_size):
        raise ValueError(f"{file_size} bytes, not {size}")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(file_size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            tensors = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"damaged, {file_size} bytes without a header that can be read") from error
    if end != file_size:
        raise ValueError(f"{file_size} bytes, its header describes {end}")
    return {**tensors}


def _unlike_record(headers: dict[str, dict[str, Any]], tensors: dict[str, dict[str, Any]]) -> list[str]:
    """List the tensors that only the shard or only the record has, and those that the record describes differently."""
    faults = []
    for shard, header in headers.items():
        recorded = {name: tensor for name, tensor in tensors.items() if tensor["shard"] == shard}
        for name in sorted({*recorded} ^ {*header}):
            faults.append(f"{shard}: {name} {'missing' if name in recorded else 'unknown'}")
        for name in sorted({*recorded} & {*header}):
            both = [(header[name][key], recorded[name][key]) for key in DESCRIBED if key in recorded[name]]
            faults += [f"{shard}: {name} {stored}, not {expected}" for stored, expected in both if stored != expected]
    return faults


def _misplaced(headers: dict[str, Any], index: dict[str, str], tensors: dict[str, dict[str, Any]] | None) -> list[str]:
    """List the tensors of the index that its shard lacks, or that the record has in another shard."""
    if tensors is None:
        absent = (name for name, shard in sorted(index.items()) if shard in headers and name not in headers[shard])
        return [f"{index[name]}: {name} missing" for name in absent]
    places = {name: tensor["shard"] for name, tensor in tensors.items()}
    names = sorted(name for name in {*index, *places} if index.get(name) != places.get(name))
    return [f"{INDEX_FILE}: {name} in {index.get(name)}, {RECORD_FILE} says {places.get(name)}" for name in names]
