"""From a YAML file and `--set` options to a checked `Manifest`; every fault is reported, all at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from manifests.errors import InputError
from manifests.schema import Manifest

ENVIRONMENT_PATTERN = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def load_manifest(path: str | Path, overrides: Sequence[str] = ()) -> Manifest:
    """Reads, overrides (`a.b=value`, values in YAML) and checks a manifest.

    Raises:
        InputError: missing file, not YAML, or the list of every field that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"manifest {path}: cannot be read ({error}); give the path of a YAML file") from error
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"manifest {path}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"manifest {path}: expected a mapping of fields, found {type(document).__name__}")
    for override in overrides:
        _apply_override(document, override)
    return parse_manifest(document, str(path))


def parse_manifest(document: Mapping[str, Any], origin: str = "manifest") -> Manifest:
    """Checks a manifest already in memory. Raises InputError with one line for every fault."""
    listed = document.get("environment") or ()
    expanded = _expand_environment(document, tuple(listed) if isinstance(listed, (list, tuple)) else ())
    try:
        return Manifest.model_validate(expanded)
    except ValidationError as error:
        raise InputError(f"manifest {origin}:\n" + "\n".join(_describe(fault) for fault in error.errors())) from None


def dump_manifest(manifest: Manifest) -> str:
    """The resolved manifest (every default filled in) as YAML."""
    return yaml.safe_dump(manifest.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply_override(document: dict[str, Any], override: str) -> None:
    field, separator, value = override.partition("=")
    if not separator or not field:
        raise InputError(f"--set {override}: expected FIELD=VALUE, such as budget.keep=0.8")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
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
    if not name.isdigit() or int(name) >= len(target):
        raise InputError(f"--set {override}: {name!r} is no position in a list of {len(target)}")
    return int(name)


def _expand_environment(value: Any, listed: Sequence[Any]) -> Any:
    if isinstance(value, dict):
        return {key: _expand_environment(child, listed) for key, child in value.items()}
    if isinstance(value, list):
        return [_expand_environment(child, listed) for child in value]
    if isinstance(value, str):
        return ENVIRONMENT_PATTERN.sub(lambda match: _variable(match, listed), value)
    return value


def _variable(match: re.Match[str], listed: Sequence[Any]) -> str:
    name = match.group(1)
    if name not in listed:
        return match.group(0)
    if name not in os.environ:
        raise InputError(f"environment: {name} is listed but not set")
    return os.environ[name]


def _describe(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "(top)"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"  {where}: unknown field"
    if fault["type"] == "missing":
        return f"  {where}: missing"
    shown = repr(fault.get("input"))
    return f"  {where}: {message} (given: {shown if len(shown) <= 80 else shown[:77] + '...'})"
