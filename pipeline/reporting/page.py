"""The page of a report: one HTML file without external resources, for screens of any width and for paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader

from pipeline.evaluation.losses import all_warnings, shown_perplexity
from pipeline.evaluation.text_remarks import text_lines
from pipeline.methods.registry import layers_of
from pipeline.reporting import tables
from pipeline.reporting.drawing import Plot
from pipeline.reporting.figures import draw_figures
from pipeline.reporting.run_data import Run
from pipeline.reporting.summary import settings_lines
from pipeline.reporting.tables import Table

TEMPLATE = "page.html"
STATES = {
    "interrupted": "interrupted: run the same command again to resume",
    "stopped": "stopped without a message, perhaps killed: run the same command again to resume",
}
KEPT = {
    "decoder_parameters": "decoder numbers kept",
    "bytes": "bytes kept",
    "cache_bytes_per_token": "cache kept",
}


@dataclass(frozen=True)
class Section:
    """A heading, and below it plots, tables or texts, lines, and what is folded below titles. Empty, it is not shown.

    `beside`: put the tables side by side.
    """

    title: str
    plots: Sequence[Plot] = ()
    parts: Sequence[Table | str] = ()
    lines: Sequence[str] = ()
    folded: Mapping[str, Table | str] = field(default_factory=dict)
    beside: bool = False

    def __bool__(self) -> bool:
        return any((*self.plots, *self.parts, *self.lines, *self.folded.values()))


def render(run: Run) -> str:
    """Render the whole file. The same run gives the same bytes with the same versions of the libraries."""
    plots, summary = draw_figures(run), run.summary
    sizes = (tables.kept(run), tables.scores(run), tables.tasks(run), tables.texts(run))
    lines = [*settings_lines(summary.get("evaluation", {})), *text_lines(summary)]
    layers = {"Refinement": tables.refinement(run), "All layers": tables.layers(run)}
    times = (tables.seconds(run), tables.units(run), tables.peaks(run))
    origin: dict[str, Table | str] = {"Manifest": run.manifest_text, "Digests": tables.digests(run)}
    return render_page(
        PurePosixPath(run.path).name,
        ", ".join(entry.method for entry in run.manifest.methods),
        [
            Section("What is kept", parts=sizes, lines=lines),
            Section("Ranks", plots["Ranks"]),
            Section(
                "Loss curves",
                plots["Loss curves"],
                [tables.expected(run)],
                folded={"Chosen points": tables.predictions(run)},
            ),
            Section("Errors and conditions", plots["Errors and conditions"], folded=layers),
            Section("Time", plots["Time"], times, beside=True),
            Section("Plan and measurement", parts=[tables.plan_and_measurement(run)]),
            Section("Provenance", parts=[tables.versions(run)], folded=origin),
            Section("Log", parts=["\n".join(run.log)]),
        ],
        paths=f"{run.manifest.model.source} → {run.manifest.output}",
        state=run.state,
        state_text=STATES.get(run.state, run.state),
        error=run.ended if run.ended and run.ended.get("error") else None,
        warnings=all_warnings(summary),
        facts=[("layers compressed", f"{len(run.layers)} of {len(layers_of(run.tasks))}"), *_facts(run)],
    )


def render_page(name: str, about: str, sections: Sequence[Section], **head: Any) -> str:
    """Fill the template. `about`: the line below the heading; `head`: other variables of the template's head."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(TEMPLATE).render(name=name, about=about, sections=sections, **head)


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return the most important figures: shares kept, perplexity and time once the job is done."""
    chosen = run.chosen_losses.values()
    predicted = [("predicted loss, nats per token", f"{math.fsum(chosen):.4g}")] if chosen else []
    if not run.summary:
        return predicted
    counts, scores = run.summary["counts"], run.summary.get("evaluation", {})
    shares = {name: pair["compressed"] / pair["dense"] for name, pair in counts.items() if pair["dense"]}
    facts = [(label, f"{shares[name]:.2%}") for name, label in KEPT.items() if name in shares]
    if "perplexity" in scores:
        facts.append(("perplexity", shown_perplexity(scores["perplexity"]["perplexity"])))
    if prediction := run.summary.get("prediction"):
        predicted.append(("measured loss, nats per token", f"{prediction['measured']:.4g}"))
    if samples := run.summary.get("samples"):
        facts.append(("calibration samples chosen", f"{samples['samples']:,} of {samples['counts'][-1]:,}"))
    return [*facts, *predicted, ("time", f"{run.summary['seconds']['total']:,.0f} s")]
