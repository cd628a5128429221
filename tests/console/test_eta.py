"""How long a job still takes: planned phases, held against what was measured."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from pipeline.console.eta import Eta, PlannedPhase, read_paces
from pipeline.console.progress import JobObserver
from pipeline.units.units import Forward, ShardDone


def ahead(*phases: tuple[str, float]) -> list[PlannedPhase]:
    return [PlannedPhase(*phase) for phase in phases]


PLANNED = ahead(("statistics", 10.0), ("compress", 20.0), ("assemble", 5.0), ("evaluate", 4.0), ("evaluate", 4.0))


def test_the_rest_of_the_phase_and_all_later_ones_at_the_pace_of_those_before() -> None:
    eta = Eta(PLANNED, layers=8)
    eta.begin("statistics", 8)
    assert eta.left(0.0, 0.0) is None
    assert eta.left(10.0, 0.5) == pytest.approx(10.0 + 2 * 33.0)  # twice as slow as planned
    eta.end(20.0)
    eta.begin("compress", 8)
    assert eta.left(10.0, 0.25) == pytest.approx(30.0 + (20 + 10) / (10 + 5) * 13.0)
    eta.end(40.0)
    eta.begin("assemble")
    eta.end(10.0)
    eta.begin("evaluate", 8)
    # Of the other half, half by what this one took and half at the pace of the statistics; the last, at that of both.
    assert eta.left(4.0, 0.5) == pytest.approx(0.5 * 4.0 + 0.5 * 4.0 + 24.0 / 12.0 * 4.0)
    eta.end(10.0)
    eta.begin("evaluate", 8)
    assert eta.left(6.0, 0.75) == pytest.approx(0.75 * 2.0 + 0.25 * 30.0 / 14.0)


def test_products_have_one_pace_and_solves_their_own() -> None:
    """Products take thrice as long as planned, half of the curves as long as planned: the other half, half by that and
    half as products; what was not seen yet, as long as both together."""
    phases = ahead(("importance", 10.0), ("curves", 10.0), ("compress", 20.0), ("gradient", 30.0), ("other", 7.0))
    eta = Eta(phases, layers=8)
    eta.begin("importance", 8)
    eta.end(30.0)
    eta.begin("curves", 8)
    assert eta.left(5.0, 0.5) == pytest.approx(10.0 + 3 * 30.0 + (30.0 + 15.0) / 20.0 * 27.0)


def test_methods_are_not_taken_for_each_other() -> None:
    """Small solves of one take ten times as long as planned: that tells nothing of another's."""
    phases = [PlannedPhase("score", 10.0), PlannedPhase("compress", 1.0, "svd"), PlannedPhase("compress", 5.0, "flat")]
    eta = Eta([*phases, phases[1]], layers=1)
    eta.begin("score")
    eta.end(20.0)
    eta.begin("compress")
    assert eta.left(5.0, 0.5) == pytest.approx(3.0 + 28.0 / 11.0 * 5.0 + 8.0)


def test_a_start_tells_of_starts_alone() -> None:
    eta = Eta(ahead(("start", 15.0), ("statistics", 10.0), ("start", 6.0), ("evaluate", 5.0)), layers=8)
    eta.begin("start")
    eta.end(30.0)
    eta.begin("statistics", 8)
    assert eta.left(1.0, 0.2) == pytest.approx(4.0 + 12.0 + 2.5)


def test_what_an_earlier_run_did_is_not_counted_as_pace() -> None:
    """Two of eight layers were left: ten planned seconds are two and a half."""
    eta = Eta(PLANNED, layers=8)
    eta.begin("statistics", 2)
    eta.end(5.0)
    eta.begin("compress", 8)
    assert eta.left(20.0, 0.5) == pytest.approx(20.0 + 25.0 / 12.5 * 13.0)


def test_a_resumed_run_goes_by_the_paces_of_the_one_before() -> None:
    """Solves took as long as planned, products thrice: the first unit after a resume, whose worker had to start, does
    not make all that is left ten times longer."""
    first = Eta(PLANNED, layers=8)
    first.begin("statistics", 8)
    first.end(30.0)
    first.begin("compress", 8)
    first.end(20.0)
    paces = read_paces(json.loads(json.dumps(first.paces())))
    left = [PlannedPhase("compress", 5.0, layers=2), *PLANNED[2:]]
    eta = Eta(left, layers=8, earlier=paces)
    eta.begin("compress", 2)
    assert eta.left(10.0, 0.2) == pytest.approx((0.2 * 40 + 0.8 * 4) + (21.2 / 5) * 5.0 + 3 * 8.0)
    eta.end(5.0)
    assert eta.paces() == {"products": (30.0, 10.0), "compress": (5.0, 5.0)}


@pytest.mark.parametrize("value", [None, [], {"a": 1}, {"a": [1]}, {"a": [1, "b"]}, {"a": [1, -2]}, {"a": [1e999, 1]}])
def test_a_note_that_holds_no_paces_gives_none(value: object) -> None:
    assert read_paces(value) == {}


def test_a_phase_that_comes_again_brings_what_came_behind_it() -> None:
    """One more try at a size, which takes what the one before took: solves as planned, the score twice as long."""
    eta = Eta(ahead(("compress", 10.0), ("score held-out", 4.0), ("assemble", 7.0)), layers=8)
    for phase, seconds in (("compress", 10.0), ("score held-out", 8.0), ("compress", 10.0)):
        eta.begin(phase, 8)
        eta.end(seconds)
    eta.begin("score held-out", 8)
    assert eta.left(4.0, 0.5) == pytest.approx(4.0 + (30.0 + 2.0) / (20.0 + 6.0) * 7.0)


def test_a_phase_that_was_not_planned_tells_nothing() -> None:
    eta = Eta(PLANNED, layers=8)
    eta.begin("verify")
    assert eta.left(1.0, 0.5) is None
    eta.end(100.0)
    eta.begin("compress", 8)  # statistics were there
    assert eta.left(10.0, 0.5) == pytest.approx(10.0 + 13.0)


RECORDED = json.loads(Path(__file__).with_name("recorded_jobs.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_real_jobs_end_when_it_was_said_from_their_midst_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs as they were timed, two workers on two busy cores: said within a quarter of the whole job's time."""
    recorded, clock, said = RECORDED[name], [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    observer = JobObserver(io.StringIO(), quiet=True)
    for at, kind, *what in recorded["events"]:
        clock[0] = at
        if kind == "stage":
            observer.stage(*what)
        elif kind == "expect":
            observer.expect(Eta([PlannedPhase(*phase) for phase in recorded["planned"]], recorded["layers"]))
        elif kind == "phase":
            phase, layers, units = what
            observer.phase(phase, layers, units // max(1, layers))
        elif kind == "layer":
            observer.done_units, observer.tokens = what[0], 1
            observer.layer_done(observer.state["phase"], 0, {})
            if "seconds_left" in observer.state:
                said.append((at, observer.state["seconds_left"]))
    stood = {round(at): (at, left) for at, left in said}  # what was overruled within a second, nobody has read
    late = {at / clock[0]: (at + left - clock[0]) / clock[0] for at, left in stood.values() if at > clock[0] / 2}
    assert len(late) > 10
    assert max(map(abs, late.values())) < 0.25, late


def test_it_is_shown_and_given_to_status(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    observer = JobObserver(shown)
    observer.stage("start")
    observer.expect(Eta(ahead(("start", 1.0), ("statistics", 1.0), ("start", 2.0), ("compress", 3.0)), layers=2))
    clock[0] += 4.0
    with observer:
        observer.phase("statistics", 2, 1)
        clock[0] += 5.0
        observer.unit_done(Forward("dense", 0, 0), ShardDone({}, None, None, tokens=100))
        observer.layer_done("statistics", 0, {})
        assert observer.state["seconds_left"] == 5.0 + 8.0 + 30.0
    assert "20 tokens/s, 5 s left, job 43 s left" in shown.getvalue()


def test_a_training_knows_its_own_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases behind it come on top; where none was planned, its own time is all that is known."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    observer = JobObserver(io.StringIO(), quiet=True)
    observer.stage("heal")
    observer.step_done(1, 4, 0.5, 30.0)
    shown = {"phase": "heal", "unit": "heal/1", "done": 1, "of": 4, "seconds_left": 30.0, "loss": 0.5}
    assert observer.state == shown
    observer.expect(Eta(ahead(("score teacher", 2.0), ("heal", 20.0), ("score held-out", 5.0))))
    observer.stage("score teacher")
    clock[0] += 4.0
    observer.stage("heal")
    clock[0] += 10.0
    observer.step_done(1, 4, 0.5, 30.0)
    assert observer.state["seconds_left"] == 30.0 + 2.0 * 5.0


def test_a_new_estimate_keeps_the_paces_that_were_measured() -> None:
    """The workers of a healing start when those of the solves have ended."""
    observer = JobObserver(io.StringIO(), quiet=True)
    observer.expect(Eta(ahead(("statistics", 10.0), ("compress", 5.0))))
    observer.eta.begin("statistics")
    observer.eta.end(30.0)
    observer.expect(Eta(ahead(("score teacher", 1.0), ("heal", 2.0))))
    assert observer.eta.earlier == observer.saved_state["paces"] == {"products": (30.0, 10.0)}


def test_a_phase_never_takes_longer_than_its_job() -> None:
    """The first unit took ten times as long as the plan says at the pace before."""
    eta = Eta(ahead(("statistics", 10.0), ("compress", 10.0)), layers=10)
    assert eta.phase_left(10.0, 0.5) == 10.0  # nothing is planned to run
    eta.begin("statistics", 10)
    eta.end(10.0)
    eta.begin("compress", 10)
    assert eta.phase_left(10.0, 0.1) == eta.left(10.0, 0.1) == pytest.approx(0.1 * 90.0 + 0.9 * 9.0)
