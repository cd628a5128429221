"""Families with several kinds of layers, of which the config chooses one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

F = TypeVar("F", bound=Any)


@dataclass(frozen=True)
class Variant:
    """One of several kinds of layers of a family.

    Attributes:
        when: config field -> its value, or several values, of which the first is written.
        changes: attributes of the family -> their values for this kind.
    """

    when: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> dict[str, Any]:
        """Return the fields that select this kind."""
        return {name: value[0] if isinstance(value, tuple) else value for name, value in self.when.items()}

    def fits(self, source: Any) -> bool:
        """Return True if a config has the fields of this kind."""
        allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in self.when.items()}
        return all(getattr(source, name) in values for name, values in allowed.items())

    def of(self, family: F) -> F:
        """Return the family with the attributes of this kind."""
        changed: F = replace(family, **self.changes)
        return changed
