"""Samples the variants of each parametrized test: each value of each parameter, but not each combination."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import pytest

OF_WHOLE_JOBS = 2  # variants of a test of whole jobs in `make test`, unless its own mark says another number
# Folders of which `make test` runs every eighth variant outside the sample.
LONG_GRIDS = {"driver", "families", "gpu", "methods", "recommendation", "serving", "workers"}


def mark_variants(items: Iterable[pytest.Item]) -> None:
    """Mark all tests outside of the sample as `variant`. `make unit` leaves them out, and `make nightly` runs them.

    `make test` leaves out those of whole jobs, and seven of eight of long grids.
    """
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for variants in functions.values():
        mark = variants[0].get_closest_marker("sample")
        limit = mark.args[0] if mark else OF_WHOLE_JOBS if "end_to_end" in variants[0].path.parts else None
        sample = covering([item.callspec.params for item in variants])[:limit]
        for position, item in enumerate(variants):
            if position not in sample:
                item.add_marker("variant")
                if at_night(item.path.parts, position):
                    item.add_marker("nightly")


def at_night(folders: Collection[str], position: int) -> bool:
    """Return True if `make test` leaves out the variant at this position, which is not in the sample."""
    return "end_to_end" in folders or (position % 8 != 0 and not LONG_GRIDS.isdisjoint(folders))


def covering(variants: Sequence[Mapping[str, object]]) -> list[int]:
    """Return positions of variants that together have each value of each parameter, most new values first.

    Values are compared by identity, as pytest shares them between combinations.
    """
    values = [{(name, id(value)) for name, value in variant.items()} for variant in variants]
    missing = set().union(*values)
    sample: list[int] = []
    while missing:
        best = max(range(len(values)), key=lambda position: len(values[position] & missing))
        sample.append(best)
        missing -= values[best]
    return sample
