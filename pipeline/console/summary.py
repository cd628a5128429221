"""The end of a job as a person reads it: ranks and errors per layer, what is kept, where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

SEEN_LIMIT = 0.1  # of the passages of an evaluation text: what different texts share by themselves is less


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """To the terminal, or to another console."""
    console = console or Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)  # a path stays one word on one line
    if summary.get("already_finished"):
        now = "scored now" if summary.get("scored_now") else "nothing to do (`pipeline.verify` reads every byte)"
        say(f"{summary['output']}: finished before; {now}")
    console.print(_layer_table(summary["layers"]))
    console.print(_count_table(summary["counts"]))
    say(_time_line(summary["seconds"]))
    peaks = summary["peak_bytes"]
    workers = ", ".join(f"{peak / 2**20:,.0f}" for peak in peaks["workers"].values())
    say(f"peak memory in MiB: driver {peaks['driver'] / 2**20:,.0f}; workers {workers}")
    if held_out := summary.get("held_out"):
        say(held_out_line(held_out))
    if "perplexity" in summary["evaluation"]:
        found = summary["evaluation"]["perplexity"]
        say(f"perplexity {found['perplexity']:.4f} ({found['tokens']:,} tokens, windows of {found['window']})")
    say(f"output: {summary['output']}")


def held_out_line(found: Mapping[str, Any]) -> str:
    """How much was lost on text like the calibration text, but not of it."""
    return (
        f"held-out calibration text: perplexity {found['perplexity']:.4f}, dense {found['dense_perplexity']:.4f}; "
        f"divergence {found['divergence']:.3g} nats per token ({found['tokens']:,} tokens)"
    )


def seen_warning(seen: float) -> str:
    """What it means that a model was calibrated on the text that it is scored on."""
    return f"{seen:.0%} of the evaluation text occurs in the calibration samples, which flatters; score another text"


def compute_share(seconds: Mapping[str, Any]) -> float:
    """Share of the workers' busy time inside matrix products and decompositions."""
    units = seconds["units"].values()
    busy = sum(spent for _, spent, _ in units)
    return sum(computing for _, _, computing in units) / busy if busy else 0.0


def _layer_table(layers: list[Mapping[str, Any]]) -> Table:
    table = Table("layer", "group", "ranks", "relative error", "notes")
    for layer, entry in enumerate(layers):
        for group, report in entry["groups"].items():
            ranks = ", ".join(f"{name} {rank}" for name, rank in report["ranks"].items())
            error = report.get("error")
            notes = ", ".join(
                f"{key} {_short(value)}" for key, value in report.items() if key not in ("ranks", "error", "method")
            )
            table.add_row(str(layer), group, ranks, f"{error:.3e}" if error is not None else "", notes)
    return table


def _count_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table("", "dense", "compressed", "kept")
    for name, pair in counts.items():
        share = pair["compressed"] / pair["dense"] if pair["dense"] else 1.0
        table.add_row(name.replace("_", " "), f"{pair['dense']:,}", f"{pair['compressed']:,}", f"{share:.4f}")
    return table


def _time_line(seconds: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds["phases"].items())
    share = compute_share(seconds)
    return f"time: {seconds['total']:.1f} s ({phases}); workers inside products and decompositions: {share:.0%}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
