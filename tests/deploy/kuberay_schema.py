"""Validates custom resources against KubeRay's definitions, without a cluster.

The API server drops unknown fields. Here they are errors, so that a misspelled field is noticed.
The definitions are beside the checkout (`shared/kuberay`). The operator's own checks are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

OPEN = "x-kubernetes-preserve-unknown-fields"
TOP = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}


def closed(schema: Any) -> Any:
    """Return the schema with unknown properties refused, wherever it lists the known ones."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object":
        made["additionalProperties"] = bool(schema.get(OPEN, False))
    return made


def read_validators(directory: Path) -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """Return (apiVersion, kind) -> validator, from the definitions in a folder."""
    found = {}
    for path in sorted(directory.glob("*.yaml")):
        definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in definition["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= TOP
            key = (f"{definition['group']}/{version['name']}", definition["names"]["kind"])
            found[key] = jsonschema.Draft202012Validator(schema)
    return found


def faults(resource: Mapping[str, Any], validators: Mapping[tuple[str, str], Any]) -> list[str]:
    """Return `PATH: FAULT` for each fault."""
    key = (str(resource.get("apiVersion")), str(resource.get("kind")))
    if key not in validators:
        return [f"{'/'.join(key)}: no such resource"]
    errors = validators[key].iter_errors(resource)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors)
