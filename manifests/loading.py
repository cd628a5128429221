"""Load a YAML file with `--set` options as a checked `Manifest`; all faults are reported at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from manifests.blocks import ManifestBlock
from manifests.calibration import FIELD_TAGS, TEXT_TAGS
from manifests.errors import InputError, reason
from manifests.method_entry import MethodEntry
from manifests.schema import Manifest
from manifests.strict_yaml import read_yaml, write_yaml

B = TypeVar("B", bound=ManifestBlock)
MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 32
PLAIN_WORDS = {  # pydantic's names of types -> YAML's
    r"a valid tuple": "a list",
    r"a valid dictionary or instance of \w+": "a mapping of fields",
    r"a valid boolean": "true or false",
    r"a valid string": "text",
}
ENVIRONMENT_PATTERN = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def load_manifest(path: str | Path, overrides: Sequence[str] = ()) -> Manifest:
    """Read a manifest, apply overrides (`a.b=value`, values in YAML) and check it.

    Raises:
        InputError: the file is missing or not YAML, or a sweep; or a list of all wrong fields.
    """
    document = read_document(path, overrides)
    if "points" in document:
        raise InputError(f"manifest {path}: its `points` make it a sweep, which the command `sweep` runs")
    return parse_manifest(document, str(path))


def read_document(path: str | Path, overrides: Sequence[str] = (), kind: str = "manifest") -> dict[str, Any]:
    """Read the fields of a YAML file, with overrides, unchecked. Raises InputError."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{kind} {path}: cannot be read ({reason(error)}); give the path of a YAML file") from error
    return decode_document(content, f"{kind} {path}", overrides)


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Parse a manifest that `dump_manifest` wrote, from the bytes of the file `path`. Raises InputError."""
    return parse_manifest(decode_resolved(content, f"manifest {path}"), path)


def decode_resolved(content: bytes, origin: str) -> dict[str, Any]:
    """Parse the fields of a file in which variables were already replaced; none is replaced again."""
    return {**decode_document(content, origin), "environment": []}


def decode_document(content: bytes, origin: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Parse the fields of a file, with overrides, unchecked; `origin` names the file in errors. Raises InputError."""
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{origin}: more than {MAX_FILE_BYTES} bytes; this is not a manifest")
    try:
        text = content.decode("utf-8-sig")
    except ValueError as error:
        raise InputError(f"{origin}: cannot be read ({error}); give the path of a YAML file") from error
    try:
        document = read_yaml(text)
    except ValueError as error:
        raise InputError(f"{origin}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"{origin}: expected a mapping of fields, found {type(document).__name__}")
    for override in overrides:
        _apply_override(document, override)
    return document


def parse_manifest(document: Mapping[str, Any], origin: str = "manifest") -> Manifest:
    """Check a document. Raises InputError with one line for every fault."""
    expanded, faults = expand_environment(document, f"manifest {origin}")
    try:
        manifest = Manifest.model_validate(expanded)
    except ValidationError as error:
        faults += describe_faults(error)
        if "points" in document:
            faults.insert(0, "  with `points` it is a sweep: `python -m pipeline.sweep` runs it")
    if faults:
        raise InputError(f"manifest {origin}:\n" + "\n".join(faults))
    return manifest


def expand_environment(document: Mapping[str, Any], origin: str) -> tuple[Any, list[str]]:
    """Replace `${NAME}` by the variables that `environment` lists. Return also a line for each one that is not set."""
    listed = document.get("environment")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, (list, tuple)) else []
    faults = [f"  environment: {name} is listed but not set" for name in names if name not in os.environ]
    variables = {name: os.environ[name] for name in names if name in os.environ}
    return _expand_environment(document, variables, origin), faults


def describe_faults(error: ValidationError, root: type[ManifestBlock] = Manifest) -> list[str]:
    """Return a line for each fault of a block `root`."""
    return [_describe(fault, root) for fault in error.errors()]


def parse_block(kind: type[B], fields: Mapping[str, Any], origin: str) -> B:
    """Check one block from another place (`origin`). Raises InputError with a line for each fault."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise InputError(f"{origin}:\n" + "\n".join(describe_faults(error))) from error


def dump_manifest(manifest: Manifest) -> str:
    """Return the resolved manifest as YAML, with all defaults and variables filled in."""
    return write_yaml({**manifest.model_dump(mode="json"), "environment": []})


def _apply_override(document: dict[str, Any], override: str) -> None:
    field, separator, value = override.partition("=")
    if not separator or not all(field.split(".")):
        raise InputError(f"--set {override}: expected FIELD=VALUE, such as budget.keep=0.8")
    try:
        parsed = read_yaml(value)
    except ValueError as error:
        raise InputError(f"--set {override}: the value is not YAML: {error}") from error
    target: Any = document
    *parents, last = field.split(".")
    for depth, name in enumerate(parents):
        target = _child(target, name, override, ".".join(parents[: depth + 1]))
    if isinstance(target, list):
        target[_position(target, last, override)] = parsed
    else:
        target[last] = parsed


def _child(target: Any, name: str, override: str, path: str) -> Any:
    if isinstance(target, list):
        child = target[_position(target, name, override)]
    else:
        child = target.setdefault(name, {})
        if child is None:
            child = target[name] = {}
    if not isinstance(child, (dict, list)):
        raise InputError(f"--set {override}: {path} is {child!r}, which has no fields")
    return child


def _position(target: list[Any], name: str, override: str) -> int:
    positions = [str(position) for position in range(len(target))]
    if name not in positions:
        raise InputError(f"--set {override}: {name!r} is not a position in a list of {len(target)}; the first is 0")
    return positions.index(name)


def _expand_environment(value: Any, variables: Mapping[str, str], origin: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise InputError(f"{origin}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {key: _expand_environment(child, variables, origin, depth + 1) for key, child in value.items()}
    if isinstance(value, list):
        return [_expand_environment(child, variables, origin, depth + 1) for child in value]
    if isinstance(value, str):
        return ENVIRONMENT_PATTERN.sub(lambda match: variables.get(match.group(1), match.group(0)), value)
    return value


def _describe(fault: Any, root: type[ManifestBlock]) -> str:
    where = ".".join(str(part) for part in _without_tag(fault["loc"]))
    if fault["type"].startswith("union_tag"):
        return _describe_method(where, fault)
    if fault["type"] == "missing":
        return f"  {where}: missing"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not where:
        return f"  {message}"
    shown = repr(_as_written(fault["input"]))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if fault["type"] == "extra_forbidden":
        allowed = ", ".join(_allowed_beside(fault["loc"], root))
        return f"  {where}: unknown field (given: {shown}; allowed here: {allowed})"
    if fault["type"] == "model_attributes_type":
        return f"  {where}: should be a mapping of fields (given: {shown})"
    for theirs, ours in PLAIN_WORDS.items():
        message = re.sub(theirs, ours, message)
    return f"  {where}: {message} (given: {shown})"


def _as_written(value: Any) -> Any:
    """Return a value as YAML writes it: a block as its fields, a tuple as a list."""
    if isinstance(value, BaseModel):
        return _as_written(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        return {name: _as_written(child) for name, child in value.items()}
    return [_as_written(child) for child in value] if isinstance(value, list | tuple) else value


def _without_tag(loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return a location as the user wrote it: `methods.0.ridge` for pydantic's `methods.0.flat_llm.ridge`."""
    parts = enumerate(loc)
    named = (part for at, part in parts if at < 2 or loc[at - 2] != "methods" or not isinstance(loc[at - 1], int))
    return tuple(part for part in named if part not in (*TEXT_TAGS, *FIELD_TAGS))


def _describe_method(where: str, fault: Any) -> str:
    """Describe an entry of `methods` whose method is missing or unknown."""
    entry, allowed = fault["input"], ", ".join(repr(name) for name in _method_names())
    if isinstance(entry, Mapping) and "method" in entry:
        return f"  {where}.method: allowed are {allowed} (given: {entry['method']!r})"
    return f"  {where}.method: missing; allowed are {allowed}"


def _method_names() -> list[str]:
    return sorted(get_args(entry.model_fields["method"].annotation)[0] for entry in MethodEntry.__subclasses__())


def _allowed_beside(loc: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """Return the fields of the block that holds the last part of `loc`; parts that name no field are skipped."""
    blocks: list[type[BaseModel]] = [root]
    for part in loc[:-1]:
        named = [block.model_fields[part].annotation for block in blocks if part in block.model_fields]
        if named:
            blocks = [block for annotation in named for block in _blocks_in(annotation)]
    return sorted({field for block in blocks for field in block.model_fields})


def _blocks_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _blocks_in(argument)
