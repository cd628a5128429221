"""Logs deaths of workers in one line per node: the workers, the cause, and the units that run again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GATHER_SECONDS = 1.0  # the workers of a dead node are noticed one after another within this time
SHOWN_UNITS = 3
STARTING = "that was starting"
NODE_IN_ERROR = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)  # in Ray's error about an actor


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
