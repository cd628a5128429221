"""Shortens lists of a layer's groups for people: all experts of a mixture, often hundreds, become one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
EXPERTS = "experts"
NAMED = 8  # experts that a line names
_EXPERT = re.compile(r"experts\.(\d+)(\..+)?")


def expert_number(group: str) -> int | None:
    """Return the number of the expert that a group belongs to: 3 for `experts.3`; None for another group."""
    match = _EXPERT.fullmatch(group)
    return None if match is None else int(match[1])


def split_experts(groups: Mapping[str, T]) -> tuple[dict[str, T], dict[int, list[T]]]:
    """Return the groups outside of experts, and those of each expert by its number, ascending."""
    others = {group: value for group, value in groups.items() if expert_number(group) is None}
    experts: dict[int, list[T]] = {}
    for group, value in groups.items():
        if (number := expert_number(group)) is not None:
            experts.setdefault(number, []).append(value)
    return others, dict(sorted(experts.items()))


def extent(values: Iterable[float], form: str = ",") -> str:
    """Format the least and the largest of some values, `16–128`, or the one value if all are equal."""
    ordered = sorted(values)
    ends = (format(ordered[0], form), format(ordered[-1], form))
    return ends[0] if ends[0] == ends[1] else "–".join(ends)


def named(numbers: Sequence[int]) -> str:
    """Name the first of some experts: `3, 5 and 17 others`."""
    others = len(numbers) - NAMED
    listed = ", ".join(map(str, numbers[:NAMED]))
    return f"{listed} and {others} others" if others > 0 else listed
