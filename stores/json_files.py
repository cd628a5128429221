"""Parses JSON strictly, and reads small JSON files that may be missing or damaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from manifests.errors import StorageError
from stores.storage import Storage

MAX_JSON_BYTES = 512 * 1024 * 1024  # an index of a million tensors has 100 MB


def parse_json(data: bytes, infinite: bool = False) -> Any:
    """Parse strict JSON. Raises ValueError on NaN, infinity and duplicate keys.

    `infinite`: accept `Infinity`, which configs of models have for limits that bound nothing.
    """

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) and not (infinite and text == "Infinity"):
            raise ValueError(f"{text} is not a JSON number")
        return value

    return json.loads(data, object_pairs_hook=without_duplicates, parse_float=finite, parse_constant=finite)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` that refuses duplicate keys. Raises ValueError."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {repeated!r} occurs twice")
    return entries


def read_object(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing or damaged."""
    try:
        content = json.loads(storage.read(name))
    except (OSError, StorageError, ValueError):
        return None
    return content if isinstance(content, dict) else None
