"""A node's death is one line, whatever number of workers it takes along."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from workers import deaths
from workers.deaths import Deaths, worker_name


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(deaths.time, "monotonic", lambda: now[0])
    return now


def test_the_workers_of_a_node_are_said_in_one_line(clock: list[float]) -> None:
    notes: list[str] = []
    gathered = Deaths(notes.append)
    for pid in (7, 8):
        gathered.add({"node": "10.0.0.2", "pid": pid}, [f"forward/3/{pid}", f"forward/3/{pid + 2}"], ActorDiedError())
    gathered.add({"node": "10.0.0.3", "pid": 9}, [], ActorUnavailableError("away", None))
    gathered.report({})
    assert notes == [], "another of them may be missed a moment later"
    clock[0] += deaths.GATHER_SECONDS
    gathered.report({"10.0.0.3": 3})
    assert notes == [
        "node 10.0.0.2: 2 workers died (process 7, 8; ActorDiedError), none left there; "
        "done again: 4 units (forward/3/7, forward/3/9, forward/3/8 and 1 more)",
        "node 10.0.0.3: 1 worker died (process 9; ActorUnavailableError), 3 left there; no unit was lost",
    ]
    gathered.report({}, now=True)
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("error", "node"), [("died\n\tip: 10.0.0.4\nwhy", "node 10.0.0.4: "), ("died of nothing", "")], ids=["node", "none"]
)
def test_a_worker_that_was_starting(error: str, node: str) -> None:
    notes: list[str] = []
    gathered = Deaths(notes.append)
    gathered.add({}, [], RuntimeError(error))
    gathered.report({}, now=True)
    (note,) = notes
    assert note.startswith(f"{node}1 worker died (process that was starting; RuntimeError)")
    assert "?" not in note + worker_name({})
