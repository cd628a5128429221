"""The health of a pool: deaths of workers and when they end the job, too few workers, and kills for lack of memory."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import InputError, StorageError, WorkerError
from pipeline.units.sums import Collect
from pipeline.units.units import Unit

GATHER_SECONDS = 1.0  # the workers of a dead node are noticed one after another within this time
SHOWN_UNITS = 3
STARTING = "that was starting"
NODE_IN_ERROR = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)  # in Ray's error about an actor
START = "start"
WARNING_SECONDS = 50.0  # before the first message about a shortage, and between messages
LONGEST_PAUSE_SECONDS = 60.0
SIZE = r"([0-9.]+) ?([KMGT]?)B"
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def worker_name(where: Mapping[str, Any]) -> str:
    """Return NODE:PID of a worker once it is ready."""
    return f"{where['node']}:{where['pid']}" if "node" in where else STARTING


@dataclass
class _Node:
    since: float
    workers: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


class Deaths:
    """Collects the deaths on each node for a second and logs them in one line."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note`: writes a line to the log."""
        self.note = note
        self.nodes: dict[str, _Node] = {}

    def add(self, where: Mapping[str, Any], units: Sequence[str], error: Exception) -> None:
        """Record a death of a worker that ran these units. `where`: its `ready` report, or empty."""
        node = self.nodes.setdefault(_node_of(where, error), _Node(time.monotonic()))
        node.workers.append(str(where.get("pid", STARTING)))
        node.units += units
        node.causes += [cause] if (cause := type(error).__name__) not in node.causes else []

    def report(self, ready_on: Mapping[str, int], now: bool = False) -> None:
        """Log deaths that are `GATHER_SECONDS` old, or all with `now`. `ready_on`: node -> number of ready workers."""
        for name, node in list(self.nodes.items()):
            if now or time.monotonic() - node.since >= GATHER_SECONDS:
                self.note(_line(name, node, ready_on.get(name, 0)))
                del self.nodes[name]


def _node_of(where: Mapping[str, Any], error: Exception) -> str:
    match = NODE_IN_ERROR.search(str(error))
    return str(where.get("node") or (match.group(1) if match else ""))


def _line(name: str, node: _Node, ready: int) -> str:
    count = len(node.workers)
    died = f"{count} worker{'s' if count > 1 else ''} died"
    about = f"process {', '.join(node.workers)}; {', '.join(node.causes)}"
    where = f"node {name}: {died} ({about}), {ready or 'none'} left there" if name else f"{died} ({about})"
    return f"{where}; {f'done again: {_listed(node.units)}' if node.units else 'no unit was lost'}"


def _listed(units: Sequence[str]) -> str:
    more = f" and {len(units) - SHOWN_UNITS} more" if len(units) > SHOWN_UNITS else ""
    return f"{len(units)} unit{'s' if len(units) > 1 else ''} ({', '.join(units[:SHOWN_UNITS])}{more})"


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


class Shortage:
    """Measures how long too few workers have been ready."""

    def __init__(self, limit_s: float, note: Callable[[str], None]) -> None:
        """`limit_s`: how long to wait for resources that the cluster lacks (`workers.start_timeout_s`)."""
        self.limit_s = limit_s
        self.note = note
        self.since: float | None = None
        self.warned_at = 0.0

    def watch(self, ready: int, needed: int, never: Callable[[], str | None], cluster: Callable[[], str]) -> None:
        """Compare the number of ready workers with the needed number.

        `never`: returns why no worker can start, or None. `cluster`: describes the cluster's resources.
        Raises WorkerError after `limit_s` if no worker can start.
        """
        now = time.monotonic()
        if ready >= needed:
            self.since = None
            return
        if self.since is None:
            self.since = self.warned_at = now
        waited_s = now - self.since
        if now - self.warned_at < WARNING_SECONDS and waited_s < self.limit_s:
            return
        reason = never()
        if reason and waited_s >= self.limit_s:
            raise WorkerError(f"{reason}; waited {waited_s:.0f} s (workers.start_timeout_s)")
        if now - self.warned_at >= WARNING_SECONDS:
            self.warned_at = now
            self.note(f"waiting for {needed} workers, {ready} are ready: {reason or cluster()}")


def others_hold_most(message: str) -> bool:
    """Return True if Ray's message shows that the killed worker held less than half of the memory in use."""
    used = re.search(rf"was {SIZE} used /", message)
    selected = message.partition("Selected to kill")[2]
    own = max((_bytes(*size) for size in re.findall(rf"actual memory used={SIZE}", selected)), default=0.0)
    return used is None or own < _bytes(*used.groups()) / 2


def _bytes(number: str, unit: str) -> float:
    return float(number) * float(1024 ** POWERS[unit])


class Pause:
    """Pauses the start of workers; each pause is twice as long as the last, until a unit succeeds."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        """`first_s`: length of the first pause. `limit_s`: the longest total of pauses without a successful unit."""
        self.first_s = first_s
        self.limit_s = limit_s
        self.since: float | None = None
        self.seconds = self.until = 0.0

    def begin(self) -> bool:
        """Start the next pause unless one is active. Return True if the limit is reached."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if not self.is_active():
            self.seconds = min(2 * self.seconds or self.first_s, LONGEST_PAUSE_SECONDS)
            self.until = now + self.seconds
        return now - self.since >= self.limit_s

    def is_active(self) -> bool:
        """Return True while no worker may start."""
        return time.monotonic() < self.until

    def end(self) -> None:
        """Reset the pauses after a unit has succeeded."""
        self.since = None
        self.seconds = self.until = 0.0
