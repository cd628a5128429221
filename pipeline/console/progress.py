"""What one sees while a job runs: a live display in a terminal, plain lines elsewhere, a log file."""

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
from pipeline.console.outlook import Outlook
from pipeline.units.curves import Predict
from pipeline.units.scores import WindowForward
from pipeline.units.units import Backward, Forward, Measure, Pair, ShardDone, Solve, SolveSizes, Unit

LOG = logging.getLogger("lamina")
COUNTED: dict[str, Any] = {  # in phases without forward units
    "measure": Measure,
    "curves": Predict,
    "compress": Solve | SolveSizes,
}
SHOWN = {"walk": "compress layer by layer"}  # phases whose name says too little


class JobObserver:
    """See `pipeline.driver.interfaces.Observer`. Use as a context manager, which starts and ends the display."""

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
        self.done_layers: Counter[str] = Counter()  # of the running phase, by what was done
        self.started = time.monotonic()
        self.outlook = Outlook()
        self.progress: Progress | None = None
        self.bar: TaskID | None = None

    def __enter__(self) -> JobObserver:
        if self.live:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[detail]}"))
            self.progress = Progress(*columns, console=self.console)
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stage(None)
        if self.progress is not None:
            self.progress.stop()

    def stage(self, name: str | None, layers: int | None = None) -> None:
        """Something begins (None: nothing more), of so many layers if it has any, and what was before ends."""
        self._close_phase()
        self.started, self.tokens = time.monotonic(), 0
        self.done_units = self.total_units = 0
        self.done_layers.clear()
        self.state = {"phase": name} if name else {}
        self.outlook.begin(name or "", layers)

    def show_memory_of(self, peak_bytes: Mapping[str, int]) -> None:
        """Worker -> peak bytes, which may change meanwhile: the largest is shown."""
        self.peak_bytes = peak_bytes

    def phase(self, name: str, layers: int, units_per_layer: int) -> None:
        """A phase begins: `layers` layers of `units_per_layer` forward units, or of those of `COUNTED`."""
        self.stage(name, layers)
        self.total_units = max(1, layers * units_per_layer)
        self.state |= {"layers": layers, "layer": None}
        self.say(f"phase {SHOWN.get(name, name)}: {layers} layers")
        if self.progress is not None:
            self.bar = self.progress.add_task(SHOWN.get(name, name), total=self.total_units, detail="")

    def unit_done(self, unit: Unit, result: Any) -> None:
        """A unit is finished."""
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

    def layer_done(self, phase: str, layer: int, summary: Mapping[str, GroupReport]) -> None:
        """A layer is committed, or, where nothing is kept of it, done."""
        figures = "; ".join(f"{group}: {_figures(report)}" for group, report in summary.items())
        state = "done" if phase == "evaluate" else "committed"
        self.done_layers[phase] += 1
        of = f", {self.done_layers[phase]}/{self.state['layers']}" if self.state.get("layers") else ""
        self.say(f"{phase} layer {layer} {state}{f' ({figures})' if figures else ''}{of}{self._rate()}")

    def repaired(self, reason: str, keys: Sequence[str]) -> None:
        """Stored data was corrupt or lost."""
        self.say(f"repairing: {reason}; done again: {', '.join(keys) or 'the layer in hand'}", logging.WARNING)

    def say(self, line: str, level: int = logging.INFO) -> None:
        """One line to the log file and, unless a live display shows it, to the terminal."""
        LOG.log(level, line)
        if self.progress is not None:
            self.progress.console.print(line, highlight=False, markup=False)  # broken between words
        elif not self.quiet:
            print(line, file=self.stream, flush=True)

    def expect(self, outlook: Outlook) -> None:
        """What is ahead of the job, the running phase included."""
        self.outlook = outlook
        self.outlook.begin(self.state.get("phase", ""))

    def _update(self) -> None:
        if self.progress is not None and self.bar is not None:
            where = " ".join(f"{name} {self.state[name]}" for name in ("layer", "shard") if name in self.state)
            detail = f"{where}{self._rate()}"
            self.progress.update(self.bar, completed=min(self.done_units, self.total_units), detail=detail)

    def _rate(self) -> str:
        spent = time.monotonic() - self.started
        share = self.done_units / max(1, self.total_units)
        parts = [f", {self.tokens / spent:,.0f} tokens/s"] if self.tokens and spent > 0 else []
        if 0 < self.done_units < self.total_units:
            parts.append(f", {spent / share * (1 - share):,.0f} s left")
        if (left := self.outlook.left(spent, min(1.0, share))) is not None:
            self.state["seconds_left"] = round(left, 1)
            parts.append(f", job {left:,.0f} s left")
        if self.peak_bytes:
            parts.append(f", worker {max(self.peak_bytes.values()) / 2**30:.2f} GiB")
        return "".join(parts)

    def _close_phase(self) -> None:
        name = self.state.get("phase")
        if name:
            spent = time.monotonic() - self.started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.outlook.end(spent)
        if self.progress is not None and self.bar is not None:
            self.progress.remove_task(self.bar)
            self.bar = None


def _figures(report: GroupReport) -> str:
    ranks = ", ".join(f"{name} {rank}" for name, rank in report.ranks.items())
    error = report.error
    return ranks + (f", error {error:.2e}" if isinstance(error, float) else "")
