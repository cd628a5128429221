"""Layers whose sums are reduced while shards go through the next layers."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.driver import in_flight
from pipeline.driver.in_flight import AHEAD, LayersInFlight
from pipeline.methods.method import Moment
from pipeline.units.units import ShardDone

MOMENTS = (Moment("mlp.in"),)


class ScriptedPass:
    """Notes its calls; every coroutine ends at once."""

    def __init__(self, events: list[Any], units: int) -> None:
        self.events = events
        self.units = units
        self.done = [ShardDone({}, None, None, tokens=units)]

    def collected(self) -> Generator[Any, Any, None]:
        self.events.append(("collected", f"sums of {self.units}"))
        yield from ()

    def stored(self) -> Generator[Any, Any, dict[str, str]]:
        yield from ()
        return {f"moment {self.units}": f"record {self.units}"}


def choose_grids(session: Any, moments: Any, units: Any) -> str:
    return "grids"


def run_layer(session: Any, moments: Any, units: Any, grids: Any) -> Generator[Any, Any, ScriptedPass]:
    assert grids == "grids"
    session.events.append(("run", units))
    yield from ()
    return ScriptedPass(session.events, units)


def finish(coroutine: Generator[Any, Any, Any]) -> None:
    """Runs a coroutine; each awaited value is its own result."""
    value = None
    try:
        while True:
            value = coroutine.send(value)
    except StopIteration:
        return


def session_of(workers: int, events: list[Any]) -> Any:
    cleaner = SimpleNamespace(retain_activations=lambda needed: events.append(("retain", needed)))
    return SimpleNamespace(events=events, cleaner=cleaner, pool=SimpleNamespace(size=workers))


def events_of(workers: int, layers: int, *, stores: bool, moments: tuple[Moment, ...] = MOMENTS) -> list[Any]:
    """Return the events of a pass through some layers."""
    events: list[Any] = []

    def enter(layer: int, done: Any, statistics: Any) -> list[str]:
        events.append(("enter", layer))
        assert statistics == {f"moment {layer}": f"record {layer}"}
        return [f"states of {layer}"]

    flight = LayersInFlight(session_of(workers, events), enter)  # type: ignore[arg-type]
    for layer in range(layers):
        finish(flight.run(layer, moments, lambda layer=layer: layer, stores=stores))  # type: ignore[misc]
    finish(flight.finish())
    return events


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "choose_grids", choose_grids)
    monkeypatch.setattr(in_flight, "run_layer", run_layer)


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("workers", [1, AHEAD, 3 * AHEAD])
def test_layers_are_entered_in_order_and_all(workers: int, stores: bool) -> None:
    events = events_of(workers, 5, stores=stores)
    assert [layer for event, layer in events if event == "enter"] == list(range(5))
    assert [layer for event, layer in events if event == "run"] == list(range(5))


def test_a_layer_that_stores_hidden_states_is_entered_before_the_next_is_passed() -> None:
    events = events_of(3 * AHEAD, 3, stores=True)
    assert events.index(("enter", 0)) < events.index(("run", 1))
    assert events.index(("retain", ("states of 0",))) < events.index(("run", 1)), "older ones are dropped then"


def test_others_wait_for_as_many_layers_as_workers_allow() -> None:
    few, many = events_of(1, 4, stores=False), events_of(2 * AHEAD, 4, stores=False)
    assert few.index(("enter", 0)) > few.index(("run", 1))
    assert few.index(("enter", 0)) < few.index(("run", 2)), "one at a time"
    assert many.index(("enter", 0)) > many.index(("run", 2)), "three at a time"
    assert ("collected", "sums of 0") in many, "a worker holds the sums of two layers at most"
    assert not [event for event, _ in few if event == "collected"]


def test_without_moments_nothing_is_in_flight() -> None:
    events = events_of(3 * AHEAD, 2, stores=False, moments=())
    assert events.index(("enter", 0)) < events.index(("run", 1))


def test_a_layer_is_entered_once_with_the_moments_of_all_its_parts() -> None:
    """Its inputs are those of the first part, its outputs those of the last."""
    entered: list[Any] = []
    flight = LayersInFlight(session_of(1, []), lambda *given: entered.append(given))  # type: ignore[arg-type]
    for part in range(3):
        finish(flight.run(7, MOMENTS, lambda part=part: part, stores=False, last=part == 2))  # type: ignore[misc]
    assert entered == []
    finish(flight.finish())
    ((layer, done, statistics),) = entered
    assert (layer, [shard.tokens for shard in done]) == (7, [2])
    assert statistics == {f"moment {part}": f"record {part}" for part in range(3)}
