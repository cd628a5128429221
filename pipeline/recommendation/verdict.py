"""Summarises the plan of a recommended job in five lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.console.amounts import amount_of_bytes
from pipeline.job.plan_report import time_line
from pipeline.recommendation.settings import USUAL_SHARE, Goal


@dataclass(frozen=True)
class Verdict:
    """The plan of a job, its goal, the engines that will load its output, and remarks on its text.

    `serving`: lines about the engines, as in the plan. `choice`: lines about the recipe for a memory.
    """

    plan: Mapping[str, Any]
    goal: Goal
    engines: Sequence[str]
    remarks: Sequence[str] = ()
    serving: Sequence[str] = ()
    choice: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the remarks, and lines on memory, size before and after, time, disk, and engines."""
        yield from self.remarks
        yield from self.plan["limits"] or [self._fits()]
        yield self._size()
        yield from self.choice
        yield f"time   {time_line(self.plan)}"
        output, run_dir = (amount_of_bytes(self.plan[name]) for name in ("output_bytes", "run_dir_bytes"))
        yield f"disk   {output} for the output, {run_dir} for the run directory"
        yield from self.serving or [f"serves {', '.join(self.engines)}"]

    def _fits(self) -> str:
        workers, plan = self.plan["workers"], self.plan
        each = amount_of_bytes(plan["worker_host_bytes"])
        device = f" and {amount_of_bytes(plan['worker_device_bytes'])} of a GPU" if plan["worker_device_bytes"] else ""
        count = f"{workers} worker{'s' if workers > 1 else ''}"
        return f"fits   {count} with {each} of memory{device} each, and a driver with " + amount_of_bytes(
            plan["driver_peak_bytes"]
        )

    def _size(self) -> str:
        before, after = self.plan["source_bytes"], self.plan["output_bytes"]
        if self.goal.field == "max_loss":
            return f"size   {amount_of_bytes(before)} before; after, the smallest within the loss"
        line = f"size   {amount_of_bytes(before)} before, at most {amount_of_bytes(after)} after ({after / before:.2f})"
        if after < before or self.goal.fit is not None:
            return line
        return f"{line}; no smaller: `--bytes {USUAL_SHARE}` chooses ranks and bits by the stored bytes"
