"""Counts consecutive deaths of workers on a unit, and ends the job after too many."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from manifests.errors import InputError, StorageError, WorkerError
from pipeline.units.sums import Collect
from pipeline.units.units import Unit

START = "start"


def failure_key(unit: Unit) -> str:
    """Return the key under which deaths on a unit are counted; `Collect` units of all workers share one."""
    return f"collect/{unit.lineage}/{unit.layer}" if isinstance(unit, Collect) else unit.key


class Failures:
    """Counts deaths by unit until the unit succeeds."""

    def __init__(self, limit: int) -> None:
        """`limit`: deaths in a row that end the job (`workers.max_failures`)."""
        self.limit = limit
        self.counts: Counter[str] = Counter()

    def forgive(self, key: str) -> None:
        """Reset the count: the unit has succeeded."""
        del self.counts[key]

    def count(self, key: str, error: Exception, where: Mapping[str, Any], disk_full: bool) -> None:
        """Count a death on a unit or at START. `where`: the worker's `ready` report.

        Raises, at the limit:
            StorageError: the disk of the object store is full.
            InputError: the worker's node lacks a module.
            WorkerError: otherwise.
        """
        self.counts[key] += 1
        if self.counts[key] < self.limit:
            return
        if disk_full:
            raise StorageError(
                f"{key}: the disk of Ray's object store is full on node {where.get('node', '?')}, at "
                f"{where.get('ray_folder', 'its --temp-dir')}; make room there, or start Ray with another "
                f"--temp-dir ({type(error).__name__})"
            )
        if missing := re.search(r"No module named '?([\w.]+)", str(error)):
            raise InputError(
                f"a node of the cluster cannot import {missing.group(1)}: install the project there, in the version "
                "that is here, or submit the job from a checkout with --working-dir ."
            )
        when = "died before they were ready" if key == START else "died on it"
        prefix = "" if key == START else f"{key}: "
        raise WorkerError(f"{prefix}{self.limit} workers {when} (workers.max_failures); the last: {error}")
