"""The display of a job: whole words at 80 columns, phases by their names."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from manifests.entries import GroupReport
from pipeline.console.eta import Eta, PlannedPhase
from pipeline.console.progress import JobObserver
from pipeline.methods.method import Task
from pipeline.units.curves import Predict
from pipeline.units.units import Forward, ShardDone

LONG = {"LAYER": GroupReport(ranks={"value": 48, "mlp": 4864, "query_key": 40}, error=0.0123)}


def lines(width: int) -> list[str]:
    """A phase of two layers as a terminal of this width shows it."""
    shown = io.StringIO()
    observer = JobObserver(shown)
    observer.console = Console(file=shown, force_terminal=True, color_system=None, width=width)
    observer.live = True
    with observer:
        observer.phase("walk", 2, 1)
        observer.unit_done(Forward("dense", 0, 0), ShardDone({}, None, None, tokens=100))
        observer.layer_done("compress", 0, {f"layer {name}": report for name, report in LONG.items()} | LONG)
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in shown.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_broken_inside_a_word(width: int) -> None:
    shown = lines(width)
    for word in ("committed", "query_key", "4864,", "1.23e-02;", "1/2,", "tokens/s"):
        assert any(word in line for line in shown), word
    assert max(len(line) for line in shown if "━" not in line) <= width


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("phase", ["walk", "statistics", "score held-out-dense"])
def test_the_live_line_keeps_its_bar_and_what_matters_most(phase: str, width: int) -> None:
    """One line at each width: a bar, the time left of the job, and as much more as fits."""
    shown = io.StringIO()
    observer = JobObserver(shown)
    observer.console = Console(file=shown, force_terminal=True, color_system="standard", width=width)
    observer.live, observer.peak_bytes = True, {"one": 3 * 2**30}
    with observer:
        observer.expect(Eta([PlannedPhase(phase, 1000.0), PlannedPhase("assemble", 50_000.0)], layers=2))
        observer.phase(phase, 2, 2)
        observer.started -= 1234.0
        observer.unit_done(Forward("dense", 0, 0), ShardDone({}, None, None, tokens=1_000_000))
        assert observer.progress is not None
        observer.progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).replace("\r", "\n")
    (line,) = {line.rstrip() for line in text.splitlines() if " s left" in line}
    assert len(line) <= width
    assert line.count("━") + line.count("╸") + line.count("╺") >= 8
    assert re.search(r"job 25\d,\d{3} s left", line)
    assert ("layer 0" in line, "worker 3.00 GiB" in line) == (width > 40, width > 80), line
    assert "…" not in line or width == 40


def test_phases_have_names_that_say_something() -> None:
    assert any("phase compress layer by layer: 2 layers" in line for line in lines(160))


def test_a_phase_of_layers_alone_says_how_far_it_is() -> None:
    shown = io.StringIO()
    observer = JobObserver(shown)
    observer.console = Console(file=shown, force_terminal=True, color_system=None, width=160)
    observer.live = True
    with observer:
        observer.phase("curves", 4, 2)
        for name in ("attention", "mlp"):
            observer.unit_done(Predict(Task(2, name, ("q",), method=0), {}), None)
        observer.layer_done("curves", 2, {})
        assert (observer.state["layer"], observer.done_units, observer.total_units) == (2, 2, 8)
    assert "curves layer 2 committed, 1/4, " in shown.getvalue()
    assert "None" not in shown.getvalue()


def test_stages_add_up() -> None:
    observer = JobObserver(io.StringIO(), quiet=True)
    for name in ("checks", "start"):
        observer.stage(name)
    observer.phase("walk", 1, 1)
    observer.stage("assemble")
    observer.stage(None)
    assert list(observer.seconds) == ["checks", "start", "walk", "assemble"]
    assert observer.state == {}
