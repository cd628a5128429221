"""Deaths of workers as one line for each node: who died, of what, and what is done again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GATHER_SECONDS = 1.0  # in which the workers of a node that dies are missed one after another
SHOWN_UNITS = 3
STARTING = "that was starting"
NODE_IN_ERROR = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)  # in what Ray says of an actor


def worker_name(where: Mapping[str, Any]) -> str:
    """Returns NODE:PID of a worker, once it is ready."""
    return f"{where['node']}:{where['pid']}" if "node" in where else STARTING


@dataclass
class _Node:
    since: float
    workers: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


class Deaths:
    """Gathers the deaths on each node, for a second, and says them in one line."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` takes lines for the log."""
        self.note = note
        self.nodes: dict[str, _Node] = {}

    def add(self, where: Mapping[str, Any], units: Sequence[str], error: Exception) -> None:
        """A worker died with these units in hand. `where`: what it said of its place; empty before it was ready."""
        node = self.nodes.setdefault(_node_of(where, error), _Node(time.monotonic()))
        node.workers.append(str(where.get("pid", STARTING)))
        node.units += units
        node.causes += [cause] if (cause := type(error).__name__) not in node.causes else []

    def tell(self, left_on: Mapping[str, int], now: bool = False) -> None:
        """Says what is gathered long enough, or, `now`, all of it. `left_on`: workers by node that are ready."""
        for name, node in list(self.nodes.items()):
            if now or time.monotonic() - node.since >= GATHER_SECONDS:
                self.note(_line(name, node, left_on.get(name, 0)))
                del self.nodes[name]


def _node_of(where: Mapping[str, Any], error: Exception) -> str:
    said = NODE_IN_ERROR.search(str(error))
    return str(where.get("node") or (said.group(1) if said else ""))


def _line(name: str, node: _Node, left: int) -> str:
    count = len(node.workers)
    died = f"{count} worker{'s' if count > 1 else ''} died"
    about = f"process {', '.join(node.workers)}; {', '.join(node.causes)}"
    where = f"node {name}: {died} ({about}), {left or 'none'} left there" if name else f"{died} ({about})"
    return f"{where}; {f'done again: {_listed(node.units)}' if node.units else 'no unit was lost'}"


def _listed(units: Sequence[str]) -> str:
    more = f" and {len(units) - SHOWN_UNITS} more" if len(units) > SHOWN_UNITS else ""
    return f"{len(units)} unit{'s' if len(units) > 1 else ''} ({', '.join(units[:SHOWN_UNITS])}{more})"
