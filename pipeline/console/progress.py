"""Shows the progress of a job: a live display in a terminal, plain lines elsewhere, a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from manifests.entries import GroupReport
from pipeline.console.eta import Eta, Paces
from pipeline.console.expert_groups import extent, named, split_experts
from pipeline.console.printing import as_called, wrapped
from pipeline.units.curves import Predict
from pipeline.units.scores import WindowForward
from pipeline.units.units import Backward, Forward, Measure, Pair, ShardDone, Solve, SolveSizes, Unit

LOG = logging.getLogger("lamina")
COUNTED: dict[str, Any] = {  # in phases without forward units
    "measure": Measure,
    "curves": Predict,
    "compress": Solve | SolveSizes,
}
IMPORTANCE = ("job", "layer", "phase", "speed", "memory", "shard")  # order of the figures beside the bar
LEAST_NAME, LEAST_BAR, MOST_BAR, GAPS = 10, 8, 40, 2  # columns of the live line
SHOWN = {"walk": "compress layer by layer"}  # phases that are shown by another name


class JobObserver:
    """The driver's observer: displays and logs its reports. As a context manager, it starts and ends the display."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        """`quiet` shows nothing."""
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.console = Console(file=self.stream)
        self.live = self.console.is_terminal and not quiet
        self.state: dict[str, Any] = {}  # for `status`
        self.peak_bytes: Mapping[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.tokens = 0
        self.total_units = self.done_units = 0
        self.done_layers: Counter[str] = Counter()  # of the running phase, by the name that they are reported with
        self.started = time.monotonic()
        self.earlier: Paces = {}  # of an earlier run of the job
        self.eta = Eta()
        self.progress: Progress | None = None
        self.column = BarColumn()
        self.bar: TaskID | None = None

    def __enter__(self) -> JobObserver:
        if self.live:
            columns = (TextColumn("{task.description}"), self.column, TextColumn("{task.fields[detail]}"))
            self.progress = Progress(*columns, console=self.console)
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stage(None)
        if self.progress is not None:
            self.progress.stop()

    def stage(self, name: str | None, layers: int | None = None) -> None:
        """End the running phase, and begin the named one if any. `layers`: their number, if the phase has layers."""
        self._close_phase()
        self.started, self.tokens = time.monotonic(), 0
        self.done_units = self.total_units = 0
        self.done_layers.clear()
        self.state = {"phase": name} if name else {}
        self.eta.begin(name or "", layers)

    def show_memory_of(self, peak_bytes: Mapping[str, int]) -> None:
        """Show the largest of the workers' peaks from now on.

        `peak_bytes`: worker -> bytes; it is read again each time.
        """
        self.peak_bytes = peak_bytes

    def phase(self, name: str, layers: int, units_per_layer: int) -> None:
        """Begin a phase of `layers` layers with `units_per_layer` forward units each, or units of `COUNTED`."""
        self.stage(name, layers)
        self.total_units = max(1, layers * units_per_layer)
        self.state |= {"layers": layers, "layer": None}
        self.say(f"phase {SHOWN.get(name, name)}: {layers} layers")
        if self.progress is not None:
            self.bar = self.progress.add_task("", total=self.total_units, detail="")
            self._update()

    def unit_done(self, unit: Unit, result: Any) -> None:
        """Count a finished unit."""
        self.state |= {"unit": unit.key, "done": self.done_units, "of": self.total_units}
        if isinstance(unit, Forward | Pair | Backward | WindowForward) and isinstance(result, ShardDone):
            self.tokens += result.tokens
            self.done_units += 1
            self.state |= {"layer": unit.layer, "shard": unit.shard}
            self._update()
        elif isinstance(unit, COUNTED.get(self.state.get("phase", ""), ())):
            self.done_units += 1
            self.state["layer"] = unit.task.layer
            self._update()

    def step_done(self, step: int, of: int, loss: float, seconds_left: float) -> None:
        """Count a step of a training. `seconds_left`: to its end."""
        remaining = self.eta.left(time.monotonic() - self.started, step / of, seconds_left)
        job_left = seconds_left if remaining is None else round(remaining, 1)
        self.state |= {"unit": f"heal/{step}", "done": step, "of": of, "seconds_left": job_left, "loss": loss}

    def layer_done(self, phase: str, layer: int, summary: Mapping[str, GroupReport]) -> None:
        """Report a layer as committed, or as done if nothing of it is stored."""
        groups, experts = split_experts(summary)
        lines = [f"{group}: {_group_figures(report)}" for group, report in groups.items()]
        lines += [f"experts: {_expert_figures(experts)}"] if experts else []
        figures = "; ".join(lines)
        state = "done" if phase == "evaluate" else "committed"
        self.done_layers[phase] += 1
        of = f", {self.done_layers[phase]}/{self.state['layers']}" if self.state.get("layers") else ""
        self.say(f"{phase} layer {layer} {state}{f' ({figures})' if figures else ''}{of}{self._rate()}")

    def repaired(self, reason: str, keys: Sequence[str]) -> None:
        """Report that stored data was corrupt or lost, and which entries are computed again."""
        self.say(f"repairing: {reason}; done again: {', '.join(keys) or 'the current layer'}", logging.WARNING)

    def say(self, line: str, level: int = logging.INFO) -> None:
        """Write a line to the log file and to the terminal."""
        LOG.log(level, line.removeprefix("WARNING: "))  # a line of the log begins with its level
        line = as_called(line)
        if self.progress is not None:
            line = wrapped(line, self.console.width)
            self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)  # without breaks in paths
        elif not self.quiet:
            print(line, file=self.stream, flush=True)

    @property
    def saved_state(self) -> dict[str, Any]:
        """The state and the paces of the job, stored beside its lock for a run that resumes."""
        return {**self.state, "paces": {**self.earlier, **self.eta.paces()}}

    def expect(self, eta: Eta) -> None:
        """Set the phases ahead of the job, the running phase included."""
        self.earlier = {**self.earlier, **self.eta.paces()}
        self.eta = eta
        self.eta.earlier = self.earlier
        self.eta.begin(self.state.get("phase", ""))

    def _update(self) -> None:
        if self.progress is not None and self.bar is not None:
            phase, width = self.state["phase"], self.console.width
            name = shorten(SHOWN.get(phase, phase), max(LEAST_NAME, width // 3 - GAPS))
            detail = self._detail(width - len(name) - LEAST_BAR - GAPS)
            self.column.bar_width = max(LEAST_BAR, min(MOST_BAR, width - len(name) - len(detail) - GAPS))
            completed = min(self.done_units, self.total_units)
            self.progress.update(self.bar, completed=completed, description=name, detail=detail)

    def _detail(self, room: int) -> str:
        """Return the figures that fit into `room` columns beside the bar, chosen by importance."""
        where = [name for name in ("layer", "shard") if self.state.get(name) is not None]
        figures = {name: f"{name} {self.state[name]}" for name in where} | self._figures()
        chosen: list[str] = []
        for name in (name for name in IMPORTANCE if name in figures):
            if len(_joined(figures, [*chosen, name])) <= room:
                chosen.append(name)
        return _joined(figures, chosen)

    def _rate(self) -> str:
        return "".join(f", {figure}" for figure in self._figures().values())

    def _figures(self) -> dict[str, str]:
        """Format speed, the time left and memory, unless unknown."""
        spent = time.monotonic() - self.started
        share = self.done_units / max(1, self.total_units)
        figures: dict[str, str] = {}
        if self.tokens and spent > 0:
            figures["speed"] = f"{self.tokens / spent:,.0f} tokens/s"
        if 0 < self.done_units < self.total_units:
            figures["phase"] = f"{self.eta.phase_left(spent, share):,.0f} s left"
        if (remaining := self.eta.left(spent, min(1.0, share))) is not None:
            self.state["seconds_left"] = round(remaining, 1)
            figures["job"] = f"job {remaining:,.0f} s left"
        if self.peak_bytes:
            figures["memory"] = f"worker {max(self.peak_bytes.values()) / 2**30:.2f} GiB"
        return figures

    def _close_phase(self) -> None:
        name = self.state.get("phase")
        if name:
            spent = time.monotonic() - self.started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.eta.end(spent)
        if self.progress is not None and self.bar is not None:
            self.progress.remove_task(self.bar)
            self.bar = None


def shorten(name: str, width: int) -> str:
    """Return the name; if it is wider than `width`, its end is replaced by an ellipsis."""
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _joined(figures: Mapping[str, str], chosen: Sequence[str]) -> str:
    return ", ".join(figure for name, figure in figures.items() if name in chosen)


def _expert_figures(experts: Mapping[int, Sequence[GroupReport]]) -> str:
    """Return the least and the largest of the figures of a layer's experts, and experts with few tokens."""
    reports = [report for each in experts.values() for report in each]
    names = dict.fromkeys(name for report in reports for name in report.ranks)
    parts = [f"{name} {extent(each.ranks[name] for each in reports if name in each.ranks)}" for name in names]
    errors = [report.error for report in reports if isinstance(report.error, float)]
    parts += [f"error {extent(errors, '.2e')}"] if errors else []
    for note, text in {"unseen": "no tokens", "few_tokens": "few tokens"}.items():
        numbers = [number for number, each in experts.items() if any(note in report.as_json() for report in each)]
        parts += [f"{text} for {named(numbers)}"] if numbers else []
    return ", ".join(parts)


def _group_figures(report: GroupReport) -> str:
    ranks = ", ".join(f"{name} {rank}" for name, rank in report.ranks.items())
    error = report.error
    return ranks + (f", error {error:.2e}" if isinstance(error, float) else "")
